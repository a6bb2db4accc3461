"""Figures in sentences, each a cell of a table of result files.

A page binds the number behind a short comment to a cell, which the end of the page says::

    takes <!--f1-->138 s
    ...
    <!-- figures:
    f1: first first-token.json @ 32,768 @ full, s
    -->

In front of the first ``@`` stand the words of a table, as behind ``table:``. The next part is the
beginning of its row, cells by ``;``. The last one is the beginning of a heading; where several
headings begin alike, others of columns before it lead there, by ``;``. The number is the first one
in the cell, rounded to the decimals that the page has. Two cells with `` / `` between them are a
quotient, in percent if `` %`` follows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.tables.markdown import CELL

BEGINNING = re.compile(r"<!--f\d+-->")
MARK = re.compile(r"<!--(?P<name>f\d+)-->(?P<figure>\d[\d,]*(?:\.\d+)?)(?P<unit> ?%)?")
BOUND = re.compile(r"<!-- figures:\n(?P<lines>(?:f\d+: [^\n]+\n)*)-->")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
BEGINS_LINE = re.compile(r"^\s*(?:[-*] +)?<!--f\d+-->", re.MULTILINE)


class FigureError(ValueError):
    """A page asks for a figure that no table has."""


def rendered(text: str, table: Callable[[str], str]) -> str:
    """Return a page's text with every bound figure made anew.

    Args:
        text: The page.
        table: Makes the table of some words, in Markdown.

    Raises:
        FigureError: a comment without a number behind it, one at the beginning of a line (which
            Markdown takes for HTML up to its end), or one that names no cell, or several; a name
            that is bound twice, to nothing, or for no figure.
    """
    if len(BEGINNING.findall(text)) != len(MARK.findall(text)):
        raise FigureError("a comment <!--f1--> has no number right behind it")
    if place := BEGINS_LINE.search(text):
        line = text.count("\n", 0, place.start()) + 1
        raise FigureError(f"line {line} begins with a figure's comment: put a word before it")
    bound = _bound(text)
    return MARK.sub(lambda mark: _figure(mark, bound[mark["name"]], table), text)


def _bound(text: str) -> dict[str, str]:
    """What the end of a page says of its figures, by their names."""
    lines = [line for block in BOUND.finditer(text) for line in block["lines"].splitlines()]
    pairs = [line.split(": ", 1) for line in lines]
    names, used = [name for name, _ in pairs], [mark["name"] for mark in MARK.finditer(text)]
    if wrong := (Counter(names) - Counter({*used})) + (Counter(used) - Counter(names)):
        raise FigureError(f"not bound once to a cell, for one figure: {', '.join(sorted(wrong))}")
    return dict(pairs)


def _figure(mark: re.Match[str], words: str, table: Callable[[str], str]) -> str:
    unit = mark["unit"] or ""
    values = [_value(reference, table) for reference in words.split(" / ")]
    if len(values) > 2:
        raise FigureError(f"figure {words!r}: a quotient has two cells")
    value = values[0] if len(values) == 1 else values[0] / values[1] * (100 if unit else 1)
    decimals = len(mark["figure"].partition(".")[2])
    return f"<!--{mark['name']}-->{value:,.{decimals}f}{unit}"


def _value(reference: str, table: Callable[[str], str]) -> float:
    try:
        words, row, column = reference.split(" @ ")
    except ValueError:
        raise FigureError(f"figure {reference!r} is no TABLE @ ROW @ HEADING") from None
    header, _, *rows = map(_cells, table(words).splitlines())
    beginning = row.split("; ")
    found = [cells for cells in rows if cells[: len(beginning)] == beginning]
    if len(found) != 1:
        raise FigureError(f"figure {reference!r}: {len(found)} rows begin so")
    cell = found[0][_column(header, column.split("; "), reference)]
    number = NUMBER.search(cell)
    if number is None:
        raise FigureError(f"figure {reference!r}: no number is in the cell {cell!r}")
    return float(number[0].replace(",", ""))


def _column(header: Sequence[str], headings: Sequence[str], reference: str) -> int:
    place = -1
    for heading in headings:
        later = (n for n in range(place + 1, len(header)) if header[n].startswith(heading))
        if (place := next(later, -1)) < 0:
            raise FigureError(f"figure {reference!r}: no column {heading!r} is there")
    return place


def _cells(line: str) -> list[str]:
    """The cells of a row, without emphasis."""
    return [cell.strip().replace("*", "").replace("`", "") for cell in CELL.split(line)[1:-1]]
