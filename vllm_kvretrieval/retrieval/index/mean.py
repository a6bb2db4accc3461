"""Mean of the keys."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field, Index


@dataclass(frozen=True)
class Mean(Index):
    """The score is ``q.mean``, the mean of ``q.k`` over the keys of the entry.

    It is a lower bound of the logarithm of the entry's mean attention mass. If some channels of the
    keys have outliers, which dominate :class:`MinMax`, it tells pages apart far better.

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
