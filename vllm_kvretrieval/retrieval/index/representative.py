"""Representative keys (InfLLM, section 3.2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.mean import Mean

KEPT = 4


@dataclass(frozen=True)
class Representative(Mean):
    """The score is the mean of ``q.k`` over a few keys that represent the entry.

    This is ``q`` times the mean of these keys, so the record holds the mean. InfLLM chooses the
    keys that later tokens attend to most. A record is made before later tokens are known, so this
    index chooses the four keys that differ most from the mean of the entry.

    Bytes: 1 element of the cache per channel and entry.
    """

    name: ClassVar[str] = "representative"

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        distance = (keys - keys.mean(1, keepdim=True)).square().sum(-1)
        kept = distance.topk(min(KEPT, keys.shape[1]), dim=1).indices
        chosen = keys.gather(1, kept[..., None].expand(-1, -1, keys.shape[2]))
        return {"mean": chosen.mean(1)}
