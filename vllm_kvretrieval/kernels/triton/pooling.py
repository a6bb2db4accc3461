"""The scores of a group's query heads for the entries of pages, made one per page."""

import triton
import triton.language as tl

from vllm_kvretrieval.kernels.triton.stats import MEMBERS
from vllm_kvretrieval.retrieval.pooling import Pooling

_RELATIVE = tl.constexpr(int(Pooling.RELATIVE))
_MAX = tl.constexpr(int(Pooling.MAX))
_SUM = tl.constexpr(int(Pooling.SUM))
_MAX_SOFTMAX = tl.constexpr(int(Pooling.MAX_SOFTMAX))
_MEMBERS = tl.constexpr(MEMBERS)
_NOTHING = tl.constexpr(float("-inf"))
_SHARED = tl.constexpr(".cg")
"""Reads past a multiprocessor's own cache what other programs of the launch may have written."""


@triton.jit
def _norms(stats, programs, GROUP: tl.constexpr, POOLING: tl.constexpr, STATS: tl.constexpr):
    """What is taken off each head's scores before they are pooled: float32 [MEMBERS]."""
    part = tl.arange(0, STATS)[:, None]
    member = tl.arange(0, _MEMBERS)[None, :]
    there = (part < programs) & (member < GROUP)
    of_part = stats + part * (2 * GROUP) + member
    best = tl.load(of_part, mask=there, other=_NOTHING, cache_modifier=_SHARED)
    highest = tl.max(best, 0)
    if POOLING == _RELATIVE:
        return highest
    total = tl.load(of_part + GROUP, mask=there, other=0.0, cache_modifier=_SHARED)
    base = tl.where(highest == _NOTHING, 0.0, highest)
    return base + tl.log2(tl.sum(total * tl.exp2(best - base[None, :]), 0))


@triton.jit
def _of_member(norms, member):
    """One of the norms."""
    return tl.sum(tl.where(tl.arange(0, _MEMBERS) == member, norms, 0.0), 0)


@triton.jit
def _read(scores, entry, entries):
    """The scores of entries; of what is beyond the context, minus infinity."""
    return tl.load(scores + entry, mask=entry < entries, other=_NOTHING, cache_modifier=_SHARED)


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
            sums = tl.zeros(page.shape, tl.float32)
            for member in tl.range(GROUP):
                sums += _read(scores + member * score_stride, entry, entries)
            top = tl.maximum(top, sums)
        return top
    norms = tl.zeros([_MEMBERS], tl.float32)  # the compiler wants it in any case
    if POOLING != _MAX:
        norms = _norms(stats, programs, GROUP, POOLING, STATS)
    for member in tl.range(GROUP):
        norm = 0.0
        if POOLING != _MAX:
            norm = _of_member(norms, member)
        for part in tl.static_range(PARTS):
            less = _read(scores + member * score_stride, page * PARTS + part, entries) - norm
            top = tl.maximum(top, less)
    if POOLING == _MAX:
        return top
    base = tl.where(top == _NOTHING, 0.0, top)
    mass = tl.zeros(page.shape, tl.float32)
    if POOLING == _MAX_SOFTMAX:
        for part in tl.static_range(PARTS):
            highest = tl.full(page.shape, _NOTHING, tl.float32)
            for member in tl.range(GROUP):
                norm = _of_member(norms, member)
                less = _read(scores + member * score_stride, page * PARTS + part, entries) - norm
                highest = tl.maximum(highest, less)
            mass += tl.exp2(highest - base)
        return base + tl.log2(mass)
    for member in tl.range(GROUP):
        norm = _of_member(norms, member)
        for part in tl.static_range(PARTS):
            less = _read(scores + member * score_stride, page * PARTS + part, entries) - norm
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
        norms = _norms(stats + head * (programs * 2 * GROUP), programs, GROUP, _SUM, STATS)
        for member in tl.range(GROUP):
            of_head = scores + (head * GROUP + member) * score_stride
            top = tl.maximum(top, _read(of_head, token, tokens) - _of_member(norms, member))
    return top
