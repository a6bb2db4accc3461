"""Low-rank factors of the keys: every key of an entry, approximately."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field, Index

NIBBLE_MOST, BYTE_MOST = 7, 127
QUERY_MOST, FINE_MOST = 127, 16383
LEAST_SCALE = 1e-8
MOST_DIRECTIONS = 16


@dataclass(frozen=True)
class LowRank(Index):
    """The score is the log-sum-exp of ``q.k`` over keys that a few directions make up.

    Keys are their mean and, for the rest, ``coefficients @ directions``: the first singular vectors
    of the centred keys, rounded, and the coefficients that then come nearest to the keys. Kernels
    may build others that approximate the keys nearly as well. It estimates the attention that an
    entry gets, as :class:`Exact` has it, where :class:`MinMax` bounds that of its best key.

    The mean is kept in 8 bits, directions and coefficients in 4, as whole numbers of a scale: one
    for the mean and one for each direction. (Coefficients in 8 bits are no better, more directions
    are.) Queries are rounded to ``QUERY_MOST`` multiples of a scale to be multiplied with
    directions, and to ``FINE_MOST`` with the mean, so that products are sums of whole numbers.

    Bytes: ``rank * (head_size / 2 + entry_tokens / 2 + 4) + head_size + 4``.

    Attributes:
        rank: Directions, less than the tokens of an entry. 0: 11 for heads of up to 64 channels, 10
            for others; with 32 tokens per entry, 8 % and 6 % of a cache in 16 bits.
    """

    rank: int = 0
    name: ClassVar[str] = "low_rank"

    def check(self, entry_tokens: int) -> str:
        """See :meth:`Index.check`."""
        if entry_tokens < 16:
            return f"entries of {entry_tokens} tokens are too small; use summary_size=16 or more"
        most = min(entry_tokens - 1, MOST_DIRECTIONS)
        if isinstance(self.rank, int) and 0 <= self.rank <= most:
            return ""
        return f"rank={self.rank} must be a whole number from 1 to {most}, or 0 for the default"

    def directions(self, head_size: int) -> int:
        """How many there are."""
        return self.rank or (11 if head_size <= 64 else 10)

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`."""
        rank = self.directions(head_size)
        return (
            Field("mean_scale", torch.float32, (1,)),
            Field("scales", torch.float32, (rank,)),
            Field("mean", torch.int8, (head_size,)),
            Field("directions", torch.uint8, (head_size // 8, rank, 4)),
            Field("coefficients", torch.uint8, (rank, entry_tokens // 16, 8)),
        )

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        mean, mean_scale = _rounded(keys.mean(1), BYTE_MOST)
        right = torch.linalg.svd(keys - keys.mean(1, keepdim=True), full_matrices=False).Vh
        rank = self.directions(keys.shape[2])
        directions, _ = _rounded(right[:, :rank], NIBBLE_MOST)
        rest = (keys - (mean * mean_scale)[:, None]).transpose(1, 2)
        nearest = torch.linalg.pinv(directions.transpose(1, 2)) @ rest
        coefficients, scales = _rounded(nearest, NIBBLE_MOST)
        return {
            "mean_scale": mean_scale,
            "scales": scales[..., 0],
            "mean": mean,
            "directions": _pair_channels(directions),
            "coefficients": _pair_tokens(coefficients),
        }

    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score`."""
        coarse, coarse_scale = _rounded(query, QUERY_MOST)
        fine, fine_scale = _rounded(query, FINE_MOST)
        directions, coefficients = (
            channels_of(record["directions"]),
            tokens_of(record["coefficients"]),
        )
        along = torch.einsum("gd,nrd->gnr", coarse, directions) * (coarse_scale * scale)[..., None]
        rest = torch.einsum("gnr,nrt->gnt", along * record["scales"], coefficients)
        mean = (fine @ record["mean"].float().T) * (fine_scale * scale) * record["mean_scale"][:, 0]
        return mean + rest.logsumexp(-1)


def _rounded(values: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers from -most to most, and what to multiply them with, per last dimension."""
    scale = values.abs().amax(-1, keepdim=True).div(most).clamp(min=LEAST_SCALE)
    return (values / scale).round(), scale


def _pair_channels(directions: torch.Tensor) -> torch.Tensor:
    """Whole numbers of 4 bits, [n, rank, head_size], as bytes, [n, head_size / 8, rank, 4].

    A byte has a channel of the lower half of the head in its low bits and one of the upper half in
    its high bits, both plus 8. Four channels of a direction lie side by side, then the same of the
    next direction: so products with a query come out a direction per lane.
    """
    low, high = (directions + 8).to(torch.uint8).unflatten(-1, (2, -1, 4)).unbind(2)
    return (low | high << 4).transpose(1, 2)


def channels_of(pairs: torch.Tensor) -> torch.Tensor:
    """The directions, [n, rank, head_size], in floats."""
    halves = torch.stack([pairs & 15, pairs >> 4], 1).permute(0, 3, 1, 2, 4)
    return halves.flatten(2).float() - 8


def _pair_tokens(coefficients: torch.Tensor) -> torch.Tensor:
    """Whole numbers of 4 bits, [n, rank, tokens], as bytes, [n, rank, tokens / 16, 8].

    A byte has a token in its low bits and the eighth one after it in its high bits, both plus 8.
    """
    low, high = (coefficients + 8).to(torch.uint8).unflatten(-1, (-1, 2, 8)).unbind(-2)
    return low | high << 4


def tokens_of(pairs: torch.Tensor) -> torch.Tensor:
    """The coefficients, [n, rank, tokens], in floats."""
    return torch.stack([pairs & 15, pairs >> 4], -2).flatten(2).float() - 8
