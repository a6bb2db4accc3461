"""docs/surprises.md, made of the tests beside this file."""

import re

from benchmarks.common import ROOT
from tests.surprises.rows import Surprise, modules, rows
from vllm_kvretrieval.compat import TESTED

PAGE = ROOT / "docs" / "surprises.md"
LOCK = ROOT / "requirements" / "runtime.txt"
OTHERS = ROOT / "requirements" / "interpreter.txt"
COLUMNS = ("one would expect", "what happens", "where", "what helps")

BEGINNING = """\
<!-- Made by `python -m tests.surprises` from the tests in tests/surprises. -->
# Surprises

What vLLM and the libraries below it do that one would not expect, where long contexts and the
prefix cache meet it. Each row is a test that runs under {releases} (`make test`, `make test-next`),
so that a change is seen; earlier releases have not been looked at. A row without a version holds
in {both}. Paths are those of the installed package. The last column says what helps, and what this
plug-in does with `--attention-backend` and one of [our methods](methods.md); where vLLM's own
attention serves, nothing is changed.
"""


def page() -> str:
    """The page's text."""
    releases = " and ".join(f"vLLM {release}" for release in TESTED)
    parts = [BEGINNING.format(releases=releases, both=" and ".join(TESTED))]
    for module in modules():
        if found := rows(module):
            title, _, about = (module.__doc__ or "").strip().partition("\n")
            parts.append(_section(title.rstrip("."), about.strip(), found))
    return "\n".join(parts)


def _section(title: str, about: str, found: list[Surprise]) -> str:
    lines = [f"## {title}", ""]
    lines += [about, ""] if about else []
    lines += [_cells(*COLUMNS), _cells(*["---"] * len(COLUMNS))]
    lines += [_cells(row.expected, _happens(row), _where(row), row.remedy) for row in found]
    return "\n".join(lines) + "\n"


def _cells(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


def _happens(row: Surprise) -> str:
    """What happens, with versions where they differ."""
    if not row.newer:
        return row.happens
    texts = [f"{TESTED[0]}: {row.happens}"]
    return "<br>".join(texts + [f"since {since}: {text}" for since, text in row.newer.items()])


def _where(row: Surprise) -> str:
    files = "<br>".join(f"`{name.removeprefix('vllm/')}`" for name in row.source)
    return files if row.package == "vllm" else f"{row.package} {pinned(row.package)}: {files}"


def pinned(package: str) -> str:
    """The version of a package that tests run with.

    Raises:
        LookupError: None is pinned.
    """
    for file in (LOCK, OTHERS):
        if found := re.search(rf"^{package}==([\w.+]+)", file.read_text(), re.MULTILINE):
            return found[1]
    raise LookupError(f"{package} is not pinned")
