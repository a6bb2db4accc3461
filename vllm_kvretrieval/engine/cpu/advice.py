"""Where vLLM's defaults are slow on small machines, and what to set instead."""

import os
import platform
from pathlib import Path

import torch

FEW_CORES = 4
"""Up to so many cores, the one that vLLM keeps back is worth a word."""

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
"""File that names the logical CPUs of a logical CPU's core; Linux's."""


def slow_bfloat16() -> bool:
    """Whether this is an x86 CPU without AVX-512 BF16 and AMX.

    It computes with 16-bit numbers by way of 32-bit ones, far more slowly than with float32.
    """
    return platform.machine() == "x86_64" and not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def preferred_dtype() -> str:
    """The value for vLLM's ``dtype``: ``auto``, or ``float32`` if bfloat16 is slow."""
    return "float32" if slow_bfloat16() else "auto"


def all_cores(workers: int = 1) -> dict[str, str]:
    """Environment that gives vLLM's CPU workers every core, without hogging them.

    On its own vLLM keeps one core back for its front end, which halves a worker on two cores.
    With all cores taken, threads that spin for milliseconds between two parallel regions would
    make vLLM's other processes wait for the scheduler's next tick, so they are told to sleep soon.

    Args:
        workers: how many the cores are dealt out to; more of them than cores share.
    """
    return _bound(_cores(os.getpid()), workers)


def startup_advice(dtype: torch.dtype, workers: int, widened: bool = False) -> str | None:
    """One line for the log of a worker process; None where its settings suit the machine.

    Args:
        dtype: the model's.
        workers: how many share this machine.
        widened: whether linear layers multiply prompts in float32, whatever the dtype.
    """
    advice = []
    if dtype in (torch.bfloat16, torch.float16) and slow_bfloat16() and not widened:
        advice.append(
            f"{str(dtype).removeprefix('torch.')} is slow on a CPU without AVX-512 BF16 and AMX; "
            "--dtype float32 computes prompts about four times as fast, and so does attention=own"
        )
    # vLLM binds the worker's own threads; its parent may run on every core.
    cores = _cores(os.getppid())
    used = workers * torch.get_num_threads()
    chosen = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "auto"
    if used < len(cores) <= FEW_CORES and not chosen:
        settings = " ".join(f"{name}={value}" for name, value in _bound(cores, workers).items())
        advice.append(
            f"vLLM computes on {used} of {len(cores)} cores; with {settings} in its environment "
            "it takes all"
        )
    return f"On this machine: {'; '.join(advice)}." if advice else None


def _cores(process: int) -> list[int]:
    """One logical CPU of each core that the process may run on, as vLLM itself chooses them."""
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(process)):
        siblings = Path(SIBLINGS.format(cpu))
        cores[siblings.read_text() if siblings.exists() else str(cpu)] = cpu
    return sorted(cores.values())


def _bound(cores: list[int], workers: int) -> dict[str, str]:
    parts = [cores[i % len(cores) :: workers] for i in range(workers)]
    lists = [",".join(str(core) for core in part) for part in parts]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(lists), "GOMP_SPINCOUNT": "20000"}
