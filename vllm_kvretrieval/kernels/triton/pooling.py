"""The scores of a group's query heads for the entries of pages, made one per page."""

import triton
import triton.language as tl

from vllm_kvretrieval.retrieval.pooling import Pooling

_RELATIVE = tl.constexpr(int(Pooling.RELATIVE))
_MAX = tl.constexpr(int(Pooling.MAX))
_SUM = tl.constexpr(int(Pooling.SUM))
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _norm(stats, programs, GROUP: tl.constexpr, POOLING: tl.constexpr, STATS: tl.constexpr):
    """What is taken off a head's scores before they are pooled."""
    part = tl.arange(0, STATS)
    best = tl.load(stats + part * (2 * GROUP), mask=part < programs, other=_NOTHING)
    highest = tl.max(best, 0)
    if POOLING == _RELATIVE:
        return highest
    total = tl.load(stats + part * (2 * GROUP) + GROUP, mask=part < programs, other=0.0)
    base = tl.where(highest == _NOTHING, 0.0, highest)
    return base + tl.log2(tl.sum(total * tl.exp2(best - base), 0))


@triton.jit
def pool_pages(
    scores,
    stats,
    page,
    entries,
    programs,
    score_stride,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    STATS: tl.constexpr,
    POOLING: tl.constexpr,
):
    """Pool over the group and the entries of a page, as :meth:`Pooling.pool` has it.

    Args:
        scores, stats: Scores of one KV head of a row; see :class:`DevicePlan`.
        page: int32 [n]; which pages.
        entries: Entries of the context; what is beyond them is not read.
        programs: Parts of the stats.
        score_stride: From a query head's scores to the next one's.

    Returns:
        float32 [n], to the base 2 where they are logarithms.
    """
    top = tl.full(page.shape, _NOTHING, tl.float32)
    if POOLING == _SUM:
        for part in tl.static_range(PARTS):
            entry = page * PARTS + part
            sums = tl.where(entry < entries, 0.0, _NOTHING)
            for member in tl.range(GROUP):
                of_head = scores + member * score_stride + entry
                sums += tl.load(of_head, mask=entry < entries, other=0.0)
            top = tl.maximum(top, sums)
        return top
    for member in tl.range(GROUP):
        norm = 0.0
        if POOLING != _MAX:
            norm = _norm(stats + member, programs, GROUP, POOLING, STATS)
        for part in tl.static_range(PARTS):
            entry = page * PARTS + part
            of_head = scores + member * score_stride + entry
            top = tl.maximum(top, tl.load(of_head, mask=entry < entries, other=_NOTHING) - norm)
    if POOLING == _MAX:
        return top
    base = tl.where(top == _NOTHING, 0.0, top)
    mass = tl.zeros(page.shape, tl.float32)
    for member in tl.range(GROUP):
        norm = _norm(stats + member, programs, GROUP, POOLING, STATS)
        for part in tl.static_range(PARTS):
            entry = page * PARTS + part
            of_head = scores + member * score_stride + entry
            less = tl.load(of_head, mask=entry < entries, other=_NOTHING) - norm
            mass += tl.exp2(less - base)
    return base + tl.log2(mass)


@triton.jit
def pool_highest(
    scores,
    stats,
    token,
    tokens,
    programs,
    score_stride,
    kv_heads,
    GROUP: tl.constexpr,
    STATS: tl.constexpr,
):
    """The highest share that any query head of any KV head gives tokens, as a logarithm to base 2.

    Args:
        scores, stats: Scores of the first KV head of a row; see :class:`DevicePlan`.
        token: int32 [n]; which tokens.
        tokens: Tokens of the context.
        programs: Parts of the stats.
        score_stride: From a query head's scores to the next one's.
        kv_heads: KV heads, one's scores after another's.

    Returns:
        float32 [n].
    """
    top = tl.full(token.shape, _NOTHING, tl.float32)
    for head in tl.range(kv_heads):
        of_pair = stats + head * (programs * 2 * GROUP)
        for member in tl.range(GROUP):
            norm = _norm(of_pair + member, programs, GROUP, _SUM, STATS)
            of_head = scores + (head * GROUP + member) * score_stride + token
            top = tl.maximum(top, tl.load(of_head, mask=token < tokens, other=_NOTHING) - norm)
    return top
