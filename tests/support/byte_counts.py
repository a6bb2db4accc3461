"""What launches move, counted in Triton's interpreter; runs in its process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from benchmarks.gpu.layer_parts import Pool, Shape
from benchmarks.gpu.layer_step import LayerStep
from vllm_kvretrieval.attention.cuda.side import SideWork
from vllm_kvretrieval.options.engine import RetrievalConfig

BUILDER = interpreter.InterpreterBuilder
SHAPE = 2, 2, 64
"""KV heads, query heads of each, and channels."""
BUDGET, CONTEXT, PAGES, UNITS = 512, 800, 60, 4
"""Tokens, tokens, pages to draw contexts from, and multiprocessors."""


@dataclass
class Counted:
    """A launch.

    Attributes:
        kernel: Its name.
        read, written: Addresses and sizes of elements, as they come.
    """

    kernel: str
    read: list[tuple[np.ndarray, int]] = field(default_factory=list)
    written: list[tuple[np.ndarray, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that are read, and of those that are written, each once."""
        return _once(self.read) + _once(self.written)


def _once(accesses: list[tuple[np.ndarray, int]]) -> int:
    sizes = {size for _, size in accesses}
    of_size = (np.unique(np.concatenate([a for a, s in accesses if s == size])) for size in sizes)
    return sum(len(found) * size for found, size in zip(of_size, sizes, strict=True))


@contextmanager
def counted() -> Iterator[list[Counted]]:
    """The launches of this process, while this lasts."""
    launches: list[Counted] = []
    run, load, store = (
        interpreter.InterpretedFunction.run,
        BUILDER.create_masked_load,
        BUILDER.create_masked_store,
    )

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        launches.append(Counted(self.fn.__name__))
        return run(self, *args, **options)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].read.append(_elements(pointers, mask))
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].written.append(_elements(pointers, mask))
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(interpreter.InterpretedFunction, "run", noted),
        mock.patch.object(BUILDER, "create_masked_load", loaded),
        mock.patch.object(BUILDER, "create_masked_store", stored),
    ):
        yield launches


def _elements(pointers: Any, mask: Any) -> tuple[np.ndarray, int]:
    size = pointers.dtype.scalar.element_ty.primitive_bitwidth // 8
    return np.atleast_1d(pointers.data)[np.atleast_1d(mask.data).astype(bool)], size


@dataclass(frozen=True)
class _Shape(Shape):
    """A layer's, of an engine with any preset."""

    method: str = "freekv"

    @property
    def config(self) -> RetrievalConfig:
        return RetrievalConfig(method=self.method, budget=self.budget)


def decode_step(method: str, side: SideWork | None = None) -> list[tuple[str, int]]:
    """The launches of a layer's decode step of one request, and the bytes of each.

    Args:
        method: The preset.
        side: Runs what is beside the model, if the cache is in host memory.
    """
    shape = _Shape(*SHAPE, budget=BUDGET, method=method)
    memory = torch.zeros(PAGES * shape.kv_heads * shape.unit_bytes, dtype=torch.uint8)
    pool = Pool(shape, memory, "cpu")
    step = LayerStep(pool, shape, batch=1, context=CONTEXT, layers=1, units=UNITS, side=side)
    with counted() as launches:
        step._step(step.layers[0])
    return [(launch.kernel, launch.nbytes) for launch in launches]
