"""Hooks of mkdocs: the README is the first page, and links that leave ``docs`` lead somewhere.

Pages are written to be read in a checkout, too. There a link like ``../benchmarks/results/x.png``
leads to a file beside ``docs``; such files are copied into the site. The journal of measurements
becomes pages of it, outside the navigation.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"(\]\()\.\./([^)#\s]+)")
FROM_README = re.compile(r"(\]\()docs/([^)\s]*)")
BESIDE_DOCS = re.compile(r"(\]\()((?:benchmarks/|CITATION)[^)\s]+)")
COPIED = "files"
"""The folder of the site with files from outside of ``docs``."""
JOURNAL = "benchmarks/journal"
TO_DOCS = re.compile(r"(\]\()\.\./\.\./docs/")
CODE = re.compile(r"(<code[^>]*>)(.*?)(</code>)", re.DOTALL)
OPTION = re.compile(r"(?<!\S)--?[A-Za-z][^\n<]*?(?: \\(?=\n))?(?=\s+--?[A-Za-z]|\s*\n|$)")
PERCENT = re.compile(r"(?<=\d) %")


def on_files(files: Any, config: Any) -> Any:
    """Add the first page, and the files that pages refer to."""
    readme = (ROOT / "README.md").read_text()
    readme = FROM_README.sub(r"\1\2", BESIDE_DOCS.sub(r"\1../\2", readme))
    files.append(File.generated(config, "index.md", content=readme))
    pages = [file.content_string for file in files.documentation_pages()]
    names = {match[2] for page in pages for match in OUTSIDE.finditer(page)}
    names |= {f"{JOURNAL}/{path.name}" for path in (ROOT / JOURNAL).glob("*.md")}
    for name in sorted(names):
        source = str(ROOT / name)
        files.append(File.generated(config, f"{COPIED}/{name}", abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to the copies, and those of the journal to the pages."""
    if page.file.src_uri.startswith(f"{COPIED}/{JOURNAL}/"):
        page.meta["search"] = {"boost": 0.1}
        return TO_DOCS.sub(r"\1../../../", markdown)
    return OUTSIDE.sub(rf"\1{COPIED}/\2", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Let wide commands wrap in front of an option; a page of one heading needs no contents.

    Numbers and their percent signs stay on one line.
    """
    if not any(heading.children for heading in page.toc):
        page.meta["hide"] = ["toc"]
    option = r'<span class="option">\g<0></span>'
    html = CODE.sub(lambda code: code[1] + OPTION.sub(option, code[2]) + code[3], html)
    return PERCENT.sub("\N{NO-BREAK SPACE}%", html)
