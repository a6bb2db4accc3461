"""Decode attention over selected pages: vLLM's kernel and ours, in turn; and over single tokens.

    python -m benchmarks.ops attention --context 32768 --budget 1024 256 --batch 1 4

The ops alone, over random keys and values, with as many layers as a model has, so that pages come
from memory and not from a cache. Times are medians of rounds, per decode step of all layers; the
bytes are those of the keys and values attended to. Single tokens lie anywhere in a cache of rows.
Each case is measured in ordinary pages of memory, and then in huge ones.
What the machine reads at most is taken to be the sum of all numbers of these caches, by torch.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.cli import add_output, add_tokens
from benchmarks.common import Stopwatch
from benchmarks.ops.setup import DTYPES, PAGE, Shape, add_common, add_step, keep, medians, read_all
from benchmarks.ops.stock_attention import StockAttention
from vllm_kvretrieval.kernels import TokenLists, cpu
from vllm_kvretrieval.storage.huge_pages import use_huge_pages


class Case:
    """A step: every (request, KV head) attends to pages of its own in each layer."""

    def __init__(
        self, shape: Shape, context: int, budget: int, batch: int, dtype: torch.dtype
    ) -> None:
        units, pages = batch * shape.kv_heads, context // PAGE * batch
        self.shape, self.dtype = shape, dtype
        size = (pages * shape.kv_heads, PAGE, 2 * shape.head_size)
        self.caches = [torch.randn(size).to(dtype) for _ in range(shape.layers)]
        self.query = torch.randn(batch, shape.kv_heads * shape.group, shape.head_size).to(dtype)
        self.output = torch.empty_like(self.query)
        chosen = torch.stack(
            [torch.randperm(pages)[: budget // PAGE].sort().values for _ in range(units)]
        )
        heads = torch.arange(units)[:, None] % shape.kv_heads
        entries = (chosen * shape.kv_heads + heads).int()
        lengths = torch.full((units,), budget, dtype=torch.int32)
        self.lists = TokenLists(entries, lengths, PAGE, shape.kv_heads)
        among = torch.stack(
            [torch.randperm(pages * PAGE)[:budget].sort().values for _ in range(units)]
        )
        tokens = (among // PAGE * shape.kv_heads + heads) * PAGE + among % PAGE
        self.tokens = TokenLists(tokens.int(), lengths, 1, shape.kv_heads)
        self.starts = torch.arange(units + 1, dtype=torch.int32)
        self.bytes = shape.layers * units * budget * 2 * shape.head_size * dtype.itemsize

    def ours(self) -> None:
        """All layers by our kernel."""
        for cache in self.caches:
            cpu.attend(self.query, self.lists, cache, self.output, "vec", 0.125)

    def single_tokens(self) -> None:
        """All layers by our kernel, over as many tokens, each of them for itself."""
        for cache in self.caches:
            cpu.attend(self.query, self.tokens, cache, self.output, cpu.TOKEN_MAJOR, 0.125)

    def vllms(self) -> None:
        """All layers by vLLM's, scheduled once per step, as an engine does."""
        shape, lists = self.shape, self.lists
        attend = StockAttention(
            self.starts,
            lists.lengths,
            lists.entries,
            shape=replace(shape, kv_heads=1),
            dtype=self.dtype,
            isa="vec",
            scale=0.125,
        )
        flat = (len(lists.lengths), shape.group, shape.head_size)
        query, output = self.query.view(flat), self.output.view(flat)
        for cache in self.caches:
            attend(query, cache[:, None], output)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Milliseconds of each, and what is read per second."""
    kernels = (case.vllms, case.ours, case.single_tokens, partial(read_all, case.caches))
    vllms, ours, tokens, whole = medians(kernels, rounds, time.perf_counter, warm=2)
    return {
        "vllm_ms": round(1e3 * vllms, 3),
        "ours_ms": round(1e3 * ours, 3),
        "ratio": round(ours / vllms, 3),
        "gb_per_s": round(case.bytes / ours / 1e9, 2),
        "tokens_ms": round(1e3 * tokens, 3),
        "tokens_gb_per_s": round(case.bytes / tokens / 1e9, 2),
        "most_gb_per_s": round(sum(cache.nbytes for cache in case.caches) / whole / 1e9, 2),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_step(parser)
    add_common(parser, 30)
    add_tokens(parser, "--budget", [1024, 256], "tokens that are attended to")
    add_output(parser, "attention.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    clock, shape, found = Stopwatch(), Shape(), []
    for batch in args.batch:
        for budget in args.budget:
            case = Case(shape, args.context, budget, batch, DTYPES[args.dtype])
            for huge in (False, True):
                pages = use_huge_pages(case.caches) if huge else 0
                row = {"batch": batch, "budget": budget, "huge_pages": pages}
                row |= measure(case, args.rounds)
                print(f"[{clock}] {row}", flush=True)
                found.append(row)
    keep(args, found, shape)
    return 0
