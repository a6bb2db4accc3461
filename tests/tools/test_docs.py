"""Links within README, docs and the journal lead somewhere, and files that they name are there."""

import re

import pytest

from benchmarks.common import ROOT
from benchmarks.tables.__main__ import pages

LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
FILE = re.compile(r"`((?:\w+/)+\w+\.(?:py|cpp|h|sh|json))`")
FOLDERS = ("", "csrc", "vllm_kvretrieval")
ELSEWHERE = {"models/kv_cache.py"}
"""A file of ShadowKV's authors."""
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


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files(page):
    """A file is named by its path in the repository, or in one of these folders."""
    named = {name for name in FILE.findall(page.read_text()) if "NAME" not in name} - ELSEWHERE
    absent = {name for name in named if not any((ROOT / at / name).exists() for at in FOLDERS)}
    assert not absent
