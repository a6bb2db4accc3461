"""Low-rank factors of keys: building records, and what they say of queries.

:class:`vllm_kvretrieval.retrieval.index.low_rank.LowRank` describes the records. Directions are
found one after another here, each in what the ones before it, rounded, have left of the keys, by
power iteration from the token of which most is left: later ones make up for earlier rounding.
"""

import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import RECORD_ALIGNMENT
from vllm_kvretrieval.retrieval.index import low_rank

_ITERATIONS = tl.constexpr(4)
_NIBBLE = tl.constexpr(float(low_rank.NIBBLE_MOST))
_BYTE = tl.constexpr(float(low_rank.BYTE_MOST))
_LEAST = tl.constexpr(low_rank.LEAST_SCALE)
_LEAST_STEPS = tl.constexpr(float(low_rank.LEAST_MEAN_STEPS))
_STEPS = tl.constexpr(low_rank.STEPS)
_OCTAVES = tl.constexpr(low_rank.OCTAVES)
_LOWEST = tl.constexpr(12)
"""The first octave of a direction's scale begins with two to the power of minus so much."""
_ALIGNED = tl.constexpr(RECORD_ALIGNMENT)
_SCALES = tl.constexpr(RECORD_ALIGNMENT)
"""Where in a record the scales of directions are, of which there are no more than such bytes."""
_MEAN = tl.constexpr(2 * RECORD_ALIGNMENT)
"""Where the mean is, before the directions, which the coefficients follow."""


@triton.jit
def _whole(x):
    return tl.floor(x + 0.5)


@triton.jit
def _largest(low, high):
    return tl.maximum(tl.max(tl.abs(low)), tl.max(tl.abs(high)))


