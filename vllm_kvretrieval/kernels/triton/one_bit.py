"""Records of one bit per token and channel, and scores of tokens by them (FIER)."""

import math

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.triton.entries import entry_to_build, keys_of_entry
from vllm_kvretrieval.kernels.triton.rows import selecting
from vllm_kvretrieval.kernels.triton.stats import MEMBERS, keep_scores, keep_stats
from vllm_kvretrieval.kernels.types import IndexRecords
from vllm_kvretrieval.retrieval.index.one_bit import BLOCK

TILE_TOKENS = 64
"""Tokens that a program scores at a time, or those of an entry if it has more."""

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _place(BLOCKS: tl.constexpr):
    """int32 [BLOCKS, 32]; the bit of each channel in its block's word, which has four bytes."""
    channel = tl.arange(0, _BLOCK)
    bit = channel % 4 * 8 + channel // 4
    return tl.broadcast_to(bit[None, :], [BLOCKS, _BLOCK])


@triton.jit
def _build_bits_kernel(
    entries,
    cache,
    records,
    kv_heads,
    RECORD: tl.constexpr,  # elements
    FROM_SLOTS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    DIMS: tl.constexpr,
):
    head = tl.program_id(1)
    entry = entry_to_build(entries, FROM_SLOTS, ENTRY)
    if entry < 0:
        return
    BLOCKS: tl.constexpr = DIMS // _BLOCK
    token = tl.arange(0, ENTRY)
    dims = tl.arange(0, DIMS)
    mask = dims < HEAD_SIZE
    keys = keys_of_entry(cache, entry, head, kv_heads, HEAD_SIZE, PAGE, ENTRY)[:, None]
    k = tl.load(keys + dims[None, :], mask=mask[None, :], other=0.0).to(tl.float32)
    low, high = tl.min(k, 0), tl.max(k, 0)
    to = records + (entry * kv_heads + head) * RECORD
    tl.store(to + dims, low.to(records.dtype.element_ty), mask=mask)
    tl.store(to + HEAD_SIZE + dims, high.to(records.dtype.element_ty), mask=mask)
    upper = (k - low[None, :] > high[None, :] - k).to(tl.int32)
    upper = tl.reshape(upper, [ENTRY, BLOCKS, _BLOCK]) << _place(BLOCKS)[None, :, :]
    words = tl.sum(upper, 2)
    block = tl.arange(0, BLOCKS)
    to = (to + 2 * HEAD_SIZE).to(tl.pointer_type(tl.int32), bitcast=True)
    kept = block * _BLOCK < HEAD_SIZE
    tl.store(to + block[None, :] * ENTRY + token[:, None], words, mask=kept[None, :])


def build_bits(entries: torch.Tensor, from_slots: bool, store: IndexRecords) -> None:
    """Build records; see ``index.build_entries``."""
    assert store.cache is not None
    records = store.records.view(store.dtype)
    _build_bits_kernel[(len(entries), store.kv_heads)](
        entries,
        store.cache,
        records,
        store.kv_heads,
        RECORD=records.shape[2],
        FROM_SLOTS=from_slots,
        HEAD_SIZE=store.head_size,
        PAGE=store.page_size,
        ENTRY=store.entry_tokens,
        DIMS=max(triton.next_power_of_2(store.head_size), BLOCK),
        num_warps=4,
    )


@triton.jit
def _score_bits_kernel(
    query,
    records,
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
    RECORD: tl.constexpr,  # elements
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    DIMS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,  # entries
    STAGES: tl.constexpr,
):
    pair = tl.program_id(0)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    row = pair // kv_heads
    head = pair % kv_heads
    if selecting(row, seats, certain, choosers, table, NUMBER, PAGE) == 0:
        return
    PARTS: tl.constexpr = PAGE // ENTRY
    BLOCKS: tl.constexpr = DIMS // _BLOCK
    entries = tl.load(certain + row) // ENTRY
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
    block, token = tl.arange(0, BLOCKS), tl.arange(0, ENTRY)
    best = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    for tile in tl.range(program, tl.cdiv(entries, TILE), programs, num_stages=STAGES):
        entry = tile * TILE + tl.arange(0, TILE)
        valid = entry < entries
        page = tl.load(pages + entry // PARTS, mask=valid, other=0).to(tl.int64)
        record = records + ((page * PARTS + entry % PARTS) * kv_heads + head) * RECORD
        bounds = record[None, :] + dims[:, None]
        read = in_head[:, None] & valid[None, :]
        low = tl.load(bounds, mask=read, other=0.0)
        high = tl.load(bounds + HEAD_SIZE, mask=read, other=0.0)
        at = (record + 2 * HEAD_SIZE).to(tl.pointer_type(tl.int32), bitcast=True)
        at = at[None, :, None] + block[:, None, None] * ENTRY + token[None, None, :]
        read = (block * _BLOCK < HEAD_SIZE)[:, None, None] & valid[None, :, None]
        words = tl.load(at, mask=read, other=0)
        upper = (words[:, None, :, :] >> _place(BLOCKS)[:, :, None, None]) & 1
        upper = tl.reshape(upper, [DIMS, TILE, ENTRY]) != 0
        k = tl.where(upper, high[:, :, None], low[:, :, None])  # the keys, rounded to either
        k = tl.reshape(k, [DIMS, TILE * ENTRY])
        scored = tl.dot(q, k, out_dtype=tl.float32) * scale_log2
        place = tile * (TILE * ENTRY) + tl.arange(0, TILE * ENTRY)
        there = place < entries * ENTRY
        best, total = keep_scores(scored, there, place, scores, score_stride, best, total, GROUP)
    keep_stats(best, total, stats + program * (2 * GROUP), GROUP)


def score_bits(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    number: int,
    store: IndexRecords,
    scale: float,
    plan: DevicePlan,
    *,
    stages: int = 2,
) -> None:
    """Score the tokens of the rows of a method, and find what the scores add up to.

    Args:
        query, rows, requests, plan: See :meth:`DeviceOps.plan_decode`.
        number: The number of the method.
        store: The index.
        scale: Softmax scale.
        stages: Tiles that are on their way at once.
    """
    records = store.records.view(store.dtype)
    programs, _, group = plan.stats.shape[1:]
    _score_bits_kernel[(len(rows) * store.kv_heads, programs)](
        query,
        records,
        rows.block_table,
        rows.seats,
        rows.certain,
        rows.query_start,
        rows.choosers,
        requests.table,
        plan.scores,
        plan.stats,
        scale * math.log2(math.e),
        query.stride(0),
        rows.block_table.stride(0),
        plan.scores.stride(1),
        store.kv_heads,
        NUMBER=number,
        RECORD=records.shape[2],
        GROUP=group,
        HEAD_SIZE=store.head_size,
        PAGE=store.page_size,
        ENTRY=store.entry_tokens,
        DIMS=max(triton.next_power_of_2(store.head_size), BLOCK),
        MEMBERS=MEMBERS,
        TILE=max(TILE_TOKENS // store.entry_tokens, 1),
        STAGES=stages,
        num_warps=4,
        enable_fp_fusion=True,
    )
