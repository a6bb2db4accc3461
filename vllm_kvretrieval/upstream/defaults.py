"""Defaults of vLLM that are slow on small machines, and the better settings."""

import itertools
import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch

BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable that names the cores of workers."""
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
"""vLLM's variable that says how many cores it keeps back, for all workers together."""
FEW_CORES = 4
"""Up to so many cores, the one that vLLM keeps back is worth a word."""

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
"""File that names the logical CPUs of a logical CPU's core; Linux's."""


class Judged(NamedTuple):
    """A default on this machine.

    Attributes:
        text: A clause.
        remedy: A faster setting; empty where there is none.
    """

    text: str
    remedy: str = ""


def slow_bfloat16() -> bool:
    """Whether this is an x86 CPU without AVX-512 BF16 and AMX.

    It computes with 16-bit numbers by way of 32-bit ones, far more slowly than with float32.
    """
    return platform.machine() == "x86_64" and not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def all_cores(workers: int = 1) -> dict[str, str]:
    """Environment that gives vLLM's CPU workers every core, without hogging them.

    On its own vLLM keeps one core back for its front end, which halves a worker on two cores.
    With all cores taken, threads that spin for milliseconds between two parallel regions would
    make vLLM's other processes wait for the scheduler's next tick, so they are told to sleep soon.

    Args:
        workers: how many the cores are dealt out to; more of them than cores share.
    """
    return _bound(cores_of(os.getpid()), workers)


def forked_on_all_cores() -> dict[str, str]:
    """The environment of :func:`all_cores` for a program with one worker, in a process by itself.

    OpenMP's threads have their cores in the program's first process already, so that the engine's
    process can be forked from it: it starts sooner, and the two share memory. Without retrieval
    vLLM would leave its other processes on the first of these cores.
    """
    cores = [str(core) for core in cores_of(os.getpid())]
    bound = {"OMP_NUM_THREADS": str(len(cores)), "GOMP_CPU_AFFINITY": " ".join(cores)}
    return all_cores() | bound


def startup_advice(
    dtype: torch.dtype, workers: int, widened: bool = False, nixl: bool = False
) -> str | None:
    """One line for the log of a worker process; None where its settings suit the machine.

    Args:
        dtype: the model's.
        workers: how many share this machine.
        widened: whether linear layers multiply prompts in float32, whatever the dtype.
        nixl: whether a connector of NIXL takes the last core.
    """
    # vLLM binds the worker's own threads; its parent may run on every core.
    cores = cores_of(os.getppid())
    threads = check_threads(cores, workers * torch.get_num_threads(), workers, nixl)
    judged = check_dtype(dtype, widened), threads
    told = [f"{text}; {remedy}" for text, remedy in judged if remedy]
    return f"On this machine: {'; '.join(told)}." if told else None


def check_dtype(dtype: torch.dtype, widened: bool) -> Judged:
    """Whether the CPU computes quickly with this type of a model's weights.

    Args:
        dtype: the model's.
        widened: see :func:`startup_advice`.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype not in (torch.bfloat16, torch.float16) or not slow_bfloat16():
        return Judged(f"{name} suits this CPU")
    if widened:
        return Judged(f"{name}; this CPU multiplies prompts in float32 (attention=own)")
    return Judged(
        f"{name} is slow on a CPU without AVX-512 BF16 and AMX",
        "kv_retrieval.attention=own computes prompts about four times as fast, and so does "
        "--dtype float32 with twice the memory",
    )


def check_threads(cores: list[int], used: int, workers: int, nixl: bool = False) -> Judged:
    """Whether vLLM leaves a core idle where there are few, or computes on one that is taken.

    Args:
        cores: one logical CPU of each core that vLLM may run on.
        used: threads of all workers together.
        workers: how many share this machine.
        nixl: whether a connector of NIXL takes the last core.
    """
    text = f"vLLM computes on {used} of {len(cores)} cores"
    bound = os.environ.get(BIND, "auto")
    free = cores[:-1] if nixl and len(cores) > 1 else cores
    settings = " ".join(f"{name}={value}" for name, value in _bound(free, workers).items())
    if used > len(free) and nixl and bound != "nobind":
        remedy = f"vLLM moves workers with NIXL to core {cores[-1]}; {settings} leaves it to them"
        return Judged(text, remedy)
    if used < len(free) and len(cores) <= FEW_CORES and bound == "auto":
        return Judged(text, f"with {settings} in its environment it takes all")
    if len(free) - used == 2 * workers and bound == "auto" and RESERVED not in os.environ:
        remedy = f"with {RESERVED}={workers} in its environment it keeps one core less per worker"
        return Judged(f"{text}, for it keeps back one for a KV connector", remedy)
    return Judged(text)


def cores_of(process: int) -> list[int]:
    """One logical CPU of each core that the process may run on, as vLLM itself chooses them."""
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(process)):
        siblings = Path(SIBLINGS.format(cpu))
        cores[siblings.read_text() if siblings.exists() else str(cpu)] = cpu
    return sorted(cores.values())


def _bound(cores: list[int], workers: int) -> dict[str, str]:
    ends = [len(cores) * i // workers for i in range(workers + 1)]  # neighbours share a NUMA node
    parts = [
        cores[begin:end] or [cores[i % len(cores)]]
        for i, (begin, end) in enumerate(itertools.pairwise(ends))
    ]
    lists = [",".join(str(core) for core in part) for part in parts]
    return {BIND: "|".join(lists), "GOMP_SPINCOUNT": "20000"}
