"""The shape of a layer, its KV cache and indexes, and the ops of a decode step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import RECORD_ALIGNMENT, DeviceRows
from vllm_kvretrieval.kernels.slots import Residency
from vllm_kvretrieval.kernels.types import Chooser, IndexRecords
from vllm_kvretrieval.options.engine import RetrievalConfig

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """The shape of the layer, by default one of Llama-3.1-8B; ``budget`` in tokens."""

    kv_heads: int = 8
    group: int = 4
    head_size: int = 128
    budget: int = 2048

    @property
    def config(self) -> RetrievalConfig:
        """Options of the method that is measured."""
        return RetrievalConfig(method="freekv", budget=self.budget)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a page of a KV head."""
        return self.config.page_size * 2 * self.head_size * DTYPE.itemsize


class Pool:
    """Pages of random keys and values, and their index; contexts are drawn from them.

    Args:
        shape: Of the layer.
        memory: uint8, where the pages are to be, as the device sees it.
        device: Where the index is to be.
    """

    def __init__(self, shape: Shape, memory: torch.Tensor, device: torch.device | str) -> None:
        config = shape.config
        size = config.page_size, 2 * shape.head_size
        of_pages = memory[: len(memory) // self._page_bytes(shape) * self._page_bytes(shape)]
        self.cache = of_pages.view(DTYPE).view(-1, shape.kv_heads, *size)
        for pages in self.cache.split(4096):
            pages.normal_()
        with torch.device(device):
            self.store = IndexRecords.empty(
                config.own.index,
                pages=len(self.cache),
                kv_heads=shape.kv_heads,
                head_size=shape.head_size,
                page_size=config.page_size,
                entry_tokens=config.own.entry_tokens,
                dtype=DTYPE,
                cache=self.cache,
                layout="token_major",
                alignment=RECORD_ALIGNMENT,
            )
            kernels.index_pages(torch.arange(len(self.cache), dtype=torch.int32), self.store)

    @staticmethod
    def _page_bytes(shape: Shape) -> int:
        return shape.kv_heads * shape.unit_bytes


@dataclass
class Layer:
    """The tensors of one layer: rows of the pool's pages, tokens, and state.

    Attributes:
        rows: Of the step.
        query, key, value, out: Of its tokens.
        chooser: By which it selects.
        lists, lengths: Of the units or slots attended to, once the step has run.
        residency, slots: Where the pool is host memory.
    """

    rows: DeviceRows
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    chooser: Chooser
    lists: torch.Tensor
    lengths: torch.Tensor
    residency: Residency | None = None
    slots: torch.Tensor | None = None


@dataclass(frozen=True)
class Op:
    """One op of the step, on every layer, and the bytes that it moves once.

    Attributes:
        calls: Of the layers.
        nbytes: Of device memory.
        over_bus: Those that come over the bus meanwhile.
    """

    calls: list[Callable[[], object]]
    nbytes: float
    over_bus: float = 0
