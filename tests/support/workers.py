"""Worker processes that start in a second: forked by a server that has imported everything.

vLLM spawns its workers, and each then imports for some six seconds what the one before it has
imported as well. Here they are forked by a process that has done nothing but that. They are not
forked from the tests' own process, whose threads would be missing.
"""

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any

import pytest
import torch

from tests.support import device_server, torchvision

PRELOADED = [
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.engine.llm_engine",
    "vllm.model_executor.models.llama",
    "vllm_kvretrieval.engine.cpu.worker",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "tests.support.workers",
]

PYTHONPATH = os.environ.get("PYTHONPATH")


def freeze() -> None:
    """Let collections of garbage leave out what there is now, which is all that was imported.

    vLLM collects some eight times where an engine starts and ends: half a second each, and more in
    a forked process, which copies the memory that it touches. It also takes up again what was left
    out, so this is for good.
    """
    gc.freeze()
    gc.unfreeze = lambda: None


def take_cores() -> None:
    """Run on the cores that OpenMP would take from the environment, had it not started before."""
    if cores := [int(core) for core in re.findall(r"\d+", os.environ.get("OMP_PLACES", ""))]:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


class _Process(ForkServerProcess):
    """Has the environment and the path of the process that asks for it, not of the server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment, self._path = dict(os.environ), [*sys.path]

    def run(self) -> None:
        """The target, in that environment."""
        freeze()
        os.environ.clear()
        os.environ.update(self._environment)
        sys.path[:] = self._path
        torchvision.declare()
        take_cores()
        torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
        # What this process starts is forked by the same server, to which it has the address.
        known: Any = forkserver._forkserver
        known.ensure_running = lambda: None
        with forked():
            super().run()


class _Context(ForkServerContext):
    Process = _Process


def context() -> ForkServerContext:
    """The context in which processes are forked by the server of this process."""
    made = _Context()
    made.set_forkserver_preload(PRELOADED)
    return made


@contextmanager
def forked(context: Callable[[], BaseContext] = context) -> Iterator[None]:
    """Meanwhile vLLM has its engine cores and workers forked, by the server of this process.

    Workers that are to find other packages (``support/outside.py``) are spawned, as a user's are.

    Args:
        context: In which they are forked, unless by that server.
    """
    if os.environ.get("PYTHONPATH") != PYTHONPATH:
        yield
        return
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    with pytest.MonkeyPatch.context() as patch:
        for module in (multiproc_executor, utils):
            patch.setattr(module, "get_mp_context", context)
        yield


def server() -> int | None:
    """The process that forks workers, and stays until this one ends; None: none was needed yet."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def is_server(process: int) -> bool:
    """Whether a process is that one, or the one that forks emulated devices."""
    return process in (server(), device_server.pid())
