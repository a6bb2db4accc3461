"""Rows of numbers in few bits, byte by byte as ``retrieval/codec/rows.py`` has them.

A unit has a row of keys per channel, whose elements are those of the page's tokens, and a row of
values per token. A tile is some rows in all their elements. A byte has codes of rows that are
``rows * bits / 8`` apart.
"""

import triton
import triton.language as tl

from vllm_kvretrieval.retrieval.codec.rows import (
    LEAST_STEP,
    MOST,
    AroundZero,
    Centred,
    FromLowest,
    Rows,
)

WAYS: dict[type[Rows], int] = {Centred: 0, FromLowest: 1, AroundZero: 2}
"""The ways to encode rows; their numbers in kernels."""

_CENTRED = tl.constexpr(WAYS[Centred])
_FROM_LOWEST = tl.constexpr(WAYS[FromLowest])
_AROUND_ZERO = tl.constexpr(WAYS[AroundZero])
_MOST = tl.constexpr(MOST)
_LEAST_STEP = tl.constexpr(LEAST_STEP)
_NO_STEP = tl.constexpr(0x7FC00000)
"""The bits of the step of a row that cannot be encoded: no number."""


@triton.jit
def element_at(row, token, TRANSPOSED: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Where an element of a row lies in a unit, or in a token of one.

    Args:
        row, token: Numbers of the row and of its element.
        TRANSPOSED: Whether rows are channels of keys; else they are tokens' values.
    """
    if TRANSPOSED:
        return token * (2 * HEAD_SIZE) + row
    return row * (2 * HEAD_SIZE) + HEAD_SIZE + token


@triton.jit
def _keep_bits(x, MANTISSA: tl.constexpr):
    DROP: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + ((1 << DROP) - 1)) >> DROP << DROP).to(tl.float32, bitcast=True)


@triton.jit
def encodable(x, mask):
    """Which rows of a tile can be encoded, by their elements, float32 [rows, elements]."""
    return tl.max(tl.where(mask & ~(tl.abs(x) <= _MOST), 1, 0), 1) == 0


@triton.jit
def ends_of(x, mask):
    """The lowest and the highest elements of the rows of a tile, float32 [rows] each."""
    low = tl.min(tl.where(mask, x, float("inf")), 1)
    return low, tl.max(tl.where(mask, x, float("-inf")), 1)


@triton.jit
def fit(low, high, known, WAY: tl.constexpr, LEVELS: tl.constexpr):
    """Step and base of rows, and the two words that keep them, of which the second may be unused.

    Args:
        low, high: float32 [rows]; the elements between which the others are.
        known: Whether the rows can be encoded.
        WAY, LEVELS: How rows are encoded, and the largest code.

    Returns:
        Step and base, float32 [rows], of rows that can be encoded; and the words.
    """
    low = tl.where(known & (low != 0), low, 0.0)  # zero has no sign
    high = tl.where(known, high, 0.0)
    if WAY == _CENTRED:
        step = tl.math.div_rn(tl.maximum(-low, high), LEVELS // 2 + 0.0)
        step = _keep_bits(tl.maximum(step, _LEAST_STEP), 7)
        base = -(LEVELS // 2) * step
        second = tl.zeros_like(step).to(tl.int32)
    elif WAY == _FROM_LOWEST:
        bits = low.to(tl.int32, bitcast=True)
        nearer = (bits >> 16 << 16).to(tl.float32, bitcast=True)
        base = tl.where(nearer <= low, nearer, _keep_bits(low, 7))
        step = tl.math.div_rn(high - base, LEVELS + 0.0)
        step = _keep_bits(tl.maximum(step, _LEAST_STEP), 7)
        second = (base.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    else:
        low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
        step = tl.math.div_rn(high - low, LEVELS + 0.0)
        step = _keep_bits(tl.maximum(step, _LEAST_STEP), 4)
        zero = (tl.math.div_rn(-low, step) + 0.5).to(tl.int32)
        base = -zero.to(tl.float32) * step
        second = tl.where(known, zero, 0)
    bits = tl.where(known, step.to(tl.int32, bitcast=True), _NO_STEP)
    if WAY == _AROUND_ZERO:
        return step, base, (bits >> 19 << 4) | second, second
    return step, base, bits >> 16, second


@triton.jit
def codes_of(x, step, base, known, LEVELS: tl.constexpr):
    """The codes of the elements of rows, int32; 0 in rows that cannot be encoded."""
    scaled = (x - base[:, None]) * tl.math.div_rn(1.0, step)[:, None]
    scaled = tl.minimum(tl.maximum(scaled, 0.0), LEVELS + 0.0)
    return tl.where(known[:, None], (scaled + 0.5).to(tl.int32), 0)


@triton.jit
def scale_of(words, row, mask, WAY: tl.constexpr, LEVELS: tl.constexpr):
    """Step and base of rows, by the words of a unit's rows; no number where there are none."""
    if WAY == _FROM_LOWEST:
        step = tl.load(words + 2 * row, mask=mask, other=0).to(tl.int32) << 16
        base = tl.load(words + 2 * row + 1, mask=mask, other=0).to(tl.int32) << 16
        return step.to(tl.float32, bitcast=True), base.to(tl.float32, bitcast=True)
    word = tl.load(words + row, mask=mask, other=0).to(tl.int32)
    if WAY == _CENTRED:
        step = (word << 16).to(tl.float32, bitcast=True)
        return step, -(LEVELS // 2) * step
    step = (word >> 4 << 19).to(tl.float32, bitcast=True)
    return step, -(word & 15).to(tl.float32) * step


@triton.jit
def rounded(x, kind: tl.constexpr):
    """float32 in the dtype of a cache: the nearest number, of two as near the even one.

    For bfloat16 it is spelled out, since the interpreter cuts off.
    """
    if kind == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where(x == x, near, _NO_STEP >> 16)
        return near.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(kind)


@triton.jit
def store_words(words, row, first, second, mask, WAY: tl.constexpr):
    """Keep the words of rows, as :func:`fit` returns them, where :func:`scale_of` finds them."""
    if WAY == _FROM_LOWEST:
        tl.store(words + 2 * row, first.to(tl.uint16), mask=mask)
        tl.store(words + 2 * row + 1, second.to(tl.uint16), mask=mask)
    else:
        tl.store(words + row, first.to(tl.uint16), mask=mask)
