"""Base class of codecs, which turn the keys and values of a (page, KV head) into bytes."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class Codec(ABC):
    """Encodes units; a unit is the tokens of a page for one KV head.

    The methods are the specification in plain torch, and kernels agree with them byte by byte.

    Attributes:
        name: The name in the option ``codec``.
        meaning: A few words for ``vllm serve --help``.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]

    @abstractmethod
    def unit_bytes(self, page_size: int, head_size: int, dtype: torch.dtype) -> int:
        """Bytes of an encoded unit of a KV cache in ``dtype``.

        Raises:
            RetrievalConfigError: The codec takes no units of these sizes.
        """

    def bytes_per_token(self, page_size: int, head_size: int, dtype: torch.dtype) -> float:
        """Bytes per token of one KV head, with its part of the bytes that belong to the page."""
        return self.unit_bytes(page_size, head_size, dtype) / page_size

    @abstractmethod
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Encode units.

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
        """Decode the result of :meth:`encode` into keys and values of its shapes and ``dtype``."""

    @abstractmethod
    def error_bounds(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest difference between finite keys and values and their decoded ones.

        Rounding to the KV cache's dtype comes on top.

        Args:
            keys, values: See :meth:`encode`.

        Returns:
            float32 of their shapes; NaN if the row of an element cannot be encoded.
        """
