"""Mean of the keys."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field, Index


@dataclass(frozen=True)
class Mean(Index):
    """The score is ``q.mean``: what the page's keys give on average.

    A lower bound of the logarithm of the entry's mean mass. Where some channels of the keys have
    outliers, in which minimum and maximum drown, it tells pages apart far better than these.

    Bytes: 1 element of the cache per channel and entry, half of :class:`MinMax`'s.
    """

    name: ClassVar[str] = "mean"

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`."""
        return (Field("mean", None, (head_size,)),)

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        return {"mean": keys.mean(1)}

    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score`."""
        return query @ record["mean"].float().T * scale
