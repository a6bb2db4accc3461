"""What a codec is: bytes for the keys and values of a (page, KV head)."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class Codec(ABC):
    """Encodes units, the tokens that a page holds for one KV head.

    Its methods are the specification in plain torch, and kernels agree with them byte by byte.

    Attributes:
        name: What the option ``codec`` calls it.
        meaning: In a few words.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]

    @abstractmethod
    def unit_bytes(self, page_size: int, head_size: int, dtype: torch.dtype) -> int:
        """Of an encoded unit, where the KV cache is in ``dtype``."""

    def bytes_per_token(self, page_size: int, head_size: int, dtype: torch.dtype) -> float:
        """Of a token's key and value in one KV head, what its page has in common included."""
        return self.unit_bytes(page_size, head_size, dtype) / page_size

    @abstractmethod
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Units as bytes.

        Args:
            keys, values: [n, page_size, head_size] in the KV cache's dtype; both sizes are
                multiples of 16.

        Returns:
            uint8 [n, unit_bytes].
        """

    @abstractmethod
    def decode(
        self, data: torch.Tensor, page_size: int, head_size: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values from what :meth:`encode` returned; in its shapes and ``dtype``."""

    @abstractmethod
    def error_bounds(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How far, at most, finite keys and values are from what comes back.

        What rounding to the KV cache's dtype adds is left out.

        Args:
            keys, values: As for :meth:`encode`.

        Returns:
            float32 of their shapes; NaN where the row of an element has what cannot be encoded.
        """
