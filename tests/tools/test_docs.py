"""Links within README, docs and the journal lead somewhere."""

import re

import pytest

from benchmarks.common import ROOT
from benchmarks.tables.__main__ import pages

LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(path):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    broken = []
    for name, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            broken.append(name)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{name}#{anchor}")
    assert not broken
