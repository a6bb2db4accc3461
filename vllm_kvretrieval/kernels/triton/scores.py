"""Scores of a page index's entries for the queries of a decode step."""

import math

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import COLUMNS, Column, DeviceRequests, DeviceRows, ScoreRoom
from vllm_kvretrieval.kernels.triton.correction import is_corrected
from vllm_kvretrieval.kernels.triton.index import (
    BOUNDING,
    EXACT,
    KINDS,
    LOW_RANK,
    MEAN,
    MEAN_STD,
    MIN_MAX,
    REPRESENTATIVE,
    elements,
)
from vllm_kvretrieval.kernels.triton.low_rank import score_low_rank
from vllm_kvretrieval.kernels.types import Chooser
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.low_rank import LowRank

LOG2_E = math.log2(math.e)
MEMBERS = 16
"""Query heads of a tile: the fewest rows that the tensor cores multiply."""
LEAST_DIMS = 16
"""Channels that the tensor cores multiply at a time: shorter queries are filled up with zeros."""
TILE, LOW_RANK_TILE = 64, 16
"""Entries that a program scores at a time; of an index without records, keys."""

_COLUMNS = tl.constexpr(COLUMNS)
_SINK = tl.constexpr(int(Column.SINK))
_WINDOW = tl.constexpr(int(Column.WINDOW))
_SELECT = tl.constexpr(int(Column.SELECT))


