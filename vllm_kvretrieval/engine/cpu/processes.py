"""The processes of an engine on a CPU: one for scheduler and worker, which may be forked.

vLLM starts a process for each worker, since OpenMP takes the cores of its threads from the
environment with which a process starts. A worker that is alone needs none of its own where the
engine's process starts in that environment. Each process imports the same for many seconds, and
holds it in memory.

A forked process imports nothing. Its OpenMP is that of the process before, so it is right only
where that one has the worker's cores, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import socket
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.utils.cpu_resource_utils import parse_id_list
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.utils.system_utils import set_env_var
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_kvretrieval.attention.refusals import has_foreign_connector
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.upstream.defaults import BIND, all_cores

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ALONE = "uni"
"""vLLM's name of an executor for one worker."""
OPENMP = "libgomp.so.1"
"""torch's OpenMP, which is loaded."""
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
PAUSE_HARD = 2
"""``omp_pause_hard`` of OpenMP 5: threads end, and are made anew when they are needed."""


class EngineExecutor(UniProcExecutor):
    """A worker in the process of the engine, with a thread on each of its cores."""

    def _init_executor(self) -> None:
        if cores := places():  # a forked process has the affinity of the one before
            os.sched_setaffinity(0, {cores[0]})
        gc.freeze()  # all that is imported stays; a collection would copy it in a forked process
        super()._init_executor()


def check_cores(vllm_config: VllmConfig) -> None:
    """Refuse cores for workers that they cannot have: vLLM would fail in its engine's process, or
    compute on others.

    Raises:
        RetrievalConfigError: Says what is wrong with the variable that names them.
    """
    bound, parallel = envs.VLLM_CPU_OMP_THREADS_BIND, vllm_config.parallel_config
    if bound in ("auto", "nobind") or parallel.data_parallel_size > 1:
        return
    workers, rank = parallel.local_world_size, parallel.data_parallel_rank_local or 0
    example = all_cores(workers)[BIND]
    remedy = f"write a list for each of {workers}, such as {example!r}, or auto, or nobind"
    try:
        parts = bound.split("|")[rank * workers :][:workers]  # others are of other engines
        lists = [parse_id_list(each) for each in parts]
    except ValueError:
        raise RetrievalConfigError(
            f"{BIND}={bound!r} is no list of cores, or several with | between them; {remedy}."
        ) from None
    if len(lists) != workers or not all(lists):
        numbers = " and ".join(str(len(each)) for each in lists) or "no"
        raise RetrievalConfigError(f"{BIND}={bound!r} names {numbers} cores for workers; {remedy}.")
    named = {core for each in lists for core in each}
    if missing := sorted(named - _allowed(named)):
        raise RetrievalConfigError(
            f"{BIND}={bound!r}: a process may not run on {missing}, which this machine or "
            f"container does not have; {remedy}."
        )


def _allowed(cores: Collection[int]) -> set[int]:
    """Those of some cores that a process may run on."""

    def run() -> set[int]:
        try:
            os.sched_setaffinity(0, cores)
        except (OSError, OverflowError, ValueError):
            return set()
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:  # a thread has an affinity of its own
        return pool.submit(run).result()


def share_process(vllm_config: VllmConfig) -> None:
    """Let the worker of an engine run in the engine's process, which is about to start.

    Args:
        vllm_config: Of an engine with one worker, for which the user has named no executor.
    """
    parallel = vllm_config.parallel_config
    if (
        not envs.VLLM_ENABLE_V1_MULTIPROCESSING
        or parallel.data_parallel_size > 1
        or has_foreign_connector(vllm_config)
    ):
        return
    parallel.distributed_executor_backend = f"{__name__}.{EngineExecutor.__name__}"
    _start_as_workers()
    if cores := _cores_of_both(OMPProcessManager(vllm_config)):
        _release_first_core(cores)  # before there are threads, which would stay there


