"""The keys themselves, for the oracle."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field, Index


@dataclass(frozen=True)
class Exact(Index):
    """The score is the log-sum-exp of ``q.k`` over the entry's keys, which are read from the cache.

    No index selects better pages, and none is slower: it reads as much as attention to all pages.
    It is for evaluation.

    Bytes: none; the cache has the keys.
    """

    name: ClassVar[str] = "exact"
    estimates: ClassVar[bool] = True
    per_token: ClassVar[bool] = True
    reads_keys: ClassVar[bool] = True

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`."""
        return ()

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        return {}

    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score`."""
        return self.score_tokens(query, record, scale).logsumexp(-1)

    def score_tokens(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score_tokens`."""
        return torch.einsum("gd,ntd->gnt", query * scale, record["keys"])
