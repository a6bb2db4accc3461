"""One bit per token and channel (FIER, section 3.2), summed up to the mass of an entry."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field, Index


@dataclass(frozen=True)
class OneBit(Index):
    """The score is the log-sum-exp of ``q.k`` over keys rounded to one bit per channel.

    In each channel a key is near the entry's minimum or its maximum. FIER scores single tokens so,
    in groups of 32; here its groups are the entries.

    Bytes: 2 elements of the cache per channel and entry, and a bit per channel and token.
    """

    name: ClassVar[str] = "one_bit"

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`."""
        return (
            Field("minimum", None, (head_size,)),
            Field("maximum", None, (head_size,)),
            Field("bits", torch.uint8, (head_size, entry_tokens // 8)),
        )

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        minimum, maximum = keys.amin(1), keys.amax(1)
        upper = keys - minimum[:, None] > maximum[:, None] - keys
        eights = upper.transpose(1, 2).unflatten(2, (-1, 8))
        places = 1 << torch.arange(8, dtype=torch.uint8)
        bits = (eights * places).sum(-1, dtype=torch.uint8)
        return {"minimum": minimum, "maximum": maximum, "bits": bits}

    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score`."""
        minimum, maximum = record["minimum"].float(), record["maximum"].float()
        places = 1 << torch.arange(8, dtype=torch.uint8)
        upper = ((record["bits"][..., None] & places) != 0).flatten(2)
        keys = minimum[..., None] + upper * (maximum - minimum)[..., None]
        return torch.einsum("gd,ndt->gnt", query * scale, keys).logsumexp(-1)
