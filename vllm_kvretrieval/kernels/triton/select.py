"""Pages scored and selected, per (row, KV head), and the lists of what is attended to."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import (
    COLUMNS,
    DevicePlan,
    DeviceRequests,
    DeviceRows,
    ScoreRoom,
)
from vllm_kvretrieval.kernels.triton.checks import (
    check_counts,
    check_heads,
    check_list,
    check_requests,
    check_rows,
)
from vllm_kvretrieval.kernels.triton.correction import is_corrected
from vllm_kvretrieval.kernels.triton.index import KINDS, check_store, elements
from vllm_kvretrieval.kernels.triton.mass import cut_lists
from vllm_kvretrieval.kernels.triton.outliers import find_bar, is_outlier, outlier_units
from vllm_kvretrieval.kernels.triton.pooling import pool_pages
from vllm_kvretrieval.kernels.triton.ranking import find_best
from vllm_kvretrieval.kernels.triton.rows import read_budget
from vllm_kvretrieval.kernels.triton.scores import (
    LEAST_DIMS,
    LOG2_E,
    LOW_RANK_TILE,
    TILE,
    score_entries,
)
from vllm_kvretrieval.kernels.triton.stats import MEMBERS
from vllm_kvretrieval.kernels.types import Chooser
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean import Mean

MOST_PAGES = 65536
"""Of a context: a program holds the best of every tile of them."""
TILE_PAGES = 4096
"""Pages that a program ranks at a time."""
PAGES_PER_WARP = 512
"""As many as a program has registers for that shares its multiprocessor with another one."""
STAGES = 3
"""Tiles of records that are on their way at once, where they are not long."""
WIDE = 128
"""Channels of heads beyond which tiles have half the entries, so that two programs have room on a
multiprocessor."""
REGISTERS = 65536
"""Registers of a multiprocessor."""

_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _list_selected(
    held, block_table, to, select, kv_heads, head, POSITIONS: tl.constexpr, WIDTH: tl.constexpr
):
    """List the pages of a selection, which come after the sink."""
    place = tl.arange(0, WIDTH)
    unit = tl.load(held + place, mask=place < select, other=0)
    if not POSITIONS:
        unit = tl.load(block_table + unit, mask=place < select, other=0) * kv_heads + head
    tl.store(to + place, unit, mask=place < select)


@triton.jit
def _list_fixed(
    of_row,
    to,
    length,
    tokens,
    pages,
    listed,
    more,
    sink,
    select,
    kv_heads,
    head,
    POSITIONS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Let the first program list the pages that are not selected, and the tokens of all.

    There are ``more`` pages after those of the budget, of drafts.
    """
    if tl.program_id(1) == 0:
        tl.store(length, tokens)
        place = tl.arange(0, WIDTH)
        fixed = (place < sink) | ((place >= sink + select) & (place < listed + more))
        unit = tl.where(place < sink, place, pages - listed + place)
        if not POSITIONS:
            unit = tl.load(of_row + unit, mask=fixed, other=0) * kv_heads + head
        tl.store(to + place, unit, mask=fixed)


