"""The page of surprises is made of these tests, and names files that are there."""

import importlib.util
from pathlib import Path

import pytest

from tests.surprises.page import PAGE, page
from tests.surprises.rows import modules, rows

ROWS = [row for module in modules() for row in rows(module)]


def test_the_page_is_as_written():
    assert PAGE.read_text() == page(), "write it: python -m tests.surprises"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.test)
def test_sources(row):
    """In the release that is installed."""
    found = importlib.util.find_spec(row.package)
    assert found is not None
    assert found.origin is not None
    for name in row.source:
        assert (Path(found.origin).parents[1] / name).exists(), name
