"""Landmarks: the mean of the keys, and how unlike it they are (ShadowKV)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field
from vllm_kvretrieval.retrieval.index.mean import Mean


@dataclass(frozen=True)
class Landmark(Mean):
    """The score is that of :class:`Mean`, which says little of a key that is unlike the others.

    So the record also has the lowest cosine of a key with the mean. By it the option ``outliers``
    finds pages that are attended to whatever their scores are.

    Bytes: 1 element of the cache per channel and entry, and 4.
    """

    name: ClassVar[str] = "landmark"
    tells_outliers: ClassVar[bool] = True

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`."""
        return *super().fields(head_size, entry_tokens), Field("least_cosine", torch.float32, (1,))

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        mean = keys.mean(1, keepdim=True)
        norms = keys.norm(dim=-1) * mean.norm(dim=-1)
        cosines = (keys * mean).sum(-1) / norms
        least = cosines.where(norms != 0, torch.zeros(())).amin(1, keepdim=True).clamp(max=1)
        return {"mean": mean[:, 0], "least_cosine": least}
