"""Rows of numbers in few bits: ``x = code * step + base``, with step and base by row.

The step and base of a row are kept in one or two words of 16 bits, and are rounded so that every
element of the row has a code that is at most half a step away. A row with an element that is not
finite, or beyond ``MOST``, is decoded as NaN from end to end, never as numbers.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch

MOST = 2.0**120
"""Largest magnitude that is encoded."""
LEAST_STEP = 2.0**-100
"""Rows with only smaller numbers are decoded as zeros."""


class Scale(NamedTuple):
    """Step and base of rows, float32 [..., rows] each.

    Attributes:
        step: NaN if a row cannot be encoded; ``base`` is then 0.
    """

    step: torch.Tensor
    base: torch.Tensor


def keep_bits(x: torch.Tensor, mantissa: int) -> torch.Tensor:
    """float32; magnitudes rounded up to a number of bits of mantissa."""
    drop = 23 - mantissa
    bits = x.contiguous().view(torch.int32)
    return ((bits + ((1 << drop) - 1)) >> drop << drop).view(torch.float32)


def encodable(rows: torch.Tensor) -> torch.Tensor:
    """Which rows can be encoded, bool [..., rows], of float32 [..., rows, n]."""
    return rows.abs().amax(-1) <= MOST


def to_bytes(words: torch.Tensor) -> torch.Tensor:
    """Whole numbers [n, ...] below 2 to the 16, as uint8 [n, bytes], the low ones first."""
    return torch.stack([words & 255, words >> 8], -1).to(torch.uint8).flatten(1)


def from_bytes(data: torch.Tensor) -> torch.Tensor:
    """The result of :func:`to_bytes` as int32 [n, words]."""
    low, high = data.int().unflatten(1, (-1, 2)).unbind(-1)
    return low + (high << 8)


def low_bits(x: torch.Tensor) -> torch.Tensor:
    """float32 rounded down to bfloat16."""
    nearer = (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32)
    return torch.where(nearer <= x, nearer, keep_bits(x, 7))


class Rows(ABC):
    """One way to encode rows.

    Args:
        bits: Bits of a code; 2, 4 or 8.

    Attributes:
        words: Words of 16 bits that hold a row's scale.
        levels: The largest code.
    """

    words: ClassVar[int]

    def __init__(self, bits: int) -> None:
        self.bits, self.levels = bits, (1 << bits) - 1

    @abstractmethod
    def _fit(self, low: torch.Tensor, high: torch.Tensor) -> Scale:
        """Scale of rows between a lowest and a highest element, both float32 [..., rows]."""

    @abstractmethod
    def _pack(self, scale: Scale) -> torch.Tensor:
        """The words of scales, int32 [..., rows, words], each below 2 to the 16."""

    @abstractmethod
    def _unpack(self, words: torch.Tensor) -> Scale:
        """The scale that is held in words."""

    def fit(self, rows: torch.Tensor) -> Scale:
        """Scale of rows, float32 [..., rows, n]."""
        known = encodable(rows)
        low, high = rows.amin(-1) + 0.0, rows.amax(-1)  # zero has no sign, whichever came first
        zero = torch.zeros_like(low)
        step, base = self._fit(torch.where(known, low, zero), torch.where(known, high, zero))
        return Scale(torch.where(known, step, torch.nan), torch.where(known, base, zero))

    def encode(self, rows: torch.Tensor, fitted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode rows, float32 [n, rows, elements], into words and codes, uint8 [n, bytes] each.

        Each has the scale of its row of ``fitted``; an element beyond gets the first or last code.
        If a byte has several codes, they belong to the same element of rows that are
        ``rows * bits / 8`` apart, the first in the lowest bits.
        """
        scale = self.fit(fitted)
        step, base = (part[..., None] for part in self._rounded(scale))
        scaled = ((rows - base) * (1 / step)).clamp(0, self.levels) + 0.5
        codes = scaled.floor().nan_to_num(nan=0.0).int()
        together = codes.unflatten(1, (8 // self.bits, -1))
        shifts = self.bits * torch.arange(8 // self.bits)
        data = (together << shifts[:, None, None]).sum(1).to(torch.uint8)
        return to_bytes(self._pack(scale)), data.flatten(1)

    def decode(self, words: torch.Tensor, codes: torch.Tensor, elements: int) -> torch.Tensor:
        """Decode the result of :meth:`encode` into float32 [n, rows, elements]."""
        packed = from_bytes(words).unflatten(1, (-1, self.words))
        step, base = (part[..., None] for part in self._unpack(packed))
        together = codes.int().unflatten(1, (1, -1, elements))
        shifts = self.bits * torch.arange(8 // self.bits)
        found = (together >> shifts[:, None, None]) & ((1 << self.bits) - 1)
        return found.flatten(1, 2) * step + base

    def error_bound(self, rows: torch.Tensor) -> torch.Tensor:
        """The largest error, float32 [..., rows, n]: half a step, and rounding of arithmetic."""
        step, base = self._rounded(self.fit(rows))
        bound = step * 0.5 + (step * self.levels + base.abs()) * 2.0**-22
        return bound[..., None].expand_as(rows)

    def _rounded(self, scale: Scale) -> Scale:
        return self._unpack(self._pack(scale))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


class Centred(Rows):
    """Steps from zero up and down, for 8 bits; the word is the step as bfloat16."""

    words = 1

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self.levels -= 1  # as many below zero as above

    def _fit(self, low: torch.Tensor, high: torch.Tensor) -> Scale:
        step = torch.maximum(-low, high) / (self.levels // 2)
        return self._scale(keep_bits(step.clamp(min=LEAST_STEP), 7))

    def _scale(self, step: torch.Tensor) -> Scale:
        return Scale(step, -(self.levels // 2) * step)

    def _pack(self, scale: Scale) -> torch.Tensor:
        return (_bits(scale.step) >> 16)[..., None]

    def _unpack(self, words: torch.Tensor) -> Scale:
        return self._scale((words[..., 0] << 16).view(torch.float32))


class FromLowest(Rows):
    """Steps from the lowest element up; two words, the step and the base as bfloat16."""

    words = 2

    def _fit(self, low: torch.Tensor, high: torch.Tensor) -> Scale:
        base = low_bits(low)
        return Scale(keep_bits(((high - base) / self.levels).clamp(min=LEAST_STEP), 7), base)

    def _pack(self, scale: Scale) -> torch.Tensor:
        return torch.stack([_bits(part) >> 16 & 0xFFFF for part in scale], -1)

    def _unpack(self, words: torch.Tensor) -> Scale:
        return Scale(*((word << 16).view(torch.float32) for word in words.unbind(-1)))


class AroundZero(Rows):
    """Steps that meet zero, of up to 4 bits.

    The word has the step, 8 bits of exponent and 4 of mantissa, and below it the code of zero.
    """

    words = 1

    def _fit(self, low: torch.Tensor, high: torch.Tensor) -> Scale:
        low, high = low.clamp(max=0), high.clamp(min=0)
        step = keep_bits(((high - low) / self.levels).clamp(min=LEAST_STEP), 4)
        return Scale(step, -(-low / step + 0.5).floor() * step)

    def _pack(self, scale: Scale) -> torch.Tensor:
        zero = (-scale.base / scale.step).nan_to_num(nan=0.0).int()
        return (_bits(scale.step) >> 19 << 4 | zero)[..., None]

    def _unpack(self, words: torch.Tensor) -> Scale:
        step = (words[..., 0] >> 4 << 19).view(torch.float32)
        return Scale(step, -(words[..., 0] & 15) * step)