@triton.jit
def scale_of(step):
    """A direction's scale, relative to the mean's, of its byte."""
    whole = step.to(tl.int32)
    octave = tl.exp2((whole // _STEPS - _LOWEST).to(tl.float32))
    return octave * (1 + (whole % _STEPS).to(tl.float32) / _STEPS)


@triton.jit
def _step_of(scale):
    """The byte of a scale, rounded up."""
    bits = scale.to(tl.int32, bitcast=True)
    octave = (bits >> 23) - 127
    part = ((bits & 0x7FFFFF) + ((1 << 19) - 1)) >> 19
    return tl.minimum(tl.maximum((octave + _LOWEST) * _STEPS + part, 0), _STEPS * _OCTAVES - 1)


@triton.jit
def direction_bytes(channels, r, RANK: tl.constexpr, HALF: tl.constexpr):
    """Where a direction's bytes are, of channels of the lower half.

    Eight directions lie together, four channels of each in turn; then 4, 2 and 1.
    """
    FOUR: tl.constexpr = RANK & 4
    SIX: tl.constexpr = RANK & 6
    place = r % 8
    start = 0
    size = 8
    if r >= RANK // 8 * 8:
        size = 4
        if place >= FOUR:
            start = FOUR
            size = 2
            if place >= SIX:
                start = SIX
                size = 1
    first = r - place + start
    return first * HALF + channels // 4 * (4 * size) + (r - first) * 4 + channels % 4


@triton.jit
def _coefficients(RANK: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Where in a record the coefficients are, after the directions."""
    return _MEAN + HEAD_SIZE + tl.cdiv(RANK * HEAD_SIZE // 2, _ALIGNED) * _ALIGNED


@triton.jit
def build_low_rank(
    low,
    high,
    record,
    RANK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Build a record.

    Args:
        low, high: float32 [ENTRY, DIMS]; the lower and upper half of keys' channels, 0 behind.
        record: uint8 pointer.
    """
    HALF: tl.constexpr = HEAD_SIZE // 2
    dims = tl.arange(0, DIMS)
    mask = dims < HALF
    centre_low = tl.sum(low, 0) / ENTRY
    centre_high = tl.sum(high, 0) / ENTRY
    mean_scale = _largest(centre_low, centre_high) / _BYTE
    spread = _largest(low - centre_low[None, :], high - centre_high[None, :])
    mean_scale = tl.maximum(tl.maximum(mean_scale, spread / _LEAST_STEPS), _LEAST)
    mean_scale = mean_scale.to(tl.bfloat16)
    tl.store(record.to(tl.pointer_type(tl.bfloat16), bitcast=True), mean_scale)
    mean_scale = mean_scale.to(tl.float32)
    low -= _add_mean(centre_low, record + _MEAN, mean_scale, dims, mask)[None, :]
    high -= _add_mean(centre_high, record + _MEAN + HALF, mean_scale, dims, mask)[None, :]

    directions = record + _MEAN + HEAD_SIZE
    coefficients = record + _coefficients(RANK, HEAD_SIZE)
    token = tl.arange(0, ENTRY)
    byte = tl.arange(0, ENTRY // 2)
    for r in tl.range(RANK):
        left = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        start = token == tl.argmax(left, 0)
        to_low = tl.sum(tl.where(start[:, None], low, 0.0), 0)
        to_high = tl.sum(tl.where(start[:, None], high, 0.0), 0)
        for _ in tl.range(_ITERATIONS):
            unit = 1 / tl.maximum(_largest(to_low, to_high), 1e-30)
            along = tl.sum(low * (to_low * unit)[None, :], 1)
            along += tl.sum(high * (to_high * unit)[None, :], 1)
            along *= 1 / tl.maximum(tl.max(tl.abs(along)), 1e-30)
            to_low = tl.sum(low * along[:, None], 0)
            to_high = tl.sum(high * along[:, None], 0)
        unit = _NIBBLE / tl.maximum(_largest(to_low, to_high), 1e-30)
        to_low = _whole(to_low * unit)
        to_high = _whole(to_high * unit)
        length = tl.maximum(tl.sum(to_low * to_low) + tl.sum(to_high * to_high), 1.0)
        along = tl.sum(low * to_low[None, :], 1) + tl.sum(high * to_high[None, :], 1)
        along = along / length
        step = _step_of(tl.max(tl.abs(along)) / _NIBBLE / mean_scale)
        scale = scale_of(step) * mean_scale
        along = tl.minimum(tl.maximum(_whole(along / scale), -_NIBBLE), _NIBBLE)
        low -= (along * scale)[:, None] * to_low[None, :]
        high -= (along * scale)[:, None] * to_high[None, :]

        tl.store(record + _SCALES + r, step.to(tl.uint8))
        packed = (to_low.to(tl.int32) + 8) | ((to_high.to(tl.int32) + 8) << 4)
        to = directions + direction_bytes(dims, r, RANK, HALF)
        tl.store(to, packed.to(tl.uint8), mask=mask)
        nibbles = (along.to(tl.int32) + 8) << (token // 8 % 2 * 4)
        packed = tl.reshape(tl.sum(tl.reshape(nibbles, [ENTRY // 16, 2, 8]), 1), [ENTRY // 2])
        tl.store(coefficients + r // 2 * ENTRY + byte * 2 + r % 2, packed.to(tl.uint8))
    if RANK % 2:
        nothing = tl.full([ENTRY // 2], 0x88, tl.int32).to(tl.uint8)
        tl.store(coefficients + RANK // 2 * ENTRY + byte * 2 + 1, nothing)


@triton.jit
def _add_mean(centre, to, mean_scale, dims, mask):
    """Store half a mean; returns it as it is stored."""
    mean = tl.minimum(tl.maximum(_whole(centre / mean_scale), -_BYTE), _BYTE)
    tl.store(to + dims, mean.to(tl.int32).to(tl.uint8), mask=mask)
    return mean * mean_scale


@triton.jit
def score_low_rank(
    query_low,
    query_high,
    records,
    valid,
    scale,
    RANK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Score records, in units of the logarithm to base 2.

    Args:
        query_low, query_high: [MEMBERS, DIMS]; halves of the channels, 0 behind.
        records: uint8 pointers [TILE].
        valid: [TILE]; others are not read.
        scale: Softmax scale for exponentials to base 2.

    Returns:
        float32 [MEMBERS, TILE].
    """
    HALF: tl.constexpr = HEAD_SIZE // 2
    dims = tl.arange(0, DIMS)
    mask = (dims < HALF)[:, None] & valid[None, :]
    at = records.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    mean_scale = tl.load(at, mask=valid, other=0.0).to(tl.float32) * scale
    at = records[None, :] + _MEAN + dims[:, None]
    kind = query_low.dtype
    mean = tl.load(at, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32).to(kind)
    centre = tl.dot(query_low, mean, out_dtype=tl.float32)
    mean = tl.load(at + HALF, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32).to(kind)
    centre += tl.dot(query_high, mean, out_dtype=tl.float32)

    directions = records[None, :] + _MEAN + HEAD_SIZE
    token = tl.arange(0, ENTRY)
    # A word has coefficients of two directions, and of two tokens.
    words = records + _coefficients(RANK, HEAD_SIZE)
    words = words.to(tl.pointer_type(tl.uint16), bitcast=True)[:, None]
    words += (token // 16 * 8 + token % 8)[None, :]
    shift = (token // 8 % 2 * 4)[None, :]
    rest = tl.zeros([MEMBERS, TILE, ENTRY], tl.float32)
    for r in tl.range(RANK, num_stages=1):
        to = directions + direction_bytes(dims, r, RANK, HALF)[:, None]
        packed = tl.load(to, mask=mask, other=0).to(tl.int32)
        along = tl.dot(query_low, _signed(packed, 0).to(kind), out_dtype=tl.float32)
        along += tl.dot(query_high, _signed(packed, 4).to(kind), out_dtype=tl.float32)
        along *= scale_of(tl.load(records + _SCALES + r, mask=valid, other=0))[None, :]
        word = tl.load(words + r // 2 * (ENTRY // 2), mask=valid[:, None], other=0).to(tl.int32)
        rest += along[:, :, None] * _signed(word, shift + r % 2 * 8)[None, :, :]
    rest *= mean_scale[None, :, None]
    top = tl.max(rest, 2)
    mass = top + tl.log2(tl.sum(tl.exp2(rest - top[:, :, None]), 2))
    return centre * mean_scale[None, :] + mass


@triton.jit
def _signed(packed, shift):
    """The whole numbers, from -8 to 7, that four bits of others stand for."""
    return ((packed >> shift) & 15).to(tl.float32) - 8