@triton.jit
def _score_keys(
    query,
    keys,
    read,
    scale,
    HEAD_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Score entries by their keys, [TILE * ENTRY] pointers. See `score_low_rank`."""
    dims = tl.arange(0, DIMS)
    mask = (dims < HEAD_SIZE)[:, None] & read[None, :]
    k = tl.load(keys[None, :] + dims[:, None], mask=mask, other=0.0)
    scored = tl.dot(query, k, out_dtype=tl.float32) * scale
    scored = tl.reshape(scored, [MEMBERS, TILE, ENTRY])
    top = tl.max(scored, 2)
    return top + tl.log2(tl.sum(tl.exp2(scored - top[:, :, None]), 2))


@triton.jit
def _score_kernel(
    query,
    records,
    cache,
    block_table,
    seats,
    certain,
    query_start,
    choosers,
    fresh,
    table,
    previous,
    corrected,
    shares,
    scores,
    stats,
    scale_log2,  # softmax scale for exponentials to base 2
    query_stride,
    table_stride,
    score_stride,
    shares_stride,
    kv_heads,
    COUNTED: tl.constexpr,  # whether each KV head selects as many as its share says
    NUMBER: tl.constexpr,
    AHEAD: tl.constexpr,
    KIND: tl.constexpr,
    RECORD: tl.constexpr,  # elements
    GROWS: tl.constexpr,
    DRAFTED: tl.constexpr,  # whether records that grow may have drafts
    RANK: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    CHANNELS: tl.constexpr,  # of a query, rounded up to a power of two
    DIMS: tl.constexpr,  # of a product
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    pair = tl.program_id(0)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    row = pair // kv_heads
    head = pair % kv_heads
    if tl.load(choosers + row) != NUMBER:
        return
    seat = tl.load(seats + row).to(tl.int64)
    options = table + seat * _COLUMNS
    select = tl.load(options + _SELECT)
    length = tl.load(certain + row)
    budget = tl.load(options + _SINK) + tl.load(options + _WINDOW) + select
    if (select == 0) | (tl.cdiv(length, PAGE) <= budget):
        return
    of_head = head * (GROUP * HEAD_SIZE)
    before = previous + seat * (kv_heads * GROUP * HEAD_SIZE) + of_head
    asked = before
    if AHEAD:
        if tl.load(corrected + seat * kv_heads + head) != 0:
            return
    else:
        asked = query + tl.load(query_start + row).to(tl.int64) * query_stride + of_head
        selects = is_corrected(
            asked, before, options, tl.load(fresh + row), GROUP, HEAD_SIZE, MEMBERS, CHANNELS
        )
        selects = selects.to(tl.int32)
        if COUNTED:  # all that lies between sink and window, of which there is more each time
            between = tl.cdiv(length, PAGE) - (budget - select)
            selects += 2 * (tl.load(shares + seat * shares_stride + head) >= between).to(tl.int32)
        if program == 0:
            tl.store(corrected + seat * kv_heads + head, selects)
        if selects == 0:
            return
    PARTS: tl.constexpr = PAGE // ENTRY
    entries = length // ENTRY
    if GROWS:
        entries = tl.cdiv(length, ENTRY)
    members = tl.arange(0, MEMBERS)
    in_group = members < GROUP
    of_query = asked + members[:, None] * HEAD_SIZE
    if KIND == LOW_RANK:
        HALF: tl.constexpr = HEAD_SIZE // 2
        halves = tl.arange(0, DIMS // 2)
        mask = in_group[:, None] & (halves < HALF)[None, :]
        first = tl.load(of_query + halves[None, :], mask=mask, other=0.0)
        second = tl.load(of_query + HALF + halves[None, :], mask=mask, other=0.0)
    else:
        dims = tl.arange(0, DIMS)
        mask = in_group[:, None] & (dims < HEAD_SIZE)[None, :]
        first = tl.load(of_query + dims[None, :], mask=mask, other=0.0)
        wide = first.to(tl.float32)
        if KIND == MEAN_STD:
            second = tl.abs(wide).to(first.dtype)
        elif KIND == BOUNDING:
            second = tl.sqrt(tl.sum(wide * wide, 1))
        elif KIND == MIN_MAX:
            second = tl.maximum(wide, 0.0).to(first.dtype)
            first = tl.minimum(wide, 0.0).to(first.dtype)
    pages = block_table + row.to(tl.int64) * table_stride
    if DRAFTED and KIND == MIN_MAX:  # of the last entry the bounds of its certain keys
        last = entries - 1
        left = tl.where(last // TILE % programs == program, length - last * ENTRY, 0)
        unit = tl.load(pages + last // PARTS).to(tl.int64) * kv_heads + head
        token = tl.arange(0, ENTRY)
        keys = (unit * PAGE + last % PARTS * ENTRY + token) * (2 * HEAD_SIZE)
        read = (dims < HEAD_SIZE)[:, None] & (token < left)[None, :]
        key = tl.load(cache + keys[None, :] + dims[:, None], mask=read, other=0.0).to(tl.float32)
        low_key = tl.min(tl.where(read, key, float("inf")), 1).to(first.dtype)
        high_key = tl.max(tl.where(read, key, float("-inf")), 1).to(first.dtype)
    best = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    for tile in tl.range(program, tl.cdiv(entries, TILE), programs, num_stages=STAGES):
        entry = tile * TILE + tl.arange(0, TILE)
        valid = entry < entries
        if KIND == EXACT:
            token = tile * (TILE * ENTRY) + tl.arange(0, TILE * ENTRY)
            read = token < entries * ENTRY
            page = tl.load(pages + token // PAGE, mask=read, other=0).to(tl.int64)
            keys = ((page * kv_heads + head) * PAGE + token % PAGE) * (2 * HEAD_SIZE)
        else:
            page = tl.load(pages + entry // PARTS, mask=valid, other=0).to(tl.int64)
            record = ((page * PARTS + entry % PARTS) * kv_heads + head) * RECORD
        if KIND == LOW_RANK:
            scored = score_low_rank(
                first, second, records + record, valid, scale_log2,
                RANK, HEAD_SIZE, ENTRY, MEMBERS, TILE, DIMS // 2,
            )  # fmt: skip
        elif KIND == EXACT:
            scored = _score_keys(
                first, records + keys, read, scale_log2, HEAD_SIZE, ENTRY, MEMBERS, TILE, DIMS
            )
        else:
            at = (records + record)[None, :] + dims[:, None]
            read = (dims < HEAD_SIZE)[:, None] & valid[None, :]
            field = tl.load(at, mask=read, other=0.0)
            if DRAFTED and KIND == MIN_MAX:
                bounded = read & (entry == last)[None, :]
                field = tl.where(bounded, low_key[:, None], field)
            scored = tl.dot(first, field, out_dtype=tl.float32)
            if KIND == BOUNDING:
                at = (records + record + HEAD_SIZE).to(tl.pointer_type(tl.float32), bitcast=True)
                scored += second[:, None] * tl.load(at, mask=valid, other=0.0)[None, :]
            elif KIND != MEAN and KIND != REPRESENTATIVE:
                field = tl.load(at + HEAD_SIZE, mask=read, other=0.0)
                if DRAFTED and KIND == MIN_MAX:
                    field = tl.where(bounded, high_key[:, None], field)
                scored += tl.dot(second, field, out_dtype=tl.float32)
            scored *= scale_log2
        scored = tl.where(valid[None, :] & (scored == scored), scored, float("-inf"))
        highest = tl.maximum(best, tl.max(scored, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp2(best - base) + tl.sum(tl.exp2(scored - base[:, None]), 1)
        best = highest
        to = scores + (pair.to(tl.int64) * GROUP + members)[:, None] * score_stride
        tl.store(to + entry[None, :], scored, mask=in_group[:, None] & valid[None, :])
    to = stats + (pair * programs + program).to(tl.int64) * (2 * GROUP) + members
    tl.store(to, best, mask=in_group)
    tl.store(to + GROUP, total, mask=in_group)


def score_entries(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    number: int,
    chooser: Chooser,
    room: ScoreRoom,
    *,
    ahead: bool,
    stages: int = 3,
) -> None:
    """Score the entries for KV heads that select, and find what the scores add up to.

    The last dimension but one of ``room.stats`` is the number of programs per (row, KV head).

    Args:
        query, rows, requests, chooser: See ``DeviceOps.plan_decode``.
        number: The number of the chooser.
        room: Written.
        ahead: Whether it is for ``select_ahead``: the queries are those of seats then. Otherwise
            ``corrected`` of the selection is written: the heads that ``plan_decode`` selects for.
    """
    store, index = chooser.store, chooser.store.index
    assert index is not None
    rank = (
        index.directions(store.head_size, store.entry_tokens) if isinstance(index, LowRank) else 0
    )
    records, tile = elements(store), LOW_RANK_TILE if rank else TILE
    if isinstance(index, Exact):
        tile = max(TILE // store.entry_tokens, 1)
    programs, _, group = room.stats.shape[1:]
    selection, channels = chooser.selection, triton.next_power_of_2(store.head_size)
    _score_kernel[(len(rows) * store.kv_heads, programs)](
        query,
        records,
        store.cache,
        rows.block_table,
        rows.seats,
        rows.certain,
        rows.query_start,
        rows.choosers,
        rows.fresh,
        requests.table,
        selection.query,
        selection.corrected,
        selection.corrected if selection.counts is None else selection.counts,
        room.scores,
        room.stats,
        chooser.scale * LOG2_E,
        query.stride(0),
        rows.block_table.stride(0),
        room.scores.stride(1),
        0 if selection.counts is None else selection.counts.stride(0),
        store.kv_heads,
        COUNTED=selection.counts is not None,
        NUMBER=number,
        AHEAD=ahead,
        KIND=KINDS[type(index)],
        RECORD=store.records.shape[2] // records.element_size(),
        GROWS=index.grows,
        DRAFTED=rows.drafts > 0,
        RANK=rank,
        GROUP=group,
        HEAD_SIZE=store.head_size,
        PAGE=store.page_size,
        ENTRY=store.entry_tokens,
        CHANNELS=channels,
        DIMS=max(channels, LEAST_DIMS * (2 if rank else 1)),
        MEMBERS=MEMBERS,
        TILE=tile,
        STAGES=2 if rank or isinstance(index, Exact) else stages,
        num_warps=4,
        enable_fp_fusion=True,
    )
