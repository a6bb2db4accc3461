"""Memory that shows what was written beside it, or read before it was written."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from vllm_kvretrieval.kernels import DecodeRows, KeptTokens, cpu
from vllm_kvretrieval.retrieval.keeping import Keeping

GUARD = 256
"""Bytes before and behind each tensor."""


class GuardedMemory:
    """Tensors made meanwhile, by ``torch.empty`` and the like, lie between guards.

    What ``torch.empty`` leaves undefined are bytes of 255: NaN, or -1.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Put what makes tensors in their place."""
        with ExitStack() as patches:
            for name, make in {"empty": self._empty, "zeros": self._zeros}.items():
                like = self._like(make, getattr(torch, f"{name}_like"))
                patches.enter_context(mock.patch.object(torch, name, make))
                patches.enter_context(mock.patch.object(torch, f"{name}_like", like))
            yield

    def overrun(self) -> int:
        """Tensors beside which something was written."""
        edges = (torch.cat([b[:GUARD], b[-GUARD:]]) for b in self._buffers)
        return sum(int((edge != 255).any()) for edge in edges)

    def _empty(self, *size: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        if {*options} - {"device"} or options.get("device") not in (None, "cpu"):
            return EMPTY(*size, dtype=dtype, **options)
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        kind = dtype or torch.float32
        count = shape.numel() * kind.itemsize
        whole = EMPTY(2 * GUARD + -(-count // 64) * 64, dtype=torch.uint8).fill_(255)
        buffer = whole[: 2 * GUARD + count]
        self._buffers.append(buffer)
        return buffer[GUARD : GUARD + count].view(kind).view(shape)

    def _zeros(self, *size: Any, **options: Any) -> torch.Tensor:
        return self._empty(*size, **options).zero_()

    @staticmethod
    def _like(make: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor]) -> Any:
        def like(tensor: torch.Tensor, dtype: torch.dtype | None = None, **options: Any) -> Any:
            if options:
                return plain(tensor, dtype=dtype, **options)
            return make(tensor.shape, dtype=dtype or tensor.dtype)

        return like


EMPTY = torch.empty


class WrittenWeights:
    """The compiled ops, which drop tokens by weights that were written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(cpu, name)

    def drop_tokens(
        self, weights: torch.Tensor, rows: DecodeRows, kept: KeptTokens, rule: Keeping
    ) -> None:
        """See ``Ops.drop_tokens``."""
        for row, seat in enumerate(rows.seats.tolist()):
            for head, count in enumerate(kept.counts[seat].tolist()):
                of_head = weights[row, min(head, weights.shape[1] - 1), :, : count + 1]
                assert of_head.isfinite().all(), f"row {row}, head {head}: weights of nobody"
        cpu.drop_tokens(weights, rows, kept, rule)
