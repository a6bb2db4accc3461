"""Lists cut to the fewest of the selected pages that reach a share of the attention (Twilight)."""

import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import COLUMNS, Column, DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.triton.pooling import pool_pages
from vllm_kvretrieval.kernels.triton.ranking import order_of
from vllm_kvretrieval.kernels.triton.rows import read_budget, selecting
from vllm_kvretrieval.kernels.types import Chooser

_COLUMNS = tl.constexpr(COLUMNS)
_MASS = tl.constexpr(int(Column.MASS))


@triton.jit
def _cut_kernel(
    scores,
    stats,
    block_table,
    seats,
    seq_lens,
    certain,
    choosers,
    table,
    spared,
    chosen,
    shares,
    lists,
    lengths,
    table_stride,
    score_stride,
    list_stride,
    chosen_stride,
    shares_stride,
    kv_heads,
    programs,
    NUMBER: tl.constexpr,
    COUNTED: tl.constexpr,  # whether each KV head selects as many as its share says
    GROWS: tl.constexpr,
    POOLING: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    WIDTH: tl.constexpr,
    STATS: tl.constexpr,
):
    pair = tl.program_id(0)
    row = pair // kv_heads
    head = pair % kv_heads
    if selecting(row, seats, certain, choosers, table, NUMBER, PAGE) == 0:
        return
    seat = tl.load(seats + row).to(tl.int64)
    mass = tl.load(table + seat * _COLUMNS + _MASS).to(tl.float32, bitcast=True)
    length = tl.load(certain + row)
    pages = tl.cdiv(length, PAGE)
    sink, window, select = read_budget(table, seat, True)
    if COUNTED:
        select = tl.minimum(tl.load(shares + seat * shares_stride + head), pages - sink - window)
    if (mass >= 1) | (select == 0):
        return
    PARTS: tl.constexpr = PAGE // ENTRY
    entries = length // ENTRY
    if GROWS:
        entries = tl.cdiv(length, ENTRY)
    scores += pair.to(tl.int64) * (GROUP * score_stride)
    stats += pair.to(tl.int64) * (programs * 2 * GROUP)
    place = tl.arange(0, WIDTH)
    fixed = place < sink + window
    position = tl.where(place < sink, place, pages - window + place - sink)
    # Beyond the context nothing is read, and nothing has a share.
    pooled = pool_pages(
        scores, stats, tl.where(fixed, position, pages), entries, programs, score_stride,
        GROUP, PARTS, STATS, POOLING,
    )  # fmt: skip
    missing = mass * GROUP - tl.sum(tl.exp2(pooled), 0)  # the shares of all pages are the group's
    taken = place < select
    page = tl.load(chosen + (seat * kv_heads + head) * chosen_stride + place, mask=taken, other=0)
    pooled = pool_pages(
        scores, stats, tl.where(taken, page, pages), entries, programs, score_stride,
        GROUP, PARTS, STATS, POOLING,
    )  # fmt: skip
    share = tl.exp2(pooled)

    # The highest key by which those that reach it are enough, or the lowest one.
    keys = order_of(pooled, taken)
    high = tl.max(keys, 0) + 1
    low = tl.min(tl.where(taken, keys, high), 0)
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        if tl.sum(tl.where(keys >= middle, share, 0.0), 0) >= missing:
            low = middle
        else:
            high = middle
    above = keys > low
    equal = keys == low
    each = tl.max(tl.where(equal, share, 0.0), 0)
    before = tl.cumsum(equal.to(tl.int32), 0) - 1  # of equal ones the earlier
    reached = tl.sum(tl.where(above, share, 0.0), 0) + before * each
    better = tl.sum(above.to(tl.int32), 0)
    enough = above | (equal & ((reached < missing) | (better + before == 0)))  # one at least
    found = tl.sum(enough.to(tl.int32), 0)

    to = lists + pair.to(tl.int64) * list_stride
    rank = tl.cumsum(enough.to(tl.int32), 0) - 1
    last = pages - window + place
    end = tl.load(seq_lens + row)  # of drafts
    always = place < window + tl.cdiv(end, PAGE) - pages
    if not POSITIONS:
        of_row = block_table + row.to(tl.int64) * table_stride
        page = tl.load(of_row + page, mask=enough, other=0) * kv_heads + head
        last = tl.load(of_row + last, mask=always, other=0) * kv_heads + head
    tl.store(to + sink + rank, page, mask=enough)
    tl.store(to + sink + found + place, last, mask=always)
    told = (sink + found + window - 1) * PAGE + (length - 1) % PAGE + 1
    tl.store(lengths + pair, told + end - length)
    tl.atomic_add(spared + seat, (select - found).to(tl.int64), sem="relaxed")  # nobody waits


def cut_lists(
    rows: DeviceRows, requests: DeviceRequests, number: int, chooser: Chooser, plan: DevicePlan
) -> None:
    """Cut the lists of the rows that have this chooser, whose requests name a mass below 1.

    One program per (row, KV head), after the launches that have written the plan, over scores that
    are still there: of contexts that are ranked at once. Bytes moved: the scores of the listed
    pages, twice.

    Args:
        rows, requests, plan: See :meth:`DeviceOps.plan_decode`.
        number: The number of the chooser.
        chooser: It estimates shares, and does not speculate.
    """
    store, selection = chooser.store, chooser.selection
    programs, _, group = plan.stats.shape[1:]
    counts = selection.counts
    _cut_kernel[(len(rows) * store.kv_heads,)](
        plan.scores,
        plan.stats,
        rows.block_table,
        rows.seats,
        rows.seq_lens,
        rows.certain,
        rows.choosers,
        requests.table,
        requests.spared,
        selection.chosen,
        selection.chosen if counts is None else counts,
        plan.lists,
        plan.lengths,
        rows.block_table.stride(0),
        plan.scores.stride(1),
        plan.lists.stride(0),
        selection.chosen.stride(1),
        0 if counts is None else counts.stride(0),
        store.kv_heads,
        programs,
        NUMBER=number,
        COUNTED=counts is not None,
        GROWS=store.index is not None and store.index.grows,
        POOLING=int(chooser.pooling),
        POSITIONS=plan.positions,
        GROUP=group,
        PAGE=store.page_size,
        ENTRY=store.entry_tokens,
        WIDTH=max(triton.next_power_of_2(plan.lists.shape[1]), 16),
        STATS=triton.next_power_of_2(programs),
        num_warps=4,
        enable_fp_fusion=True,
    )
