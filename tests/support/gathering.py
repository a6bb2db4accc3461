"""What vLLM's communicator on CPUs lacks: experts that engines share gather tokens by it.

vLLM imports this module into its workers (``worker_extension_cls``). Where vLLM has these functions
itself, it keeps its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import (
    DeviceCommunicatorBase,
)
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class GatheringWorker:
    """Mixed into the worker by vLLM."""


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """All ranks' rows, of which each has so many as ``sizes`` says; of a list, tensor by tensor."""
    assert dim == 0
    assert sizes is not None
    if isinstance(input_, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    parts = [input_.new_empty(size, *input_.shape[1:]) for size in sizes]
    parts[self.rank_in_group] = input_.contiguous()
    for rank, part in zip(self.ranks, parts, strict=True):
        dist.broadcast(part, rank, group=self.device_group)
    return torch.cat(parts)


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0
    assert sizes is not None
    total = input_.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(list(sizes))[self.rank_in_group].contiguous()


for function in (all_gatherv, reduce_scatterv):
    name = function.__name__
    if getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name):
        setattr(CpuCommunicator, name, function)
