"""A vLLM worker extension that times named functions inside a running worker.

Given to an engine as `worker_extension_cls`, it adds methods that `LLM.collective_rpc`
reaches. It changes nothing until `start_timing` and takes everything back in `stop_timing`.
It also collects what the plug-in notes about each finished request meanwhile.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.worker_memory import MemoryExtension

EXTENSION = "benchmarks.serving.worker_timing.TimingExtension"
"""To be given to an engine as `worker_extension_cls`."""

RUNNER = "runner"
FORWARD = "forward"
ATTENTION_LAYER = "attention_layer"
KV_WRITE = "kv_write"
ATTENTION_KERNEL = "attention_kernel"
PLANNING = "planning"
INDEX_UPDATE = "index_update"
OBSERVATION = "observation"

DROPPING = "vllm_kvretrieval.methods.dropping"
FUNCTIONS = (
    (ATTENTION_KERNEL, "vllm._custom_ops", "cpu_attention_with_kv_cache"),
    (ATTENTION_KERNEL, "vllm_kvretrieval.kernels.cpu", "attend"),
    (PLANNING, "vllm_kvretrieval.kernels.cpu", "plan_decode"),
    (INDEX_UPDATE, "vllm_kvretrieval.kernels.cpu", "update_index"),
)

REQUEST_LOGGER = "vllm.kvretrieval.requests"


class _Collector(logging.Handler):
    """Keeps messages instead of writing them."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class TimingExtension(MemoryExtension):
    """Times the model runner, the model, its attention layers and the ops inside them.

    The seconds are inclusive: `runner` holds `forward`, which holds `attention_layer` and
    `kv_write`, which hold the ops. Only the calling thread is looked at, which is enough:
    these functions return when their work is done.
    """

    _restore: list[Callable[[], None]]
    _steps: list[dict[str, float]]
    _running: set[str]
    _collector: _Collector

    def start_timing(self) -> None:
        """Wrap the functions; from now on every engine step is noted."""
        runner = self.model_runner  # type: ignore[attr-defined]
        self._restore, self._steps, self._running = [], [], set()
        self._collect_requests()
        self._wrap(runner, "execute_model", RUNNER)
        self._wrap(runner, "sample_tokens", RUNNER)
        self._wrap(runner, "_model_forward", FORWARD)
        layers = runner.compilation_config.static_forward_context.values()
        for implementation in {type(layer.impl) for layer in layers if hasattr(layer, "impl")}:
            self._wrap(implementation, "forward", ATTENTION_LAYER)
            self._wrap(implementation, "do_kv_cache_update", KV_WRITE)
        if DROPPING in sys.modules:
            layer = importlib.import_module(DROPPING).DroppingLayer
            for name in ("watch", "settle"):
                self._wrap(layer, name, OBSERVATION)
        for label, module, function in FUNCTIONS:
            if module in sys.modules:
                self._wrap_everywhere(importlib.import_module(module), function, label)

    def stop_timing(self) -> tuple[list[dict[str, float]], list[str]]:
        """Unwrap; returns the seconds spent in each part, one dict per engine step, and the
        plug-in's notes, one line per finished request."""
        for restore in reversed(self._restore):
            restore()
        return self._steps, self._collector.messages

    def _collect_requests(self) -> None:
        logger = logging.getLogger(REQUEST_LOGGER)
        self._collector = _Collector()
        self._restore.append(functools.partial(logger.setLevel, logger.level))
        self._restore.append(functools.partial(logger.removeHandler, self._collector))
        logger.addHandler(self._collector)
        logger.setLevel(logging.DEBUG)

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        begins_step = label == RUNNER and function.__name__ == "execute_model"

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if label in self._running:  # a subclass calling its base counts once
                return function(*args, **kwargs)
            if begins_step:
                self._steps.append({})
            self._running.add(label)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._running.remove(label)
                step = self._steps[-1]
                step[label] = step.get(label, 0.0) + time.perf_counter() - start

        return timed

    def _wrap(self, owner: Any, name: str, label: str) -> None:
        """Replace `owner.name`, be it inherited or the owner's own."""
        own = vars(owner).get(name)
        setattr(owner, name, self._timed(getattr(owner, name), label))
        if own is None:
            self._restore.append(functools.partial(delattr, owner, name))
        else:
            self._restore.append(functools.partial(setattr, owner, name, own))

    def _wrap_everywhere(self, module: Any, name: str, label: str) -> None:
        """Replace a function in its module and wherever it was imported by name."""
        original = getattr(module, name)
        for user in list(sys.modules.values()):
            if getattr(user, "__dict__", {}).get(name) is original:
                self._wrap(user, name, label)
