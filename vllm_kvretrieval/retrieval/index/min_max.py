"""Channel-wise minimum and maximum of the keys (FreeKV, section 3.2; Quest, section 3.2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field, Index


@dataclass(frozen=True)
class MinMax(Index):
    """The score is an upper bound of every ``q.k``: ``sum_c max(q_c * min_c, q_c * max_c)``.

    Bytes: 2 elements of the cache per channel and entry, 1 / entry_tokens of keys and values.
    """

    name: ClassVar[str] = "min_max"
    grows: ClassVar[bool] = True

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`."""
        return Field("minimum", None, (head_size,)), Field("maximum", None, (head_size,))

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        return {"minimum": keys.amin(1), "maximum": keys.amax(1)}

    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score`."""
        products = (query[:, None] * record[name].float() for name in ("minimum", "maximum"))
        return torch.maximum(*products).sum(-1) * scale
