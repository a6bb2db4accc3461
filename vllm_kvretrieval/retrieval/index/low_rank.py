"""Low-rank factors of the keys: every key of an entry, approximately."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field, Index

LEAST_SCALE = 1e-8


@dataclass(frozen=True)
class LowRank(Index):
    """The score is the log-sum-exp of ``q.k`` over keys that a few directions make up.

    Keys are their mean and, for the rest, ``coefficients @ directions``: the best approximation of
    ``rank``, by the singular vectors of the centred keys. It estimates the attention that an entry
    gets, as :class:`Exact` has it, where :class:`MinMax` bounds that of its best key.

    The mean and the coefficients are kept in 8 bits, the directions in 4 (low nibble first). Their
    scales are one for the mean and one for each direction.

    Bytes: ``rank * (head_size / 2 + entry_tokens + 4) + head_size + 4``.

    Attributes:
        rank: Directions, less than the tokens of an entry.
    """

    rank: int = 8
    name: ClassVar[str] = "low_rank"

    def check(self, entry_tokens: int) -> str:
        """See :meth:`Index.check`."""
        most = min(entry_tokens - 1, 16)
        if isinstance(self.rank, int) and 1 <= self.rank <= most:
            return ""
        return f"rank={self.rank} must be a whole number from 1 to {most}"

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`."""
        return (
            Field("mean_scale", torch.float32, (1,)),
            Field("scales", torch.float32, (self.rank,)),
            Field("mean", torch.int8, (head_size,)),
            Field("directions", torch.uint8, (self.rank, head_size // 2)),
            Field("coefficients", torch.int8, (self.rank, entry_tokens)),
        )

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        mean = keys.mean(1, keepdim=True)
        left, size, right = torch.linalg.svd(keys - mean, full_matrices=False)
        coefficients = (left * size[:, None])[..., : self.rank].transpose(1, 2)
        directions = right[:, : self.rank]
        rounded_mean, mean_scale = _rounded(mean[:, 0], 127)
        rounded, scales = _rounded(directions, 7)
        fine, fine_scales = _rounded(coefficients, 127)
        nibbles = rounded.to(torch.uint8) & 15
        return {
            "mean_scale": mean_scale,
            "scales": (scales * fine_scales)[..., 0],
            "mean": rounded_mean,
            "directions": nibbles[..., ::2] | nibbles[..., 1::2] << 4,
            "coefficients": fine,
        }

    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score`."""
        pairs = record["directions"]
        nibbles = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).to(torch.int8)
        directions = torch.where(nibbles < 8, nibbles, nibbles - 16).float()
        along = torch.einsum("gd,nrd->gnr", query * scale, directions) * record["scales"]
        rest = torch.einsum("gnr,nrt->gnt", along, record["coefficients"].float())
        mean = record["mean"].float() * record["mean_scale"]
        return ((query * scale) @ mean.T)[..., None].add(rest).logsumexp(-1)


def _rounded(values: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values from -most to most, and what to multiply them with, per last dimension."""
    scale = values.abs().amax(-1, keepdim=True).div(most).clamp(min=LEAST_SCALE)
    return (values / scale).round().to(torch.int8), scale
