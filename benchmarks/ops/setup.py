"""What the programs that time ops alone share: shapes, options, timing, and result files."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import result_header, settings, write_json
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.upstream.defaults import slow_bfloat16

PAGE = 32
"""Tokens of a page."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """The shape of a model's attention; by default that of SmolLM2-135M."""

    layers: int = 29
    kv_heads: int = 3
    group: int = 3
    head_size: int = 64


def add_common(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add ``--rounds`` and ``--dtype``."""
    add = parser.add_argument
    add("--rounds", type=int, default=rounds, metavar="N", help="runs, of which medians are shown")
    dtype = "float32" if slow_bfloat16() else "bfloat16"
    add("--dtype", choices=DTYPES, default=dtype, help="elements of queries and cache")


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the size of a decode step."""
    add = parser.add_argument
    add("--context", type=int, default=32768, metavar="TOKENS", help="length of the contexts")
    add("--batch", type=int, nargs="+", default=[1, 4], metavar="N", help="requests of a step")


def medians(
    runs: Sequence[Callable[[], object]], rounds: int, clock: Callable[[], float], warm: int = 0
) -> list[float]:
    """Return the median of the seconds that each of `runs` takes; they take turns.

    Args:
        runs: what is timed.
        rounds: how often.
        clock: `time.process_time` on one thread, else `time.perf_counter`.
        warm: rounds before these, which do not count.
    """
    times = [[_seconds(run, clock) for run in runs] for _ in range(warm + rounds)]
    return [statistics.median(column) for column in zip(*times[warm:], strict=True)]


def _seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    begin = clock()
    run()
    return clock() - begin


def read_all(caches: Iterable[torch.Tensor]) -> None:
    """Read all of the caches, by a plain sum."""
    for cache in caches:
        cache.view(torch.float32).sum()


def one_thread() -> Callable[[], float]:
    """Compute on one thread from now on; returns the clock for that, of processor time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return time.process_time


def keep(args: argparse.Namespace, rows: Sequence[Any], shape: Shape | None = None) -> None:
    """Write a program's result file: its options, the instruction set, the shape, and the rows."""
    setup = settings(args) | {"isa": cpu.isa(), "threads": torch.get_num_threads()}
    setup |= vars(shape) if shape else {}
    write_json(args.output, {**result_header("benchmarks.ops"), "settings": setup, "rows": rows})
    print(f"{setup}\nresults: {args.output}")
