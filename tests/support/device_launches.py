"""What a GPU would have to compile, noted where the interpreter launches the package's kernels.

Triton compiles a kernel for every set of the values of its constants, and of what it looks at in
its other arguments: types, whether addresses and numbers are multiples of 16, whether they are 1.
"""

import functools
import inspect
from typing import Any

import torch

_seen: set[tuple[Any, ...]] = set()
_late: list[tuple[Any, ...]] = []
_serving = False


def watch():
    """Note launches in this process from now on."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def noted(self, *args, **kwargs):
        if self.fn.__module__.startswith("vllm_kvretrieval."):
            _note(self, args, kwargs)
        return run(self, *args, **kwargs)

    InterpretedFunction.run = noted


def serve():
    """The engine has started: what comes from now on should have been compiled."""
    global _serving
    _serving = True


def late():
    """The kernels that were first launched while the engine was serving, and how many were launched
    before."""
    return _late, len(_seen) - len(_late)


def _note(kernel, args, kwargs):
    variant = kernel.fn.__name__, *_specialised(kernel, args, kwargs)
    if variant not in _seen:
        _seen.add(variant)
        if _serving:
            _late.append(variant)


_signature = functools.cache(inspect.signature)


def _specialised(kernel, args, kwargs):
    parameters = _signature(kernel.fn).parameters
    options = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
    given = dict(zip(parameters, args, strict=False)) | options
    general = kernel.kwargs.get("do_not_specialize") or ()
    for name, value in given.items():
        parameter = parameters.get(name)
        if parameter is None or "constexpr" in str(parameter.annotation):  # or num_warps
            yield name, value
        elif isinstance(value, torch.Tensor):
            yield name, value.dtype, value.data_ptr() % 16 == 0
        elif isinstance(value, int) and name not in general:
            yield name, value == 1, value % 16 == 0, value.bit_length() > 31
        else:
            yield name, type(value)
