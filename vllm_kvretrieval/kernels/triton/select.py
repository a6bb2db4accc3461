"""Pages selected by their scores, per (row, KV head), and the lists of what is attended to."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import COLUMNS, Column, DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.triton.checks import (
    check_heads,
    check_list,
    check_requests,
    check_rows,
)
from vllm_kvretrieval.kernels.triton.index import KINDS, check_store
from vllm_kvretrieval.kernels.triton.pooling import pool_pages
from vllm_kvretrieval.kernels.triton.ranking import find_best
from vllm_kvretrieval.kernels.triton.scores import MEMBERS, score_entries
from vllm_kvretrieval.kernels.types import Chooser
from vllm_kvretrieval.retrieval.pooling import Pooling

MOST_PAGES = 65536
"""Of a context: a program holds the best of every tile of them."""
TILE_PAGES = 4096
"""Pages that a program ranks at a time."""
PAGES_PER_WARP = 512
"""As many as a program has registers for that shares its multiprocessor with another one."""
REGISTERS = 65536
"""Registers of a multiprocessor."""

_COLUMNS = tl.constexpr(COLUMNS)
_SINK = tl.constexpr(int(Column.SINK))
_WINDOW = tl.constexpr(int(Column.WINDOW))
_SELECT = tl.constexpr(int(Column.SELECT))
_THRESHOLD = tl.constexpr(int(Column.THRESHOLD))


@triton.jit
def _select_kernel(
    query,
    scores,
    stats,
    block_table,
    seats,
    seq_lens,
    choosers,
    fresh,
    table,
    corrected,
    previous,
    chosen,
    lists,
    lengths,
    query_stride,
    table_stride,
    score_stride,
    list_stride,
    chosen_stride,
    kv_heads,
    programs,
    NUMBER: tl.constexpr,
    GROWS: tl.constexpr,
    POOLING: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    PAGES: tl.constexpr,  # of a tile
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    STATS: tl.constexpr,
):
    pair = tl.program_id(0)
    row = pair // kv_heads
    head = pair % kv_heads
    if tl.load(choosers + row) != NUMBER:
        if NUMBER == 0:
            tl.store(lengths + pair, -1)
        return
    seat = tl.load(seats + row).to(tl.int64)
    options = table + seat * _COLUMNS
    length = tl.load(seq_lens + row)
    pages = tl.cdiv(length, PAGE)
    sink = tl.load(options + _SINK)
    select = tl.load(options + _SELECT)
    budget = sink + tl.load(options + _WINDOW) + select
    whole = pages <= budget
    listed = tl.minimum(pages, budget)
    tl.store(lengths + pair, (listed - 1) * PAGE + (length - 1) % PAGE + 1)
    place = tl.arange(0, WIDTH)
    # Sink, selection and window; a context within its budget is all sink.
    sink = tl.where(whole, pages, sink)
    select = tl.where(whole, 0, select)
    window = listed - sink - select
    fixed = (place < sink) | ((place >= sink + select) & (place < listed))
    position = tl.where(place < sink, place, pages - listed + place)
    of_row = block_table + row.to(tl.int64) * table_stride
    to = lists + pair.to(tl.int64) * list_stride + place
    unit = position
    if not POSITIONS:
        unit = tl.load(of_row + position, mask=fixed, other=0) * kv_heads + head
    tl.store(to, unit, mask=fixed)
    if select == 0:
        return

    members = tl.arange(0, MEMBERS)
    dims = tl.arange(0, DIMS)
    mask = (members < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    offsets = (head * GROUP + members)[:, None] * HEAD_SIZE + dims[None, :]
    now = tl.load(query + row.to(tl.int64) * query_stride + offsets, mask=mask, other=0.0)
    of_seat = previous + seat * (kv_heads * GROUP * HEAD_SIZE) + offsets
    before = tl.load(of_seat, mask=mask, other=0.0).to(tl.float32)
    wide = now.to(tl.float32)
    # As torch.cosine_similarity bounds the norms, each for itself.
    norms = tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), 1e-8)
    norms *= tl.maximum(tl.sqrt(tl.sum(before * before, 1)), 1e-8)
    cosine = tl.sum(tl.where(members < GROUP, tl.sum(wide * before, 1) / norms, 0.0), 0) / GROUP
    threshold = tl.load(options + _THRESHOLD).to(tl.float32, bitcast=True)
    was_whole = tl.cdiv(length - 1, PAGE) <= budget
    turned = (tl.load(fresh + row) != 0) | was_whole | (threshold >= 1)
    turned = turned | ((threshold > -1) & (cosine < threshold))
    tl.store(of_seat, now, mask=mask)

    PARTS: tl.constexpr = PAGE // ENTRY
    entries = length // ENTRY
    if GROWS:
        entries = tl.cdiv(length, ENTRY)
    scores += pair.to(tl.int64) * (GROUP * score_stride)
    stats += pair.to(tl.int64) * (programs * 2 * GROUP)
    held = chosen + (seat * kv_heads + head) * chosen_stride
    in_selection = place < select
    old = tl.load(held + place, mask=in_selection, other=0)
    end = pages - window
    tiles = 1
    if TILES > 1:
        tiles = tl.cdiv(pages, PAGES)
    for tile in tl.range(tiles):
        page = tile * PAGES + tl.arange(0, PAGES)
        pooled = pool_pages(
            scores, stats, page, entries, programs, score_stride, GROUP, PARTS, STATS, POOLING
        )
        best, rank = find_best(pooled, (page >= sink) & (page < end), select)
        tl.debug_barrier()
        if TILES == 1:
            tl.store(held + rank, page, mask=best)
        else:  # where scores have been read already
            to_best = scores + tile * (2 * WIDTH) + rank
            tl.store(to_best, pooled, mask=best)
            tl.store(to_best + WIDTH, page.to(tl.float32, bitcast=True), mask=best)
    tl.debug_barrier()
    if TILES > 1:
        slot = tl.arange(0, TILES * WIDTH)
        tile, rank = slot // WIDTH, slot % WIDTH
        between = tl.minimum(end, (tile + 1) * PAGES) - tl.maximum(sink, tile * PAGES)
        found = rank < tl.minimum(select, between)
        of_best = scores + tile * (2 * WIDTH) + rank
        pooled = tl.load(of_best, mask=found, other=0.0)
        page = tl.load(of_best + WIDTH, mask=found, other=0.0).to(tl.int32, bitcast=True)
        best, rank = find_best(pooled, found, select)
        tl.store(held + rank, page, mask=best)
        tl.debug_barrier()
    new = tl.load(held + place, mask=in_selection, other=0)
    unit = tl.where(turned, new, old)
    if not POSITIONS:
        unit = tl.load(of_row + unit, mask=in_selection, other=0) * kv_heads + head
    tl.store(to + sink, unit, mask=in_selection)
    tl.atomic_add(corrected + seat, turned.to(tl.int64), sem="relaxed")  # nobody waits for it


def plan_decode(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    choosers: Sequence[Chooser],
    plan: DevicePlan,
    *,
    tile_pages: int = TILE_PAGES,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.plan_decode`.

    Two launches per chooser, one where it has no index. Besides what the signature counts, four
    bytes per entry and query head are written, and read twice. Long contexts are ranked in tiles of
    ``tile_pages`` pages, a power of two, and then the best of each.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature, or there is
            no kernel for an index.
    """
    selection, indexes = choosers[0].selection, [chooser.store for chooser in choosers]
    _check(query, rows, requests, choosers, plan)
    if len(rows) == 0:
        return
    kv_heads, head_size = indexes[0].kv_heads, indexes[0].head_size
    pairs, programs = len(rows) * kv_heads, plan.stats.shape[1]
    width = max(triton.next_power_of_2(plan.lists.shape[1]), 16)
    for number, chooser in enumerate(choosers):
        store = chooser.store
        if store.index is not None:
            score_entries(query, rows, requests, number, chooser, plan)
        parts = store.parts if store.index is not None else 1
        pages = min(rows.block_table.shape[1], plan.scores.shape[2] // parts)
        most = max(triton.next_power_of_2(pages), 16)
        tile = min(most, max(tile_pages, 4 * width))
        warps = min(max(tile // PAGES_PER_WARP, 4), 32)
        _select_kernel[(pairs,)](
            query,
            plan.scores,
            plan.stats,
            rows.block_table,
            rows.seats,
            rows.seq_lens,
            rows.choosers,
            rows.fresh,
            requests.table,
            requests.corrected,
            selection.query,
            selection.chosen,
            plan.lists,
            plan.lengths,
            query.stride(0),
            rows.block_table.stride(0),
            plan.scores.stride(1),
            plan.lists.stride(0),
            selection.chosen.stride(1),
            kv_heads,
            programs,
            NUMBER=number,
            GROWS=store.index is not None and store.index.grows,
            POOLING=int(chooser.pooling),
            POSITIONS=plan.positions,
            GROUP=chooser.group,
            HEAD_SIZE=head_size,
            DIMS=triton.next_power_of_2(head_size),
            MEMBERS=MEMBERS,
            PAGE=store.page_size,
            ENTRY=store.page_size // parts,
            PAGES=tile,
            TILES=most // tile,
            WIDTH=width,
            STATS=triton.next_power_of_2(programs),
            num_warps=warps,
            maxnreg=min(REGISTERS // (2 * 32 * warps), 255),  # for two programs or more
            enable_fp_fusion=True,
        )


def _check(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    choosers: Sequence[Chooser],
    plan: DevicePlan,
) -> None:
    check_rows(rows)
    check_requests(requests)
    selection, store = choosers[0].selection, choosers[0].store
    seats, heads, head_size = selection.query.shape
    kv_heads, group = store.kv_heads, choosers[0].group
    check_heads("query", query, head_size, store.dtype)
    check_list("selection.query", selection.query, (seats, heads, head_size), store.dtype)
    if seats != len(requests.table) or selection.counts is not None:
        raise ValueError("the selection must be of the requests' seats, and of equal counts")
    shape = seats, kv_heads, selection.chosen.shape[2]
    check_list("selection.chosen", selection.chosen, shape, torch.int32)
    pairs = len(rows) * kv_heads
    for chooser in choosers:
        own = chooser.store
        check_store(own, kinds=KINDS)
        if chooser.selection is not selection or (own.kv_heads, own.page_size) != (
            kv_heads,
            store.page_size,
        ):
            raise ValueError("choosers must share a selection, and the shape of their pages")
        if chooser.rerank:
            raise ValueError("there is no kernel that scores candidates again (rerank)")
        if chooser.outliers or chooser.remainder or chooser.pooling is Pooling.MAX_SOFTMAX:
            raise ValueError("there is no kernel for outliers, a remainder or max_softmax")
    if not 1 <= group <= MEMBERS:
        raise ValueError(f"{group} query heads per KV head: 1 to {MEMBERS} are supported")
    for name, tensor, kind in (
        ("scores", plan.scores, torch.float32),
        ("stats", plan.stats, torch.float32),
        ("lists", plan.lists, torch.int32),
        ("lengths", plan.lengths, torch.int32),
    ):
        check_list(f"plan.{name}", tensor, tuple(tensor.shape), kind)
        if len(tensor) < pairs:
            raise ValueError(f"plan.{name} has room for {len(tensor)} of {pairs} lists")
    if plan.scores.shape[1] != group or plan.stats.shape[2:] != (2, group):
        raise ValueError(f"the plan is not for groups of {group} query heads")
    if plan.scores.shape[2] > MOST_PAGES * max(own.store.parts for own in choosers):
        raise ValueError(f"contexts of more than {MOST_PAGES} pages are not supported")