@functools.cache
def _start_as_workers() -> None:
    """Let processes of these engines start as vLLM's workers do, with OpenMP's cores."""
    start = CoreEngineProcManager.__init__

    @functools.wraps(start)
    def starting(*args: Any, **kwargs: Any) -> None:
        ours = kwargs["executor_class"] is EngineExecutor
        with started_on_cores(kwargs["vllm_config"]) if ours else contextlib.nullcontext():
            start(*args, **kwargs)

    CoreEngineProcManager.__init__ = starting


@contextlib.contextmanager
def started_on_cores(vllm_config: VllmConfig) -> Iterator[None]:
    """The environment with which an engine's process starts, of which nothing is left here.

    Args:
        vllm_config: Of an engine whose worker has no process of its own.
    """
    manager = OMPProcessManager(vllm_config)
    way = _forking() if _cores_of_both(manager) else contextlib.nullcontext()
    with manager.configure_omp_envs(rank=0, local_rank=0), way:
        yield


def _cores_of_both(manager: OMPProcessManager) -> list[int]:
    """The worker's cores, if OpenMP has bound its threads to them in this process, too: an engine
    is forked then."""
    cores: list[int] = manager.cpu_lists[0] if manager.cpu_lists and not manager.use_iomp else []
    bound = places() == cores and torch.get_num_threads() == len(cores)
    return cores if bound else []


def places() -> list[int]:
    """The cores of OpenMP's threads in this process, in their order; empty where it binds none."""
    if (openmp := _openmp()) is None:
        return []
    found = []
    for place in range(openmp.omp_get_num_places()):
        cores = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
        openmp.omp_get_place_proc_ids(place, cores)
        if len(cores) != 1:
            return []
        found.append(cores[0])
    return found


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """torch's OpenMP; None where it has another one."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(OPENMP, mode=os.RTLD_NOLOAD)
    return None


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Let vLLM fork its engine; other forks of the program are as ever."""
    _know_forks()
    with set_env_var(METHOD, "fork"):
        _forks.append(True)
        try:
            yield
        finally:
            _forks.clear()


_forks = list[bool]()
"""Not empty: a fork is that of an engine."""


@functools.cache
def _know_forks() -> None:
    """Let an engine have nothing of the process before that it would wait for, or hold."""
    os.register_at_fork(before=_end_threads, after_in_child=_stop_listening)


def _end_threads() -> None:
    """End OpenMP's threads: an engine would wait for them, and does not have them."""
    if _forks and (openmp := _openmp()) is not None:
        openmp.omp_pause_resource_all(PAUSE_HARD)


def _stop_listening() -> None:
    """Close the sockets at which the process before takes connections.

    An engine that holds them takes connections that nobody answers, when the process before has
    ended, or only waits for its last answers. Their descriptors stay in use: Python's own sockets
    close them later.
    """
    if not _forks:
        return
    _forks.clear()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if _listens(descriptor):
            os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _listens(descriptor: int) -> bool:
    """Whether connections are, or will be, taken by what a descriptor stands for."""
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:  # it is no socket
        return False
    bound = False
    try:
        name = found.getsockname()
        bound = bool(name[1] if isinstance(name, tuple) else name)
        found.getpeername()
    except OSError:  # it is not connected
        return bound and found.type == socket.SOCK_STREAM
    finally:
        found.detach()
    return False


def _release_first_core(cores: list[int]) -> None:
    """Let this process, whose first thread OpenMP has bound when it was loaded, run where it could
    before, or at least on all of these cores.

    It could where its parent may, unless there were fewer cores (taskset) when it was loaded.
    """
    openmp, parent = _openmp(), os.getppid()
    assert openmp is not None, "it has bound this process"
    allowed = os.sched_getaffinity(parent) if parent else set[int]()
    if len(allowed) != openmp.omp_get_num_procs():
        allowed = set()
    os.sched_setaffinity(0, allowed | {*cores})
