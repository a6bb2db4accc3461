"""Mean and standard deviation of the keys per channel."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field, Index


@dataclass(frozen=True)
class MeanStd(Index):
    """The score is ``q.mean + spread * |q|.std``.

    The bound of :class:`MinMax` is ``q.centre + |q|.half_width``. This score has the same form,
    bytes and arithmetic, but a single outlier determines neither its centre nor its width.

    The record holds the standard deviation times ``spread``, so the query is not rounded.

    Attributes:
        spread: The number of standard deviations above the mean.
    """

    spread: float = 1.0
    name: ClassVar[str] = "mean_std"

    def check(self, entry_tokens: int) -> str:
        """See :meth:`Index.check`."""
        return "" if 0 <= self.spread <= 16 else f"spread={self.spread} must be from 0 to 16"

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`."""
        return Field("mean", None, (head_size,)), Field("std", None, (head_size,))

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        return {"mean": keys.mean(1), "std": self.spread * keys.std(1, correction=0)}

    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score`."""
        centre = query @ record["mean"].float().T
        return (centre + query.abs() @ record["std"].float().T) * scale
