"""Hooks of mkdocs: the README is the first page, and links that leave ``docs`` lead somewhere.

Pages are written to be read in a checkout, too. There a link like ``../benchmarks/results/x.png``
leads to a file beside ``docs``; such files are copied into the site.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"(\]\()\.\./([^)#\s]+)")
FROM_README = re.compile(r"(\]\()docs/([^)\s]*)")
BESIDE_DOCS = re.compile(r"(\]\()(benchmarks/[^)\s]+)")
COPIED = "files"
"""The folder of the site with files from outside of ``docs``."""


def on_files(files: Any, config: Any) -> Any:
    """Add the first page, and the files that pages refer to."""
    readme = (ROOT / "README.md").read_text()
    readme = FROM_README.sub(r"\1\2", BESIDE_DOCS.sub(r"\1../\2", readme))
    files.append(File.generated(config, "index.md", content=readme))
    pages = [file.content_string for file in files.documentation_pages()]
    for name in sorted({match[2] for page in pages for match in OUTSIDE.finditer(page)}):
        source = str(ROOT / name)
        files.append(File.generated(config, f"{COPIED}/{name}", abs_src_path=source))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links lead to the copies."""
    return OUTSIDE.sub(rf"\1{COPIED}/\2", markdown)
