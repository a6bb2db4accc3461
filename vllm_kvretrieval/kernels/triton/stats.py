"""Scores as programs leave them: with the highest of each program, and what its scores add up to.

:class:`vllm_kvretrieval.kernels.device.ScoreRoom` holds both.
"""

import triton
import triton.language as tl

MEMBERS = 16
"""Query heads of a tile: the fewest rows that the tensor cores multiply."""

_MEMBERS = tl.constexpr(MEMBERS)
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def keep_scores(
    scored,
    there,
    place,
    scores,
    score_stride,
    best,
    total,
    GROUP: tl.constexpr,
):
    """Keep scores of some entries, and take them into what the program's have added up to so far.

    Args:
        scored: float32 [MEMBERS, n], to the base 2; what is no number counts as minus infinity.
        there: bool [n]; others are left out.
        place: int32 [n]; numbers of the entries.
        scores: Pointer to the scores of the first query head.
        score_stride: From a query head's scores to the next one's.
        best, total: float32 [MEMBERS]; at first minus infinity, and 0.

    Returns:
        The new best and total.
    """
    members = tl.arange(0, _MEMBERS)
    scored = tl.where(there[None, :] & (scored == scored), scored, _NOTHING)
    to = scores + members[:, None] * score_stride + place[None, :]
    tl.store(to, scored, mask=(members < GROUP)[:, None] & there[None, :])
    highest = tl.maximum(best, tl.max(scored, 1))
    base = tl.where(highest == _NOTHING, 0.0, highest)
    total = total * tl.exp2(best - base) + tl.sum(tl.exp2(scored - base[:, None]), 1)
    return highest, total


@triton.jit
def keep_stats(best, total, stats, GROUP: tl.constexpr):
    """Keep what a program's scores have added up to, where its stats begin."""
    members = tl.arange(0, _MEMBERS)
    tl.store(stats + members, best, mask=members < GROUP)
    tl.store(stats + GROUP + members, total, mask=members < GROUP)
