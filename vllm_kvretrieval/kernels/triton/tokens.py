"""Single tokens selected by their scores, by each KV head or for all of them, and their lists."""

from collections.abc import Collection, Mapping

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.triton.checks import (
    check_counts,
    check_heads,
    check_requests,
    check_rows,
    check_token_plan,
)
from vllm_kvretrieval.kernels.triton.index import check_store
from vllm_kvretrieval.kernels.triton.one_bit import score_bits
from vllm_kvretrieval.kernels.triton.pooling import pool_highest, pool_pages
from vllm_kvretrieval.kernels.triton.ranking import order_of
from vllm_kvretrieval.kernels.triton.rows import listed_token, read_budget, selecting
from vllm_kvretrieval.kernels.triton.scores import LEAST_DIMS, LOG2_E, TILE
from vllm_kvretrieval.kernels.triton.stats import MEMBERS, keep_scores, keep_stats
from vllm_kvretrieval.kernels.types import Chooser, IndexRecords
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.one_bit import OneBit
from vllm_kvretrieval.retrieval.pooling import Pooling

TILE_TOKENS = 2048
"""Tokens that a program looks at at a time to rank them all."""
POOLED = 4
"""Parts of so many tokens that programs pool, one at a time."""

_HIGH_BIT = tl.constexpr(-0x80000000)


