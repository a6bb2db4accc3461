"""Units in few bits: keys by channel within the page, values by token, as in KIVI."""

from typing import ClassVar

import torch

from vllm_kvretrieval.retrieval.codec.base import Codec
from vllm_kvretrieval.retrieval.codec.rows import AroundZero, Centred, FromLowest, Rows


class Quantised(Codec):
    """A codec whose rows are channels for keys, ``[head_size, page_size]``, and tokens for values.

    An encoded unit is the words of its key rows, those of its value rows, the codes of its keys,
    and those of its values.

    Attributes:
        keys, values: The encoding of a row of keys, and of values.
    """

    keys: ClassVar[Rows]
    values: ClassVar[Rows]

    def parts(self, page_size: int, head_size: int) -> list[int]:
        """Bytes of the parts of a unit, in their order, without lists of outliers."""
        elements = page_size * head_size
        return [
            2 * self.keys.words * head_size,
            2 * self.values.words * page_size,
            elements * self.keys.bits // 8,
            elements * self.values.bits // 8,
        ]

    def unit_bytes(self, page_size: int, head_size: int, dtype: torch.dtype) -> int:
        return sum(self.parts(page_size, head_size))

    def _rows(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys.transpose(1, 2).float(), values.float()

    def _fitted(self, rows: torch.Tensor) -> torch.Tensor:
        """The elements, float32 [n, rows, elements], that the scales of rows are chosen for."""
        return rows

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        channels, tokens = self._rows(keys, values)
        words, codes = zip(
            self.keys.encode(channels, self._fitted(channels)),
            self.values.encode(tokens, self._fitted(tokens)),
            strict=True,
        )
        return torch.cat([*words, *codes], 1)

    def decode(
        self, data: torch.Tensor, page_size: int, head_size: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = data.split(self.parts(page_size, head_size), 1)
        keys = self.keys.decode(parts[0], parts[2], page_size)
        values = self.values.decode(parts[1], parts[3], head_size)
        return keys.transpose(1, 2).to(dtype), values.to(dtype)

    def error_bounds(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        channels, tokens = map(self._fitted, self._rows(keys, values))
        return self.keys.error_bound(channels).transpose(1, 2), self.values.error_bound(tokens)


class K8V4(Quantised):
    """8-bit keys, per channel of a page, and 4-bit values, per token."""

    name = "k8v4"
    meaning = "8-bit keys, 4-bit values"
    keys = Centred(8)
    values = AroundZero(4)


class K4V4(Quantised):
    """4-bit keys, per channel of a page, and 4-bit values, per token."""

    name = "k4v4"
    meaning = "4-bit keys, 4-bit values"
    keys = FromLowest(4)
    values = AroundZero(4)


class K2V2(Quantised):
    """2-bit keys, per channel of a page, and 2-bit values, per token."""

    name = "k2v2"
    meaning = "2-bit keys, 2-bit values"
    keys = FromLowest(2)
    values = AroundZero(2)
