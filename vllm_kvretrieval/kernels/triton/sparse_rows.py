"""Outliers of rows that are encoded, as ``retrieval/codec/sparse.py`` has them.

The bytes are the same, but for those of what is no number. Each row offers its lowest and its
highest element, which are numbered row by row. A unit ends with the list of the outliers of its
keys, and that of its values: their positions in these rows, of 16 bits, and then themselves, in the
cache's dtype.
"""

import triton
import triton.language as tl

from vllm_kvretrieval.kernels.triton.ranking import bar_of, find_best, is_beyond, order_of
from vllm_kvretrieval.kernels.triton.rows_codec import element_at, rounded


@triton.jit
def two_lowest(x, mask, element):
    """Of the rows of a tile: the lowest element, its first place, and the lowest of the others.

    Args:
        x: float32 [rows, n].
        mask: Which elements there are.
        element: int32 [n]; their places in the rows.

    Returns:
        [rows] each; of rows that cannot be encoded, anything.
    """
    low = tl.min(tl.where(mask, x, float("inf")), 1)
    place = tl.min(tl.where(mask & (x == low[:, None]), element[None, :], 1 << 16), 1)
    others = mask & (element[None, :] != place[:, None])
    return low, place, tl.min(tl.where(others, x, float("inf")), 1)


@triton.jit
def lower_of(low, place, second, other_low, other_place, other_second):
    """The result of :func:`two_lowest` for two tiles, of which the other has later elements."""
    less = other_low < low
    second = tl.where(less, tl.minimum(low, other_second), tl.minimum(second, other_low))
    return tl.where(less, other_low, low), tl.where(less, other_place, place), second


@triton.jit
def list_outliers(
    known,
    low,
    low_place,
    low_worth,
    high,
    high_place,
    high_worth,
    to,
    kind: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    ALL: tl.constexpr,
):
    """Keep the list of the outliers of a unit's rows.

    Args:
        known: bool [ALL]; which of the rows can be encoded.
        low, low_place, low_worth: [ALL]; their lowest elements, the places of these, and by how
            much the range of a row shrinks without it.
        high, high_place, high_worth: [ALL]; the same of their highest elements.
        to: Where the list goes.
        kind: The dtype of the cache.
        COUNT: How many outliers there are.

    Returns:
        The key of the last of the outliers, and its number, by which :func:`inner_ends` tells them.
    """
    number = tl.arange(0, 2 * ALL)
    worth = tl.interleave(tl.where(known, low_worth, 0.0), tl.where(known, high_worth, 0.0))
    place = tl.interleave(tl.where(known, low_place, 0), tl.where(known, high_place, 0))
    element = tl.interleave(tl.where(known, low, float("nan")), tl.where(known, high, float("nan")))
    there = number < 2 * ROWS
    best, rank = find_best(worth, there, COUNT)
    position = place + number // 2 * LENGTH
    positions = to.to(tl.pointer_type(tl.uint16), bitcast=True)
    tl.store(positions + rank, position.to(tl.uint16), mask=best)
    element = tl.where(element != 0, element, 0.0)  # zero has no sign
    elements = (to + 2 * COUNT).to(tl.pointer_type(kind), bitcast=True)
    tl.store(elements + rank, rounded(element, kind), mask=best)
    return bar_of(order_of(worth, there), number, best)


@triton.jit
def inner_ends(x, mask, row, element, known, low, high, bar, last):
    """The lowest and the highest elements of rows of a tile without their outliers.

    Args:
        x, mask, element: The whole rows; see :func:`two_lowest`.
        row: int32 [rows]; their numbers in the unit.
        known: Which of them can be encoded.
        low, high: The ends with outliers.
        bar, last: The result of :func:`list_outliers`.
    """
    _, _, next_low = two_lowest(x, mask, element)
    _, _, next_high = two_lowest(-x, mask, element)
    keys = order_of(tl.where(known, next_low - low, 0.0), row >= 0)
    low = tl.where(is_beyond(keys, 2 * row, bar, last), next_low, low)
    keys = order_of(tl.where(known, high + next_high, 0.0), row >= 0)
    return low, tl.where(is_beyond(keys, 2 * row + 1, bar, last), -next_high, high)


@triton.jit
def lay_outliers(
    lists,
    to,
    begin,
    TRANSPOSED: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    ALL: tl.constexpr,
    APART: tl.constexpr,
    TALL: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Lay the outliers of some rows over what these have been decoded to.

    Args:
        lists: The list of the unit's rows.
        to: The unit that is written.
        begin: The rows are ``TALL`` from this one on, and those ``APART`` behind these.
    """
    place = tl.arange(0, ALL)
    listed = place < COUNT
    positions = lists.to(tl.pointer_type(tl.uint16), bitcast=True)
    position = tl.load(positions + place, mask=listed, other=0).to(tl.int32)
    before = tl.load(positions + place - 1, mask=listed & (place > 0), other=0).to(tl.int32)
    row = position // LENGTH
    line = row % APART
    own = listed & (row < ROWS) & (line >= begin) & (line < begin + TALL)
    own = own & ((place == 0) | (position != before))  # an element may be lowest and highest
    elements = (lists + 2 * COUNT).to(tl.pointer_type(to.dtype.element_ty), bitcast=True)
    at = element_at(row, position % LENGTH, TRANSPOSED, HEAD_SIZE)
    tl.store(to + at, tl.load(elements + place, mask=own), mask=own)
