"""raw: units as they are in the KV cache."""

import torch

from vllm_kvretrieval.retrieval.codec.base import Codec


class Raw(Codec):
    """Stores a unit bit by bit: keys ``[head_size, page_size]``, then values."""

    name = "raw"
    meaning = "as the model made them"

    def unit_bytes(self, page_size: int, head_size: int, dtype: torch.dtype) -> int:
        return 2 * page_size * head_size * dtype.itemsize

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        halves = keys.transpose(1, 2).flatten(1), values.flatten(1)
        return torch.cat(halves, 1).contiguous().view(torch.uint8)

    def decode(
        self, data: torch.Tensor, page_size: int, head_size: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = data.contiguous().view(dtype).chunk(2, dim=1)
        shape = (page_size, head_size)
        return keys.unflatten(1, shape[::-1]).transpose(1, 2), values.unflatten(1, shape)

    def error_bounds(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(keys.float()), torch.zeros_like(values.float())