@triton.jit
def _select_kernel(
    query,
    records,
    cache,
    scores,
    stats,
    cosines,
    arrivals,
    block_table,
    seats,
    seq_lens,
    certain,
    query_start,
    choosers,
    fresh,
    table,
    counts,
    previous,
    chosen,
    corrected,
    shares,
    lists,
    lengths,
    scale_log2,  # softmax scale for exponentials to base 2
    query_stride,
    table_stride,
    score_stride,
    list_stride,
    chosen_stride,
    shares_stride,
    kv_heads,
    COUNTED: tl.constexpr,  # whether each KV head selects as many as its share says
    NUMBER: tl.constexpr,
    FIRST: tl.constexpr,  # of the launches that make lists
    AHEAD: tl.constexpr,
    KIND: tl.constexpr,  # of the index, if there is one
    RECORD: tl.constexpr,  # elements
    GROWS: tl.constexpr,
    DRAFTED: tl.constexpr,  # whether records that grow may have drafts
    RANK: tl.constexpr,
    POOLING: tl.constexpr,
    OUTLIERS: tl.constexpr,  # their share of what is selected
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,  # of a query, rounded up to a power of two
    DIMS: tl.constexpr,  # of a product
    MEMBERS: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    TILE: tl.constexpr,  # entries that are scored at a time
    STAGES: tl.constexpr,
    PAGES: tl.constexpr,  # that are ranked at a time
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    STATS: tl.constexpr,
):
    """Programs score their shares of a context; the last of them to end pools, and selects."""
    pair = tl.program_id(0)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    row = pair // kv_heads
    head = pair % kv_heads
    chooser = tl.load(choosers + row)
    if chooser < 0:
        if FIRST:
            tl.store(lengths + pair, -1, mask=program == 0)
        return
    seat = tl.load(seats + row).to(tl.int64)
    sink, window, select = read_budget(table, seat, True)
    mine = chooser == NUMBER
    if FIRST:  # also of what selects nothing, whoever's it is
        mine = mine | (select == 0)
    elif not AHEAD:
        mine = mine & (select != 0)
    if mine == 0:
        return
    length = tl.load(certain + row)
    pages = tl.cdiv(length, PAGE)
    budget = sink + window + select
    listed = tl.minimum(pages, budget)
    whole = pages <= budget
    between = pages - sink - window
    if COUNTED:
        share = tl.minimum(tl.load(shares + seat * shares_stride + head), between)
        unlimited = (select == 0) & (share > 0)  # by no selection: all beyond the sink is window
        share = tl.where((select > 0) & ~whole, share, select)
        listed = tl.where(unlimited, pages, tl.minimum(pages, sink + window + share))
        select = share
    # Sink, selection and window; a context within its budget is all sink.
    sink = tl.where(whole, pages, sink)
    select = tl.where(whole, 0, select)
    window = listed - sink - select
    of_row = block_table + row.to(tl.int64) * table_stride
    to = lists + pair.to(tl.int64) * list_stride
    if not AHEAD:
        ends = tl.load(seq_lens + row)  # after the window come drafts, and the pages of these
        tokens = (listed - 1) * PAGE + (length - 1) % PAGE + 1 + ends - length
        more = tl.cdiv(ends, PAGE) - pages
        _list_fixed(
            of_row, to, lengths + pair, tokens, pages, listed, more, sink, select, kv_heads, head,
            POSITIONS, WIDTH,
        )  # fmt: skip
    if select == 0:
        return

    of_head = seat * kv_heads + head
    before = previous + of_head * (GROUP * HEAD_SIZE)
    asked = before
    if AHEAD:
        if tl.load(corrected + of_head) != 0:
            return
        selects = (select > 0).to(tl.int32)
    else:
        asked = query + tl.load(query_start + row).to(tl.int64) * query_stride
        asked += head * (GROUP * HEAD_SIZE)
        selects = is_corrected(
            asked, before, table + seat * _COLUMNS, tl.load(fresh + row),
            GROUP, HEAD_SIZE, MEMBERS, CHANNELS,
        ).to(tl.int32)  # fmt: skip
        if COUNTED:  # all that lies between sink and window, of which there is more each time
            selects += 2 * (select == between).to(tl.int32)
    PARTS: tl.constexpr = PAGE // ENTRY
    entries = length // ENTRY
    if GROWS:
        entries = tl.cdiv(length, ENTRY)
    scores += pair.to(tl.int64) * (GROUP * score_stride)
    stats += pair.to(tl.int64) * (programs * 2 * GROUP)
    cosines += pair.to(tl.int64) * (2 * score_stride)
    if selects != 0:
        score_entries(
            asked, records, cache, of_row, head, length, entries, scores, stats, cosines,
            scale_log2, score_stride, kv_heads, KIND, RECORD, DRAFTED, OUTLIERS > 0, RANK, GROUP,
            HEAD_SIZE, PAGE, ENTRY, DIMS, MEMBERS, TILE, STAGES,
        )  # fmt: skip
    tl.debug_barrier()
    if tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu") != programs - 1:
        return
    tl.store(arrivals + pair, 0)

    held = chosen + of_head * chosen_stride
    if not AHEAD:  # all programs have read what is written here
        members = tl.arange(0, MEMBERS)
        dims = tl.arange(0, CHANNELS)
        mask = (members < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
        offsets = members[:, None] * HEAD_SIZE + dims[None, :]
        tl.store(before + offsets, tl.load(asked + offsets, mask=mask, other=0.0), mask=mask)
        tl.store(corrected + of_head, selects)
        if selects == 0:
            _list_selected(held, of_row, to + sink, select, kv_heads, head, POSITIONS, WIDTH)
            return
    end = pages - window
    tiles = 1
    if TILES > 1:
        tiles = tl.cdiv(pages, PAGES)
    if OUTLIERS > 0:
        bar, last = find_bar(
            cosines, cosines + score_stride, entries, sink, end, outlier_units(select, OUTLIERS),
            tiles, PARTS, PAGES, TILES, WIDTH,
        )  # fmt: skip
    for tile in tl.range(tiles):
        page = tile * PAGES + tl.arange(0, PAGES)
        pooled = pool_pages(
            scores, stats, page, entries, programs, score_stride, GROUP, PARTS, STATS, POOLING
        )
        if OUTLIERS > 0:
            outlier = is_outlier(cosines, page, entries, bar, last, PARTS)
            pooled = tl.where(outlier, float("inf"), pooled)
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
    if not AHEAD:
        _list_selected(held, of_row, to + sink, select, kv_heads, head, POSITIONS, WIDTH)
        anew = (selects & 1).to(tl.int64)
        tl.atomic_add(counts + seat, anew, sem="relaxed")  # nobody waits for it


def plan_decode(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    choosers: Sequence[Chooser],
    plan: DevicePlan,
    *,
    tile_pages: int = TILE_PAGES,
    stages: int = STAGES,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.plan_decode`.

    One launch per chooser with an index; those without one have none of their own. As many programs
    per (row, KV head) as the plan has stats of share its entries. Besides what the signature
    counts, four bytes per entry and query head are written, and read twice. Long contexts are
    ranked in tiles of ``tile_pages`` pages, a power of two, and then the best of each.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature, or there is
            no kernel for an index.
    """
    _check(query, rows, requests, choosers, plan)
    pairs = len(rows) * choosers[0].store.kv_heads
    _check_lists(pairs, torch.int32, lists=plan.lists, lengths=plan.lengths)
    if len(rows) == 0:
        return
    numbers = [n for n, chooser in enumerate(choosers) if chooser.store.index is not None]
    for number in numbers or [0]:
        chooser = choosers[number]
        first = number == (numbers or [0])[0]
        _launch(query, rows, requests, number, chooser, plan, plan, tile_pages, stages, first)
        if chooser.mass:
            cut_lists(rows, requests, number, chooser, plan)


def select_ahead(
    rows: DeviceRows,
    requests: DeviceRequests,
    number: int,
    chooser: Chooser,
    room: ScoreRoom,
    *,
    tile_pages: int = TILE_PAGES,
    stages: int = STAGES,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.select_ahead`.

    The launch of :func:`plan_decode`, for the other KV heads.

    Raises:
        ValueError: As :func:`plan_decode`.
    """
    query = chooser.selection.query
    _check(query, rows, requests, [chooser], room)
    if chooser.store.index is None:
        raise ValueError("a chooser without an index selects nothing")
    if len(rows) == 0:
        return
    _launch(query, rows, requests, number, chooser, room, None, tile_pages, stages, False)


def _launch(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    number: int,
    chooser: Chooser,
    room: ScoreRoom,
    plan: DevicePlan | None,
    tile_pages: int,
    stages: int,
    first: bool,
) -> None:
    """Score and select; without a plan, ahead. The first launch lists also what is not selected."""
    store, selection, index = chooser.store, chooser.selection, chooser.store.index
    parts = store.parts if index is not None else 1
    pages = min(rows.block_table.shape[1], room.scores.shape[2] // parts)
    most = max(triton.next_power_of_2(pages), 16)
    lists = selection.chosen.flatten(0, 1) if plan is None else plan.lists
    width = max(triton.next_power_of_2(lists.shape[1]), 16)
    if chooser.outliers and most > tile_pages:
        tile_pages //= 2  # two rankings, which take more registers
    ranked = min(most, max(tile_pages, 4 * width))
    rank = (
        index.directions(store.head_size, store.entry_tokens) if isinstance(index, LowRank) else 0
    )
    # Factors take many registers: as many as fewer threads have.
    warps = 4 if rank else min(max(ranked // PAGES_PER_WARP, 4), 32)
    channels = triton.next_power_of_2(store.head_size)
    tile = LOW_RANK_TILE if rank else TILE // (2 if channels > WIDE else 1)
    if isinstance(index, Exact):
        tile = max(TILE // store.entry_tokens, 1)
    records = selection.query if index is None else elements(store)
    programs = room.stats.shape[1]
    cache = records if store.cache is None else store.cache  # read for drafts alone
    cosines = room.scores if room.cosines is None else room.cosines
    _select_kernel[(len(rows) * store.kv_heads, 1 if index is None else programs)](
        query,
        records,
        cache,
        room.scores,
        room.stats,
        cosines,
        room.arrivals,
        rows.block_table,
        rows.seats,
        rows.seq_lens,
        rows.certain,
        rows.query_start,
        rows.choosers,
        rows.fresh,
        requests.table,
        requests.corrected,
        selection.query,
        selection.chosen,
        selection.corrected,
        selection.corrected if selection.counts is None else selection.counts,
        lists,
        rows.choosers if plan is None else plan.lengths,
        chooser.scale * LOG2_E,
        query.stride(0),
        rows.block_table.stride(0),
        room.scores.stride(1),
        lists.stride(0),
        selection.chosen.stride(1),
        0 if selection.counts is None else selection.counts.stride(0),
        store.kv_heads,
        COUNTED=selection.counts is not None,
        NUMBER=number,
        FIRST=first,
        AHEAD=plan is None,
        KIND=KINDS[Mean if index is None else type(index)],
        RECORD=0 if index is None else store.records.shape[2] // records.element_size(),
        GROWS=index is not None and index.grows,
        DRAFTED=rows.drafts > 0,
        RANK=rank,
        POOLING=int(chooser.pooling),
        OUTLIERS=chooser.outliers,
        POSITIONS=plan is None or plan.positions,
        GROUP=chooser.group,
        HEAD_SIZE=store.head_size,
        CHANNELS=channels,
        DIMS=max(channels, LEAST_DIMS * (2 if rank else 1)),
        MEMBERS=MEMBERS,
        PAGE=store.page_size,
        ENTRY=store.page_size // parts,
        TILE=tile,
        STAGES=2 if rank or isinstance(index, Exact) else stages,
        PAGES=ranked,
        TILES=most // ranked,
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
    room: ScoreRoom,
) -> None:
    check_rows(rows)
    check_requests(requests)
    selection, store = choosers[0].selection, choosers[0].store
    seats, heads, head_size = selection.query.shape
    kv_heads, group = store.kv_heads, choosers[0].group
    check_heads("query", query, head_size, store.dtype)
    check_list("selection.query", selection.query, (seats, heads, head_size), store.dtype)
    if seats != len(requests.table) or selection.corrected is None:
        raise ValueError("the selection must be of the requests' seats, and of a device")
    if selection.counts is not None:
        check_counts(selection.counts, (seats, kv_heads))
    shape = seats, kv_heads, selection.chosen.shape[2]
    check_list("selection.chosen", selection.chosen, shape, torch.int32)
    check_list("selection.corrected", selection.corrected, shape[:2], torch.int32)
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
        if chooser.remainder:
            raise ValueError("there is no kernel that adds up what is not selected (remainder)")
        if chooser.outliers and not (own.index is not None and own.index.tells_outliers):
            raise ValueError("outliers take an index that tells them")
        if chooser.outliers and room.cosines is None:
            raise ValueError("the plan has no room for outliers")
    if not 1 <= group <= MEMBERS:
        raise ValueError(f"{group} query heads per KV head: 1 to {MEMBERS} are supported")
    pairs = len(rows) * kv_heads
    _check_lists(pairs, torch.float32, scores=room.scores, stats=room.stats)
    _check_lists(pairs, torch.int32, arrivals=room.arrivals)
    if room.cosines is not None:
        _check_lists(pairs, torch.float32, cosines=room.cosines)
        if room.cosines.shape[1:] != (2, room.scores.shape[2]):
            raise ValueError("plan.cosines must have two rows of as many entries as scores")
    if room.scores.shape[1] != group or room.stats.shape[2:] != (2, group):
        raise ValueError(f"the plan is not for groups of {group} query heads")
    if room.scores.shape[2] > MOST_PAGES * max(own.store.parts for own in choosers):
        raise ValueError(f"contexts of more than {MOST_PAGES} pages are not supported")


def _check_lists(pairs: int, kind: torch.dtype, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        check_list(f"plan.{name}", tensor, tuple(tensor.shape), kind)
        if len(tensor) < pairs:
            raise ValueError(f"plan.{name} has room for {len(tensor)} of {pairs} lists")
