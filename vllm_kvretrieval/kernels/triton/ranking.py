"""The highest of some keys, and the best of some scores, without sorting them."""

import triton
import triton.language as tl

_LEAST = tl.constexpr(-0x7FFFFFFF)
"""Less than the key of any float."""
_MOST = tl.constexpr(0x7FFFFFFF)
"""More than the key of any float."""
_COUNT = tl.constexpr((1 << 20) - 1)


@triton.jit
def _middle(low, high):
    """The number half way between two, rounded down."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def find_highest(keys, count, low, high):
    """Find the highest of some keys; of equal ones the earlier.

    Args:
        keys: int32 [n], fewer than 2 ** 20.
        count: How many to find.
        low: int32; a key that so many reach or exceed.
        high: int32; one that fewer do.

    Returns:
        bool [n].
    """
    while low + 1 < high:
        # A sum takes threads longer than what is added: so three at once quarter what is between.
        half = _middle(low, high)
        lower, upper = _middle(low, half), _middle(half, high)
        reaching = (keys >= lower).to(tl.int64)
        reaching += ((keys >= half).to(tl.int64) << 20) + ((keys >= upper).to(tl.int64) << 40)
        reaching = tl.sum(reaching, 0)
        of_lower, of_half, of_upper = reaching & _COUNT, (reaching >> 20) & _COUNT, reaching >> 40
        if of_upper >= count:
            low = upper
            if of_upper == count:
                high = low + 1
        elif of_half >= count:
            low, high = half, upper
            if of_half == count:
                high = low + 1
        elif of_lower >= count:
            low, high = lower, half
            if of_lower == count:
                high = low + 1
        else:
            high = lower
    above = keys > low
    equal = keys == low
    still = count - tl.sum(above.to(tl.int32), 0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= still))


@triton.jit
def order_of(scores, candidate):
    """Floats as whole numbers of the same order, int32; less than any for what is no candidate."""
    bits = (tl.where(scores == scores, scores, float("-inf")) + 0.0).to(tl.int32, bitcast=True)
    return tl.where(candidate, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LEAST)


@triton.jit
def find_best(scores, candidate, count):
    """Find the candidates of the highest scores; of equal ones the earlier.

    Args:
        scores: float32 [n]; what is no number comes last.
        candidate: bool [n].
        count: How many to find; where there are fewer candidates, all of them.

    Returns:
        bool [n], and int32 [n]: the place of each that is found among those that are.
    """
    keys = order_of(scores, candidate)
    count = tl.minimum(count, tl.sum(candidate.to(tl.int32), 0))
    highest = tl.max(keys, 0)
    lowest = tl.min(tl.where(candidate, keys, highest), 0)
    best = find_highest(keys, count, lowest, highest + 1)
    return best, tl.cumsum(best.to(tl.int32), 0) - 1


@triton.jit
def bar_of(keys, place, best):
    """What tells the best of some keys, int32 [n], from others at any places: see `is_beyond`."""
    bar = tl.min(tl.where(best, keys, _MOST), 0)
    return bar, tl.max(tl.where(best & (keys == bar), place, -1), 0)


@triton.jit
def is_beyond(keys, place, bar, last):
    """Whether keys are among the best: beyond the least of these, or as early as its last place."""
    return (keys > bar) | ((keys == bar) & (place <= last))
