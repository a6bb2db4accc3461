"""One bit per token and channel (FIER, section 3.2); scores tokens, or entries by their mass."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.index.base import Field, Index

MOST = 32000
"""The sum of a query's steps, as a multiple of their unit; so each step fits in 16 bits."""

BYTES, BLOCK = 4, 32
"""A token has ``BYTES`` bytes per block of ``BLOCK`` channels. Bit k of byte j belongs to channel
4 k + j of the block."""

_PLACES = 1 << torch.arange(8, dtype=torch.uint8)


@dataclass(frozen=True)
class OneBit(Index):
    """The score of a token is ``q.k`` with its key rounded to one bit per channel.

    The bit says whether the key is nearer to the minimum or to the maximum of the entry in this
    channel. FIER's groups of 32 tokens are the entries. The score of an entry is the log-sum-exp
    over its tokens.

    A query's *step* in a channel is what a set bit adds: ``q * (maximum - minimum)``. Steps are
    rounded to multiples of a unit, which is so small that a score is off by about a thousandth of
    the spread of scores within an entry.

    Bytes: 2 elements of the cache per channel and entry, and 1 bit per channel and token, for
    whole blocks of 32 channels.
    """

    name: ClassVar[str] = "one_bit"
    estimates: ClassVar[bool] = True
    per_token: ClassVar[bool] = True

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`."""
        return (
            Field("minimum", None, (head_size,)),
            Field("maximum", None, (head_size,)),
            Field("bits", torch.uint8, (-(-head_size // BLOCK), entry_tokens, BYTES)),
        )

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`."""
        minimum, maximum = keys.amin(1), keys.amax(1)
        upper = keys - minimum[:, None] > maximum[:, None] - keys
        missing = -keys.shape[2] % BLOCK
        blocks = torch.nn.functional.pad(upper, (0, missing)).unflatten(2, (-1, 8, BYTES))
        bits = (blocks * _PLACES[:, None]).sum(-2, dtype=torch.uint8)
        return {"minimum": minimum, "maximum": maximum, "bits": bits.transpose(1, 2)}

    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score`."""
        return self.score_tokens(query, record, scale).logsumexp(-1)

    def score_tokens(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See :meth:`Index.score_tokens`."""
        minimum, maximum = record["minimum"].float(), record["maximum"].float()
        blocks = (record["bits"].transpose(1, 2)[..., None, :] & _PLACES[:, None]) != 0
        upper = blocks.flatten(2)[..., : query.shape[-1]].float()
        query = query * scale
        steps = query[:, None] * (maximum - minimum)
        unit = steps.abs().sum(-1, keepdim=True) / MOST
        whole = (steps / unit.clamp(min=torch.finfo(torch.float32).tiny)).round()
        return torch.einsum("gnd,ntd->gnt", whole, upper) * unit + (query @ minimum.T)[..., None]
