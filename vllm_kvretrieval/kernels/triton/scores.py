"""Scores of a page index's entries for the queries of a decode step."""

import math

import triton
import triton.language as tl

from vllm_kvretrieval.kernels.triton.index import (
    BOUNDING,
    EXACT,
    LANDMARK,
    LOW_RANK,
    MEAN,
    MEAN_STD,
    MIN_MAX,
    REPRESENTATIVE,
)
from vllm_kvretrieval.kernels.triton.low_rank import score_low_rank
from vllm_kvretrieval.kernels.triton.stats import keep_scores, keep_stats

LOG2_E = math.log2(math.e)
LEAST_DIMS = 16
"""Channels that the tensor cores multiply at a time: shorter queries are filled up with zeros."""
TILE, LOW_RANK_TILE = 64, 16
"""Entries that a program scores at a time; of an index without records, keys."""


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
def score_entries(
    asked,
    records,
    cache,
    pages,
    head,
    length,
    entries,
    scores,
    stats,
    cosines,
    scale_log2,
    score_stride,
    kv_heads,
    KIND: tl.constexpr,
    RECORD: tl.constexpr,
    DRAFTED: tl.constexpr,
    TELLS: tl.constexpr,
    RANK: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    DIMS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Score this program's share of the entries of a context, for the queries of a KV head.

    Args:
        asked: Pointer to the first of the queries.
        records: What entries are scored by: records, or the cache.
        cache: The keys.
        pages: Pointer to the numbers of the context's pages.
        head: The KV head.
        length: Tokens of the context, without drafts.
        entries: How many the context has.
        scores, stats, cosines: Written; those of the KV head of the row, see :class:`ScoreRoom`.
        scale_log2: Softmax scale for exponentials to base 2.
        score_stride: From a query head's scores to the next one's.
        kv_heads: How many the records are of.
        RECORD: Elements of a record.
        DRAFTED: Whether records that grow may have drafts.
        TELLS: Whether ``cosines`` are written.
        DIMS: Channels of a product, a power of two.
        TILE: Entries that are scored at a time.
    """
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    PARTS: tl.constexpr = PAGE // ENTRY
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
            elif TELLS:
                at = (records + record + HEAD_SIZE).to(tl.pointer_type(tl.float32), bitcast=True)
                tl.store(cosines + entry, tl.load(at, mask=valid, other=0.0), mask=valid)
            elif KIND != MEAN and KIND != REPRESENTATIVE and KIND != LANDMARK:
                field = tl.load(at + HEAD_SIZE, mask=read, other=0.0)
                if DRAFTED and KIND == MIN_MAX:
                    field = tl.where(bounded, high_key[:, None], field)
                scored += tl.dot(second, field, out_dtype=tl.float32)
            scored *= scale_log2
        best, total = keep_scores(scored, valid, entry, scores, score_stride, best, total, GROUP)
    keep_stats(best, total, stats + program * (2 * GROUP), GROUP)