@triton.jit
def _score_tokens_kernel(
    query,
    cache,
    block_table,
    seats,
    certain,
    query_start,
    choosers,
    table,
    scores,
    stats,
    scale_log2,  # softmax scale for exponentials to base 2
    query_stride,
    table_stride,
    score_stride,
    kv_heads,
    NUMBER: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    DIMS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of all tokens of contexts by their keys."""
    pair = tl.program_id(0)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    row = pair // kv_heads
    head = pair % kv_heads
    if selecting(row, seats, certain, choosers, table, NUMBER, PAGE) == 0:
        return
    length = tl.load(certain + row)
    members = tl.arange(0, MEMBERS)
    dims = tl.arange(0, DIMS)
    in_group = members < GROUP
    in_head = dims < HEAD_SIZE
    of_query = query + tl.load(query_start + row).to(tl.int64) * query_stride
    of_query = of_query + (head * GROUP + members)[:, None] * HEAD_SIZE + dims[None, :]
    q = tl.load(of_query, mask=in_group[:, None] & in_head[None, :], other=0.0)
    pages = block_table + row.to(tl.int64) * table_stride
    scores += pair.to(tl.int64) * (GROUP * score_stride)
    stats += pair.to(tl.int64) * (programs * 2 * GROUP)
    best = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    for tile in tl.range(program, tl.cdiv(length, TILE), programs, num_stages=STAGES):
        token = tile * TILE + tl.arange(0, TILE)
        valid = token < length
        page = tl.load(pages + token // PAGE, mask=valid, other=0).to(tl.int64)
        keys = ((page * kv_heads + head) * PAGE + token % PAGE) * (2 * HEAD_SIZE)
        read = in_head[:, None] & valid[None, :]
        k = tl.load(cache + keys[None, :] + dims[:, None], mask=read, other=0.0)
        scored = tl.dot(q, k, out_dtype=tl.float32) * scale_log2
        best, total = keep_scores(scored, valid, token, scores, score_stride, best, total, GROUP)
    keep_stats(best, total, stats + program * (2 * GROUP), GROUP)


@triton.jit
def _pool_kernel(
    scores,
    stats,
    seats,
    certain,
    choosers,
    table,
    score_stride,
    kv_heads,
    programs,  # of the stats
    NUMBER: tl.constexpr,
    POOLING: tl.constexpr,
    SHARED: tl.constexpr,  # whether all KV heads of a row get one list
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    TILE: tl.constexpr,
    STATS: tl.constexpr,
):
    """Pooled scores take the place of those of the first query head."""
    of_list = tl.program_id(0)
    row = of_list if SHARED else of_list // kv_heads
    if selecting(row, seats, certain, choosers, table, NUMBER, PAGE) == 0:
        return
    pair = (row * kv_heads if SHARED else of_list).to(tl.int64)
    tokens = tl.load(certain + row) // ENTRY * ENTRY
    scores += pair * (GROUP * score_stride)
    stats += pair * (programs * 2 * GROUP)
    for tile in tl.range(tl.program_id(1), tl.cdiv(tokens, TILE), tl.num_programs(1)):
        token = tile * TILE + tl.arange(0, TILE)
        if SHARED:
            pooled = pool_highest(
                scores, stats, token, tokens, programs, score_stride, kv_heads, GROUP, STATS
            )
        else:
            pooled = pool_pages(
                scores, stats, token, tokens, programs, score_stride, GROUP, 1, STATS, POOLING
            )
        tl.store(scores + token, pooled, mask=token < tokens)


@triton.jit
def _keys(pooled, token, sink, end):
    """Scores as whole numbers of the same order, uint32, and which tokens are candidates."""
    candidate = (token >= sink) & (token < end)
    score = tl.load(pooled + token, mask=candidate, other=0.0)
    keys = order_of(score, candidate) ^ _HIGH_BIT
    return keys.to(tl.uint32, bitcast=True), candidate


@triton.jit
def _list_tokens(
    lists, list_stride, of_row, place, token, listed, first, heads, kv_heads, PAGE: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Write tokens at some places of the lists of a row's KV heads, from the first one on."""
    for head in tl.range(first, first + heads):
        number = listed_token(of_row, token, listed, head, kv_heads, PAGE, POSITIONS)
        tl.store(lists + (head - first) * list_stride + place, number, mask=listed)


@triton.jit
def _rank_kernel(
    scores,
    block_table,
    seats,
    seq_lens,
    certain,
    choosers,
    table,
    corrected,
    counts,
    lists,
    lengths,
    table_stride,
    score_stride,
    list_stride,
    counts_stride,
    kv_heads,
    COUNTED: tl.constexpr,  # whether KV heads select as many as the counts say
    NUMBERS: tl.constexpr,  # bits of the methods whose rows are listed
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    of_list = tl.program_id(0)
    row = of_list if SHARED else of_list // kv_heads
    first = of_list * 0 if SHARED else of_list % kv_heads
    heads = kv_heads if SHARED else 1
    pair = (row * kv_heads + first).to(tl.int64)
    chooser = tl.load(choosers + row)
    own = (chooser >= 0) & (((NUMBERS >> tl.maximum(chooser, 0)) & 1) != 0)
    seat = tl.load(seats + row)
    length = tl.load(certain + row)
    drafts = tl.load(seq_lens + row) - length  # which come after the window
    sink, window, select = read_budget(table, seat, own)
    whole = tl.cdiv(length, PAGE) <= sink + window + select  # within its budget
    sink = tl.where(whole, length, sink * PAGE)
    select = tl.where(whole, 0, select * PAGE)
    # Windows of methods of tokens have as many tokens; others have the last pages.
    end = length - window * PAGE
    end = tl.where(select > 0, end, (tl.cdiv(length, PAGE) - window) * PAGE)
    end = tl.where(whole, length, end)
    window = length - end
    if COUNTED:
        count = tl.load(counts + seat.to(tl.int64) * counts_stride + first, mask=own, other=0)
        select = tl.where(select > 0, tl.minimum(count, end - sink), 0)
    total = tl.where(own, sink + select + window + drafts, -1)
    for head in tl.range(heads):
        tl.store(lengths + pair + head, total)
    if own == 0:
        return
    of_row = block_table + row.to(tl.int64) * table_stride
    lists += pair * list_stride
    for begin in tl.range(0, sink + window + drafts, TILE):
        fixed = begin + tl.arange(0, TILE)
        token = tl.where(fixed < sink, fixed, end + fixed - sink)
        place = tl.where(fixed < sink, fixed, fixed + select)
        there = fixed < sink + window + drafts
        _list_tokens(
            lists, list_stride, of_row, place, token, there, first, heads, kv_heads, PAGE, POSITIONS
        )
    if select == 0:
        return

    # Eight bits after eight, from the highest on, of the key that as many tokens reach as are
    # selected: how many tokens that begin like it have which bits next.
    pooled = scores + pair * (GROUP * score_stride)
    tiles = tl.cdiv(end, TILE)
    bins = tl.arange(0, 512)
    left = select  # to be found among those that begin so
    least = tl.zeros([], tl.uint32)
    for part in tl.static_range(4):
        tally = tl.zeros([512], tl.int32)
        for tile in tl.range(tiles):
            keys, counted = _keys(pooled, tile * TILE + tl.arange(0, TILE), sink, end)
            if part > 0:
                counted = counted & ((keys >> (32 - 8 * part)) == (least >> (32 - 8 * part)))
            digit = ((keys >> (24 - 8 * part)) & 255).to(tl.int32)
            tally += tl.histogram(tl.where(counted, digit, 256), 512)
        tally = tl.where(bins < 256, tally, 0)
        reaching = tl.sum(tally, 0) - tl.cumsum(tally, 0) + tally
        last = tl.max(tl.where(reaching >= left, bins, 0), 0)
        left -= tl.sum(tl.where(bins > last, tally, 0), 0)
        least = least | (last.to(tl.uint32) << (24 - 8 * part))

    found = sink
    equal_found = tl.zeros([], tl.int32)
    for tile in tl.range(tiles):
        token = tile * TILE + tl.arange(0, TILE)
        keys, candidate = _keys(pooled, token, sink, end)
        equal = candidate & (keys == least)
        rank = equal_found + tl.cumsum(equal.to(tl.int32), 0)
        best = (candidate & (keys > least)) | (equal & (rank <= left))
        place = found + tl.cumsum(best.to(tl.int32), 0) - 1
        _list_tokens(
            lists, list_stride, of_row, place, token, best, first, heads, kv_heads, PAGE, POSITIONS
        )
        found += tl.sum(best.to(tl.int32), 0)
        equal_found += tl.sum(equal.to(tl.int32), 0)
    if not SHARED:  # nobody waits for it
        tl.atomic_add(corrected + seat, (select > 0).to(tl.int64), sem="relaxed")


def plan_tokens(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    choosers: Mapping[int, Chooser],
    plan: DevicePlan,
    *,
    tile_tokens: int = TILE_TOKENS,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.plan_tokens`.

    Two launches for each chooser with an index, and one for all. One program per (row, KV head)
    reads its scores five times to rank them, ``tile_tokens`` at a time.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature, or there is
            no kernel for an index.
    """
    for number, chooser in choosers.items():
        store = chooser.store
        _check(query, rows, requests, store, plan, number)
        if store.index is not None and not isinstance(store.index, OneBit):
            raise ValueError(f"there is no kernel that scores tokens by index={store.index.name}")
        if chooser.pooling is Pooling.MAX_SOFTMAX:
            raise ValueError("there is no kernel for max_softmax")
        if store.index is None or len(rows) == 0:
            continue
        score_bits(query, rows, requests, number, store, chooser.scale, plan)
        of_method = rows, requests, number, store, plan, int(chooser.pooling)
        pool_tokens(*of_method, shared=False, tile_tokens=tile_tokens)
    store = next(iter(choosers.values())).store
    counts = next(iter(choosers.values())).selection.counts
    if counts is not None:
        check_counts(counts, (len(requests.table), store.kv_heads))
    _rank(rows, requests, choosers, store, plan, tile_tokens, counts, shared=False)


def filter_tokens(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    number: int,
    others: Collection[int],
    store: IndexRecords,
    scale: float,
    plan: DevicePlan,
    *,
    tile_tokens: int = TILE_TOKENS,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.filter_tokens`.

    Three launches. One program per row reads its scores five times to rank them, ``tile_tokens`` at
    a time.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature.
    """
    _check(query, rows, requests, store, plan, max(number, *others, 0))
    if not isinstance(store.index, Exact) or store.entry_tokens != 1:
        raise ValueError("a filter selects by all keys: index=exact, entries of one token")
    if len(rows):
        score_tokens(query, rows, requests, number, store, scale, plan)
        of_method = rows, requests, number, store, plan, int(Pooling.MAX_SOFTMAX)
        pool_tokens(*of_method, shared=True, tile_tokens=tile_tokens)
    _rank(rows, requests, (number, *others), store, plan, tile_tokens, None, shared=True)


def score_tokens(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    number: int,
    store: IndexRecords,
    scale: float,
    plan: DevicePlan,
    *,
    stages: int = 3,
) -> None:
    """Score the tokens of the rows of a method by their keys; see ``one_bit.score_bits``."""
    programs, _, group = plan.stats.shape[1:]
    _score_tokens_kernel[(len(rows) * store.kv_heads, programs)](
        query,
        store.cache,
        rows.block_table,
        rows.seats,
        rows.certain,
        rows.query_start,
        rows.choosers,
        requests.table,
        plan.scores,
        plan.stats,
        scale * LOG2_E,
        query.stride(0),
        rows.block_table.stride(0),
        plan.scores.stride(1),
        store.kv_heads,
        NUMBER=number,
        GROUP=group,
        HEAD_SIZE=store.head_size,
        PAGE=store.page_size,
        DIMS=max(triton.next_power_of_2(store.head_size), LEAST_DIMS),
        MEMBERS=MEMBERS,
        TILE=TILE,
        STAGES=stages,
        num_warps=4,
        enable_fp_fusion=True,
    )


def pool_tokens(
    rows: DeviceRows,
    requests: DeviceRequests,
    number: int,
    store: IndexRecords,
    plan: DevicePlan,
    pooling: int,
    *,
    shared: bool,
    tile_tokens: int = TILE_TOKENS,
) -> None:
    """Pool the scores of tokens over query heads, in place of the first one's.

    Args:
        rows, requests, plan: See :meth:`DeviceOps.plan_tokens`.
        number: The number of the chooser.
        store: The index by which tokens have been scored.
        pooling: Over the group of a KV head.
        shared: Whether the highest share that any head of the row gives is taken instead.
        tile_tokens: See :func:`plan_tokens`.
    """
    programs, _, group = plan.stats.shape[1:]
    lists = len(rows) * (1 if shared else store.kv_heads)
    _pool_kernel[(lists, programs * (store.kv_heads if shared else 1))](
        plan.scores,
        plan.stats,
        rows.seats,
        rows.certain,
        rows.choosers,
        requests.table,
        plan.scores.stride(1),
        store.kv_heads,
        programs,
        NUMBER=number,
        POOLING=pooling,
        SHARED=shared,
        GROUP=group,
        PAGE=store.page_size,
        ENTRY=store.entry_tokens,
        TILE=tile_tokens // POOLED,
        STATS=triton.next_power_of_2(programs),
        num_warps=4,
        enable_fp_fusion=True,
    )


def _rank(
    rows: DeviceRows,
    requests: DeviceRequests,
    numbers: Collection[int],
    store: IndexRecords,
    plan: DevicePlan,
    tile_tokens: int,
    counts: torch.Tensor | None,
    *,
    shared: bool,
) -> None:
    lists = len(rows) * (1 if shared else store.kv_heads)
    if lists == 0:
        return
    _rank_kernel[(lists,)](
        plan.scores,
        rows.block_table,
        rows.seats,
        rows.seq_lens,
        rows.certain,
        rows.choosers,
        requests.table,
        requests.corrected,
        requests.table if counts is None else counts,
        plan.lists,
        plan.lengths,
        rows.block_table.stride(0),
        plan.scores.stride(1),
        plan.lists.stride(0),
        0 if counts is None else counts.stride(0),
        store.kv_heads,
        COUNTED=counts is not None,
        NUMBERS=sum(1 << number for number in numbers),
        SHARED=shared,
        GROUP=plan.scores.shape[1],
        PAGE=store.page_size,
        TILE=tile_tokens,
        POSITIONS=plan.positions,
        num_warps=8,
    )


def _check(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    store: IndexRecords,
    plan: DevicePlan,
    number: int,
) -> None:
    check_rows(rows)
    check_requests(requests)
    check_heads("query", query, store.head_size, store.dtype)
    check_store(store)
    pairs, group = len(rows) * store.kv_heads, query.shape[1] // store.kv_heads
    check_token_plan(plan, pairs, number)
    if plan.scores.shape[1] != group or plan.stats.shape[2:] != (2, group):
        raise ValueError(f"the plan is not for groups of {group} query heads")
