"""Lists of the tokens that are kept, and of those that are new."""

from collections.abc import Collection

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.triton.checks import (
    check_counts,
    check_list,
    check_requests,
    check_rows,
    check_token_plan,
)
from vllm_kvretrieval.kernels.triton.rows import listed_token, read_budget
from vllm_kvretrieval.kernels.types import Selection

TILE = 512
"""Tokens that a program lists at a time."""


@triton.jit
def _list_kept_kernel(
    chosen,
    counts,
    ends,
    block_table,
    seats,
    seq_lens,
    certain,
    choosers,
    table,
    lists,
    lengths,
    most,  # tokens that a KV head has room for
    counts_stride,
    table_stride,
    list_stride,
    kv_heads,
    KEPT: tl.constexpr,  # bits of the methods that keep tokens
    DROPS: tl.constexpr,  # bits of those among them whose steps drop some
    OTHERS: tl.constexpr,  # bits of those that list the first and the last pages
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    pair = tl.program_id(0)
    program = tl.program_id(1)
    row = pair // kv_heads
    head = pair % kv_heads
    chooser = tl.load(choosers + row)
    bit = tl.maximum(chooser, 0)
    kept = (chooser >= 0) & (((KEPT >> bit) & 1) != 0)
    other = (chooser >= 0) & (((OTHERS >> bit) & 1) != 0)
    seat = tl.load(seats + row)
    length = tl.load(seq_lens + row)
    sink, window, _ = read_budget(table, seat, other)
    of_seat = tl.maximum(seat, 0).to(tl.int64)
    count = tl.load(counts + of_seat * counts_stride + head, mask=kept, other=0)
    known = tl.load(certain + row)
    first = tl.where(kept, count, tl.minimum(sink * PAGE, known))
    drops = kept & (((DROPS >> bit) & 1) != 0)
    end = tl.load(ends + of_seat, mask=kept, other=0)
    begin = tl.where(drops, known - 1, end)  # of the tokens that are all listed
    last_pages = (tl.cdiv(known, PAGE) - window) * PAGE
    begin = tl.where(kept, begin, tl.maximum(last_pages, first))
    total = first + length - begin
    listed = kept | other
    if program == 0:
        tl.store(lengths + pair, tl.where(listed, total, -1))
    if listed == 0:
        return
    of_row = block_table + row.to(tl.int64) * table_stride
    chosen += (of_seat * kv_heads + head) * most
    lists += pair.to(tl.int64) * list_stride
    for tile in tl.range(program, tl.cdiv(total, TILE), tl.num_programs(1)):
        place = tile * TILE + tl.arange(0, TILE)
        there = place < total
        token = tl.load(chosen + place, mask=place < count, other=0)
        token = tl.where(place < count, token, place)
        token = tl.where(place < first, token, begin + place - first)
        number = listed_token(of_row, token, there, head, kv_heads, PAGE, POSITIONS)
        tl.store(lists + place, number, mask=there)


def list_kept(
    rows: DeviceRows,
    requests: DeviceRequests,
    numbers: Collection[int],
    others: Collection[int],
    selection: Selection,
    page_size: int,
    plan: DevicePlan,
    *,
    dropping: Collection[int] = (),
    tile_tokens: int = TILE,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.list_kept`.

    One launch of as many programs as score contexts.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature.
    """
    check_rows(rows)
    check_requests(requests)
    seats, kv_heads, most = selection.chosen.shape
    pairs = len(rows) * kv_heads
    check_token_plan(plan, pairs, max(*numbers, *dropping, *others, 0))
    check_list("selection.chosen", selection.chosen, (seats, kv_heads, most), torch.int32)
    if selection.counts is None or selection.ends is None:
        raise ValueError("selection must have counts and ends, where tokens are kept")
    check_counts(selection.counts, (seats, kv_heads))
    check_list("selection.ends", selection.ends, (seats,), torch.int32)
    if pairs == 0:
        return
    _list_kept_kernel[(pairs, plan.stats.shape[1])](
        selection.chosen,
        selection.counts,
        selection.ends,
        rows.block_table,
        rows.seats,
        rows.seq_lens,
        rows.certain,
        rows.choosers,
        requests.table,
        plan.lists,
        plan.lengths,
        most,
        selection.counts.stride(0),
        rows.block_table.stride(0),
        plan.lists.stride(0),
        kv_heads,
        KEPT=sum(1 << number for number in (*numbers, *dropping)),
        DROPS=sum(1 << number for number in dropping),
        OTHERS=sum(1 << number for number in others),
        PAGE=page_size,
        TILE=tile_tokens,
        POSITIONS=plan.positions,
        num_warps=4,
    )
