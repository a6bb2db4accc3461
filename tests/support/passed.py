"""Tensors that are passed to interpreted kernels: where their elements lie."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Passed:
    """A tensor that was passed to a kernel, under the name of its parameter."""

    name: str
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        tensor = self.tensor
        self.start, self.size = tensor.data_ptr(), tensor.element_size()
        shaped = [(st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]
        last = sum(stride * (count - 1) for stride, count in shaped)
        self.end = self.start + (last + 1) * self.size if tensor.numel() else self.start
        self.gaps = last + 1 != tensor.numel()
        self.dims = sorted((dim for dim in shaped if dim[0]), reverse=True)

    def holds(self, addresses: np.ndarray, size: int) -> bool:
        """Whether each access of so many bytes lies in elements of the tensor."""
        if int(addresses.min()) < self.start or int(addresses.max()) + size > self.end:
            return False
        if not self.gaps:
            return True
        offsets = (addresses - np.uint64(self.start)).astype(np.int64) // self.size
        inside = np.ones(len(offsets), bool)
        for stride, count in self.dims:
            index = offsets // stride
            inside &= index < count
            offsets = offsets - index * stride
        return bool((inside & (offsets == 0)).all())
