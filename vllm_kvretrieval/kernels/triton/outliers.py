"""Outliers: pages whose keys are least like the means that they are scored by (ShadowKV)."""

import triton
import triton.language as tl

from vllm_kvretrieval.kernels.triton.ranking import bar_of, find_best, is_beyond, order_of

_SHARED = tl.constexpr(".cg")
"""Reads past a multiprocessor's own cache what other programs of the launch have written."""


@triton.jit
def outlier_units(select, SHARE: tl.constexpr):
    """How many of so many selected pages are outliers: :meth:`Chooser.outlier_units`."""
    share = tl.full([], SHARE, tl.float64)  # rounds as the CPU does
    return tl.maximum((select.to(tl.float64) * share).to(tl.int32), (select > 1).to(tl.int32))


@triton.jit
def _unlike(cosines, page, entries, PARTS: tl.constexpr):
    """How unlike the means of pages a key of theirs is: minus its cosine, or no number."""
    most = tl.full(page.shape, float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        entry = page * PARTS + part
        cosine = tl.load(
            cosines + entry, mask=entry < entries, other=float("inf"), cache_modifier=_SHARED
        )
        most = tl.maximum(most, -cosine, propagate_nan=tl.PropagateNan.ALL)
    return most


@triton.jit
def find_bar(
    cosines,
    room,
    entries,
    sink,
    end,
    count,
    tiles,
    PARTS: tl.constexpr,
    PAGES: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Find what is an outlier, by :func:`is_outlier`; of equal pages the earlier ones are.

    Args:
        cosines: Lowest cosines of the entries of one KV head of a row.
        room: As many floats, written.
        entries: Entries of the context.
        sink, end: Outliers are among the pages from one to before the other.
        count: How many there are, at most ``WIDTH``.
        tiles: Of ``PAGES`` pages each, which are ranked at a time; ``TILES`` at most.

    Returns:
        The key of the last of the outliers, and its page.
    """
    if TILES == 1:
        page = tl.arange(0, PAGES)
        unlike = _unlike(cosines, page, entries, PARTS)
        best, _ = find_best(unlike, (page >= sink) & (page < end), count)
        return bar_of(order_of(unlike, best), page, best)
    for tile in tl.range(tiles):
        page = tile * PAGES + tl.arange(0, PAGES)
        unlike = _unlike(cosines, page, entries, PARTS)
        best, rank = find_best(unlike, (page >= sink) & (page < end), count)
        to_best = room + tile * (2 * WIDTH) + rank
        tl.store(to_best, unlike, mask=best)
        tl.store(to_best + WIDTH, page.to(tl.float32, bitcast=True), mask=best)
    tl.debug_barrier()
    slot = tl.arange(0, TILES * WIDTH)
    tile, rank = slot // WIDTH, slot % WIDTH
    between = tl.minimum(end, (tile + 1) * PAGES) - tl.maximum(sink, tile * PAGES)
    found = rank < tl.minimum(count, between)
    of_best = room + tile * (2 * WIDTH) + rank
    unlike = tl.load(of_best, mask=found, other=0.0)
    page = tl.load(of_best + WIDTH, mask=found, other=0.0).to(tl.int32, bitcast=True)
    best, _ = find_best(unlike, found, count)
    return bar_of(order_of(unlike, best), page, best)


@triton.jit
def is_outlier(cosines, page, entries, bar, last, PARTS: tl.constexpr):
    """Whether pages between sink and window are outliers, bool [n], by what `find_bar` finds."""
    keys = order_of(_unlike(cosines, page, entries, PARTS), page >= 0)
    return is_beyond(keys, page, bar, last)
