"""Sphere around the keys (ArkVale)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field, Index


@dataclass(frozen=True)
class Bounding(Index):
    """The score is an upper bound of every ``q.k``: ``q.centre + |q| radius``.

    The centre is the mean of the keys. The radius is the distance of the farthest key from it.

    Bytes: 1 element of the cache per channel and entry, and 4.
    """

    name: ClassVar[str] = "bounding"

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`."""
        return Field("centre", None, (head_size,)), Field("radius", torch.float32, (1,))

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        centre = keys.mean(1)
        return {"centre": centre, "radius": (keys - centre[:, None]).norm(dim=-1).amax(1)[:, None]}

    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score`."""
        reach = query.norm(dim=-1)[:, None] * record["radius"][:, 0]
        return (query @ record["centre"].float().T + reach) * scale
