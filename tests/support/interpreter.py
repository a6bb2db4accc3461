"""A process in which Triton's interpreter runs the kernels, on tensors in ordinary memory.

Triton decides when it is imported whether kernels are compiled or interpreted, so the tests'
own process, where vLLM imports it too, cannot have both.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock


def start(*, checked: bool = False) -> ProcessPoolExecutor:
    """A pool of one process, to which functions that launch kernels can be submitted.

    Args:
        checked: Whether support/memory_checks.py checks every launch, and the interpreter every
            sum and product of small integers for overflow.
    """
    return started(
        mp_context=multiprocessing.get_context("spawn"),
        initializer=prepare,
        initargs=(checked,),
    )


def started(**options: Any) -> ProcessPoolExecutor:
    """A pool of one process, in whose environment Triton interprets."""
    pool = ProcessPoolExecutor(1, **options)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
        pool.submit(os.getpid).result()
    return pool


def prepare(checked: bool = False) -> None:
    """Patch this process's interpreter."""
    from tests.support import interpreter_speed

    _widen_bfloat16()
    _refuse_small_products()
    _take_masks_of_numbers()
    interpreter_speed.install()
    if not checked:
        _count_no_overflows()
    if checked:
        from tests.support import memory_checks

        memory_checks.install()


def _widen_bfloat16() -> None:
    """Let the interpreter multiply bfloat16 matrices, which it would take for integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: multiply(
        self, widened(a), widened(b), *rest
    )


def _refuse_small_products() -> None:
    """Let the interpreter multiply no matrices that are too small for a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import min_dot_size
    from triton.runtime.interpreter import interpreter_builder

    interpreter_builder.codegen_fns["min_dot_size"] = min_dot_size(GPUTarget("cuda", 80, 32))


def _take_masks_of_numbers() -> None:
    """Let masks be bits of whole numbers, as in vLLM's kernel for grammars."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    store = InterpreterBuilder.create_masked_store

    def masked(self, pointers, value, mask, *rest):
        bits = TensorHandle(mask.data.astype(bool), mask.dtype)
        return store(self, pointers, value, bits, *rest)

    InterpreterBuilder.create_masked_store = masked


def _count_no_overflows() -> None:
    """Sizes of engines here are far from 32 bits, and looking takes a quarter of a step."""
    from triton.runtime.interpreter import interpreter_builder

    object.__setattr__(interpreter_builder.options, "sanitize_overflow", False)
