"""The cost of reading single tokens from a home on disk, or the pages that hold them.

    python -m benchmarks.ops token-reads

The ops alone, with the sizes of a decode step of SmolLM2-135M: 28 layers of 3 KV heads of 64
channels in bfloat16, pages of 32 tokens. In every layer, tokens at random places of the context are
missing; they are brought into fast memory one by one (`TokenRecall`), or with all of their pages
(`RecallCache`). This is measured once with the file in the system's page cache, and once after the
system was told to forget it (`posix_fadvise`), so that the disk is read. CPU time is that of all
threads.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.cli import add_output
from benchmarks.ops.setup import keep
from vllm_kvretrieval.kernels import Contexts, DecodeRows, TokenLists, cpu
from vllm_kvretrieval.storage.mapped import DiskHome

LAYERS, HEADS, HEAD_SIZE, PAGE = 28, 3, 64, 32
CONTEXTS = (8192, 32768)
MISSING = (64, 1024)
"""Tokens to be read, per KV head and layer."""
REPEATS = 5
MIB = 1 << 20


def rows_of(lists: torch.Tensor, context: int, per_token: bool) -> DecodeRows:
    """One request that attends to these tokens or units, [kv_heads, n]."""
    one = torch.ones(1, dtype=torch.int32)
    pages = torch.arange(context // PAGE, dtype=torch.int32)[None]
    return DecodeRows.selecting(
        Contexts(pages, one * context, one * 0),
        lists.int().contiguous(),
        lengths=torch.full((len(lists),), lists.shape[1], dtype=torch.int32),
        sink=0,
        window=0,
        select=lists.shape[1],
        corrected=torch.zeros(1, dtype=torch.int64),
        per_token=per_token,
    )


class Layer:
    """One layer of the home, and both ways to read it."""

    def __init__(self, home: DiskHome, number: int, context: int, most: int) -> None:
        shape = context // PAGE, HEADS, PAGE, 2 * HEAD_SIZE
        begin, counts = home.begin(number), torch.zeros(1, 3, dtype=torch.int64)
        here = home.memory[begin : begin + home.layer_bytes].view(torch.bfloat16)
        here.normal_()
        scattered = home.scattered(number).view(torch.bfloat16).view(shape)
        slots = torch.zeros(1, HEADS, most, 2 * HEAD_SIZE, dtype=torch.bfloat16)
        self.tokens = cpu.TokenRecall([scattered], [slots], counts, shared=False)
        units = here.view(-1, 1, 2 * PAGE, HEAD_SIZE)
        self.pages = cpu.RecallCache(units, len(units), HEADS, counts, (home.fd, begin))
        self.pages.slots.zero_()  # mapped, as they are after some steps

    def read_tokens(self, positions: torch.Tensor, context: int) -> None:
        """Bring single tokens."""
        units = positions // PAGE * HEADS + torch.arange(HEADS)[:, None]
        rows = rows_of(units * PAGE + positions % PAGE, context, per_token=True)
        self.tokens.recall(rows, TokenLists.empty(rows, 1, HEADS))
        self.tokens.wait(0)

    def read_pages(self, positions: torch.Tensor, context: int) -> None:
        """Bring the pages that hold them."""
        pages = (positions // PAGE).unique()
        rows = rows_of(pages * HEADS + torch.arange(HEADS)[:, None], context, False)
        self.pages.resolve(rows, TokenLists.empty(rows, PAGE, HEADS))
        self.pages.release(0)
        self.pages.drop_pages(pages.tolist())


def read_bytes() -> int:
    """Bytes that the disk has read for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def measure(
    read: Callable[[Layer], None], layers: list[Layer], home: DiskHome, cold: bool
) -> dict[str, float]:
    """A step: all layers, one after the other."""
    if cold:
        home.note_written(1 << 40)  # lets go of the mapping
        os.fsync(home.fd)
        os.posix_fadvise(home.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    before, wall, used = read_bytes(), time.perf_counter(), time.process_time()
    for layer in layers:
        read(layer)
    return {
        "ms": 1e3 * (time.perf_counter() - wall),
        "cpu_ms": 1e3 * (time.process_time() - used),
        "disk_mib": (read_bytes() - before) / MIB,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_output(parser, "token-reads.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    rows: list[dict[str, Any]] = []
    ways = {"tokens": Layer.read_tokens, "pages": Layer.read_pages}
    for context in CONTEXTS:
        size = context * HEADS * 4 * HEAD_SIZE
        home = DiskHome(
            "/var/tmp", LAYERS, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, cpu.MappingGuard
        )
        layers = [Layer(home, number, context, max(MISSING)) for number in range(LAYERS)]
        for missing in MISSING:
            for cold in (False, True):
                found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
                for _ in range(REPEATS):
                    positions = torch.randperm(context)[:missing].sort().values
                    for way, read in ways.items():
                        step = functools.partial(read, positions=positions, context=context)
                        found[way].append(measure(step, layers, home, cold))
                for way, runs in found.items():
                    row = {"context": context, "missing": missing, "cold": cold, "read": way}
                    row |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                    rows.append(row)
                    print(
                        f"{context:>8,} {missing:>6,} {'disk' if cold else 'page cache':<10} "
                        f"{way:<7} {row['ms']:>8.1f} ms {row['cpu_ms']:>8.1f} ms of CPU "
                        f"{row['disk_mib']:>7.1f} MiB read",
                        flush=True,
                    )
        del layers, home
    keep(args, rows)
    return 0
