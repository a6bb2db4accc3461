"""Low-rank factors of the keys: every key of an entry, approximately."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field, Index

NIBBLE_MOST, BYTE_MOST = 7, 127
QUERY_MOST, FINE_MOST = 127, 16383
LEAST_SCALE = 1e-8
LEAST_MEAN_STEPS = 64
MOST_DIRECTIONS = 16
STEPS, OCTAVES = 16, 16
"""Steps per octave, and octaves, of a direction's scale; the fourth highest one is the mean's."""


@dataclass(frozen=True)
class LowRank(Index):
    """The score is the log-sum-exp of ``q.k`` over keys that a few directions make up.

    Keys are their mean and, for the rest, ``coefficients @ directions``: the first singular vectors
    of the centred keys, rounded, and the coefficients that then come nearest to the keys. Kernels
    may build others that approximate the keys nearly as well. It estimates the attention that an
    entry gets, as :class:`Exact` has it, where :class:`MinMax` bounds that of its best key.

    The mean is kept in 8 bits, directions and coefficients in 4, as whole numbers of a scale: one
    for the mean and, relative to it, a byte for each direction. (Coefficients in 8 bits are no
    better, more directions are.) Queries are rounded to ``QUERY_MOST`` multiples of a scale to be
    multiplied with directions, what comes out to 8 bits again, and to ``FINE_MOST`` with the mean,
    so that products are sums of whole numbers.

    Bytes: ``rank * (head_size / 2 + 1) + pairs * entry_tokens + head_size + 2``, where ``pairs`` is
    half the rank, rounded up.

    Attributes:
        rank: Directions, less than the tokens of an entry. 0: see :meth:`directions`.
    """

    rank: int = 0
    name: ClassVar[str] = "low_rank"
    estimates: ClassVar[bool] = True
    spans: ClassVar[bool] = True

    def check(self, entry_tokens: int) -> str:
        """See :meth:`Index.check`."""
        if entry_tokens < 16:
            return f"entries of {entry_tokens} tokens are too small; use summary_size=16 or more"
        most = min(entry_tokens - 1, MOST_DIRECTIONS)
        if isinstance(self.rank, int) and 0 <= self.rank <= most:
            return ""
        return f"rank={self.rank} must be a whole number from 1 to {most}, or 0 for the default"

    def directions(self, head_size: int, entry_tokens: int) -> int:
        """The number of directions.

        By default entries of 16 tokens have 6 of them for heads of up to 64 channels and 4 for
        others (8 % and 5 % of a cache in 16 bits), larger entries 12 and 10 (of 32 tokens, 8 % and
        6 %).
        """
        small = head_size <= 64
        by_size = (6 if small else 4) if entry_tokens <= 16 else (12 if small else 10)
        return self.rank or by_size

    def parameters(self, head_size: int, entry_tokens: int) -> dict[str, float]:
        """See :meth:`Index.parameters`."""
        return {"rank": self.directions(head_size, entry_tokens)}

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`."""
        rank = self.directions(head_size, entry_tokens)
        return (
            Field("mean_scale", torch.bfloat16, (1,)),
            Field("scales", torch.uint8, (rank,)),
            Field("mean", torch.int8, (head_size,)),
            Field("directions", torch.uint8, (rank * head_size // 2,)),
            Field("coefficients", torch.uint8, ((rank + 1) // 2, entry_tokens // 16, 8, 2)),
        )

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        centre = keys.mean(1)
        rest = (keys - centre[:, None]).transpose(1, 2)
        least = rest.abs().amax((1, 2)) / LEAST_MEAN_STEPS
        mean_scale = (centre.abs().amax(1) / BYTE_MOST).maximum(least).clamp(min=LEAST_SCALE)
        mean_scale = mean_scale[:, None].bfloat16().float()
        mean = (centre / mean_scale).round()
        right = torch.linalg.svd(rest.transpose(1, 2), full_matrices=False).Vh
        directions, _ = _rounded(
            right[:, : self.directions(keys.shape[2], keys.shape[1])], NIBBLE_MOST
        )
        rest = rest + (centre - mean * mean_scale)[..., None]
        nearest = torch.linalg.pinv(directions.transpose(1, 2)) @ rest
        scales = _scale_bytes(nearest.abs().amax(2) / NIBBLE_MOST / mean_scale)
        steps = scales_of(scales) * mean_scale
        coefficients = (nearest / steps[..., None]).round().clamp(-NIBBLE_MOST, NIBBLE_MOST)
        return {
            "mean_scale": mean_scale,
            "scales": scales,
            "mean": mean,
            "directions": _pair_channels(directions),
            "coefficients": _pair_tokens(coefficients),
        }

    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score`."""
        return self.score_pages(query, record, scale, 1)[..., 0]

    def score_pages(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float, pages: int
    ) -> torch.Tensor:
        """See :meth:`Index.score_pages`."""
        coarse, coarse_scale = _rounded(query, QUERY_MOST)
        fine, fine_scale = _rounded(query, FINE_MOST)
        mean_scale = record["mean_scale"].float()
        scales = scales_of(record["scales"]) * mean_scale
        directions = channels_of(record["directions"], scales.shape[1], query.shape[1])
        along, unit = _in_bytes(torch.einsum("gd,nrd->gnr", coarse, directions) * scales)
        tokens = torch.einsum(
            "gnr,nrt->gnt", along, tokens_of(record["coefficients"], scales.shape[1])
        )
        rest = tokens * (unit * (coarse_scale * scale)[..., None])
        mean = (fine @ record["mean"].float().T) * (fine_scale * scale) * mean_scale[:, 0]
        return mean[..., None] + rest.unflatten(-1, (pages, -1)).logsumexp(-1)


def _rounded(values: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers from -most to most, and their factors, per last dimension."""
    scale = values.abs().amax(-1, keepdim=True).div(most).clamp(min=LEAST_SCALE)
    return (values / scale).round(), scale


def _in_bytes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers from -128 to 127, and powers of two as their factors, per last dimension."""
    most = values.abs().amax(-1, keepdim=True)
    unit = torch.ldexp(torch.ones_like(most), torch.frexp(most).exponent.clamp(min=-62) - 7)
    return (values / unit).round().clamp(-128, 127), unit


def _scale_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Scales, rounded up, as bytes: the octave above, the step in it below."""
    mantissa, exponent = torch.frexp(scales)
    steps = (exponent - 1 + 12) * STEPS + ((2 * mantissa - 1) * STEPS).ceil()
    return steps.clamp(0, STEPS * OCTAVES - 1).to(torch.uint8)


def scales_of(steps: torch.Tensor) -> torch.Tensor:
    """The reverse of :func:`_scale_bytes`: from 2**-12 up to nearly 2**4."""
    whole = steps.int()
    return torch.ldexp(1 + (whole % STEPS) / STEPS, whole // STEPS - 12)


def _blocks(rank: int) -> list[int]:
    """Sizes of the blocks of directions: as many 8 as fit, then at most one each of 4, 2 and 1."""
    return [8] * (rank // 8) + [size for size in (4, 2, 1) if rank & size]


def _pair_channels(directions: torch.Tensor) -> torch.Tensor:
    """Whole numbers of 4 bits, [n, rank, head_size], as bytes, [n, rank * head_size / 2].

    A byte has a channel of the lower half of the head in its low bits and one of the upper half in
    its high bits, both plus 8. Four channels of a direction lie side by side, then the same of the
    next direction of its block: so products with a query come out a direction per lane.
    """
    low, high = (directions + 8).to(torch.uint8).unflatten(-1, (2, -1, 4)).unbind(2)
    blocks = (low | high << 4).split(_blocks(directions.shape[1]), 1)
    return torch.cat([block.transpose(1, 2).flatten(1) for block in blocks], 1)


def channels_of(pairs: torch.Tensor, rank: int, head_size: int) -> torch.Tensor:
    """The directions, [n, rank, head_size], in floats."""
    sizes = _blocks(rank)
    blocks = pairs.split([size * head_size // 2 for size in sizes], 1)
    rows = [
        block.unflatten(1, (-1, size, 4)).transpose(1, 2)
        for block, size in zip(blocks, sizes, strict=True)
    ]
    together = torch.cat(rows, 1).flatten(2)
    return torch.cat([together & 15, together >> 4], 2).float() - 8


def _pair_tokens(coefficients: torch.Tensor) -> torch.Tensor:
    """Whole numbers of 4 bits, [n, rank, tokens], as bytes, [n, rank / 2, tokens / 16, 8, 2].

    A byte has a token in its low bits and the eighth one after it in its high bits, both plus 8;
    beside it is that of the next direction, so that these are summed first. Nothing is next to the
    last direction of an odd rank but zero.
    """
    padding = torch.zeros_like(coefficients[:, : coefficients.shape[1] % 2])
    even = torch.cat([coefficients, padding], 1).unflatten(1, (-1, 2))
    low, high = (even + 8).to(torch.uint8).unflatten(-1, (-1, 2, 8)).unbind(-2)
    return (low | high << 4).permute(0, 1, 3, 4, 2)


def tokens_of(pairs: torch.Tensor, rank: int) -> torch.Tensor:
    """The coefficients, [n, rank, tokens], in floats."""
    even = pairs.permute(0, 1, 4, 2, 3)
    tokens = torch.stack([even & 15, even >> 4], -2).flatten(3).float() - 8
    return tokens.flatten(1, 2)[:, :rank]
