"""A layer's attention while a prompt is read: exact prefill and sparse prefill, in turn.

    python -m benchmarks.prefill_layer [--contexts N ...] [--budgets N ...] [--chunk 512]

The ops alone, over random keys and values: the time of the last step of a prompt in a layer that
follows a filter, staging included, and the time for the selection in the filter. On one thread, in
processor time, medians of rounds: a shared machine is enough.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from benchmarks.common import RESULTS, Stopwatch, result_header, write_json
from benchmarks.planning import DTYPES, PAGE, Shape
from benchmarks.stock_attention import StockAttention
from vllm_kvretrieval.attention.cpu.chunks import ChunkPlanner
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.engine.cpu.advice import slow_bfloat16
from vllm_kvretrieval.kernels import ContextSelector, IndexStore, cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.index.exact import Exact

MODULE = "benchmarks.prefill_layer"
STEP = 2048
"""Tokens of a step."""


class Case:
    """The last step of a prompt; its chunks attend to ``budget`` tokens before them."""

    def __init__(
        self, shape: Shape, context: int, budget: int, chunk: int, dtype: torch.dtype
    ) -> None:
        heads, size = shape.kv_heads, shape.head_size
        options = {"prefill_budget": budget, "prefill_chunk": chunk}
        sparse = ChunkPlanner(RetrievalConfig.from_options("omnikv", options))
        isa = _get_attn_isa(dtype, PAGE, size)
        self.shape, self.scale, self.dtype = shape, size**-0.5, dtype
        self.cache = torch.randn(context // PAGE, heads, PAGE, 2 * size).to(dtype)
        self.staging = PrefillStaging(PAGE, heads, size, dtype, context, isa, rows=True)
        self.query = torch.randn(STEP, heads * shape.group, size).to(dtype)
        self.output = torch.empty_like(self.query)
        self.lens = torch.tensor([context], dtype=torch.int32)
        self.starts = torch.tensor([0, STEP], dtype=torch.int32)
        table = torch.randperm(len(self.cache), dtype=torch.int32)[None]
        (self.staged,) = self.staging.plan(table, self.lens, self.starts)
        division = sparse.divide(self.lens.numpy(), np.array([STEP]))
        self.turns = sparse.plan(division, table, 0, self.staging, heads, 0)
        store = IndexStore.empty(
            Exact(),
            pages=len(self.cache),
            kv_heads=heads,
            head_size=size,
            page_size=PAGE,
            dtype=dtype,
            cache=self.cache,
            layout=isa,  # filters keep vLLM's; the numbers are random anyway
        )
        chosen = torch.zeros(sparse.most(STEP, 1), sparse.select, dtype=torch.int32)
        self.selector = ContextSelector(store, chosen, shape.group, self.scale)

    def exact(self) -> None:
        """Run a layer that attends to everything."""
        cpu.stage_pages(
            self.cache, self.staged.pages, self.staging.buffer, self.staging.isa, rows=True
        )
        self._attend(slice(0, STEP), self.lens, self.starts, self.staged.block_table)

    def select(self) -> None:
        """Run the selection of a filter."""
        for chunks in self.turns:
            query = self.query[chunks.queries]
            cpu.select_context(query, chunks.weights, chunks.rows, self.selector)
            cpu.list_context(chunks.rows, self.selector, self.shape.kv_heads)

    def sparse(self) -> None:
        """Run a layer that follows a filter."""
        for chunks in self.turns:
            cpu.stage_tokens(self.cache, chunks.lists, self.staging.buffer, self.staging.isa)
            lens = chunks.lists.lengths[:: self.shape.kv_heads].contiguous()
            tokens = slice(chunks.start, chunks.start + int(chunks.query_start_loc[-1]))
            self._attend(tokens, lens, chunks.query_start_loc, chunks.block_table)

    def _attend(
        self, tokens: slice, lens: torch.Tensor, starts: torch.Tensor, table: torch.Tensor
    ) -> None:
        shape = self.shape
        attend = StockAttention(
            starts,
            lens,
            table,
            kv_heads=shape.kv_heads,
            group=shape.group,
            head_size=shape.head_size,
            dtype=self.dtype,
            isa=self.staging.isa,
            scale=self.scale,
        )
        attend(self.query[tokens], self.staging.buffer, self.output[tokens])


def seconds_of(run: Callable[[], None]) -> float:
    """Processor time of one run."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Milliseconds."""
    case.select()  # what there is to stage
    runs = (case.exact, case.sparse, case.select)
    times = [[seconds_of(run) for run in runs] for _ in range(rounds)]
    exact, sparse, select = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "exact_ms": round(1e3 * exact, 1),
        "sparse_ms": round(1e3 * sparse, 1),
        "ratio": round(exact / sparse, 2),
        "select_ms": round(1e3 * select, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    contexts, budgets = [8192, 16384, 32768], [1024, 2048, 4096]
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts, metavar="TOKENS")
    parser.add_argument("--budgets", type=int, nargs="+", default=budgets, metavar="TOKENS")
    parser.add_argument("--chunk", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32" if slow_bfloat16() else "bfloat16"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "prefill-layer.json", metavar="FILE")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock, shape = Stopwatch(), Shape()
    found: list[dict[str, Any]] = []
    for context in args.contexts:
        for budget in args.budgets:
            case = Case(shape, context, budget, args.chunk, DTYPES[args.dtype])
            row = {"context": context, "budget": budget, **measure(case, args.rounds)}
            print(f"[{clock}] {row}", flush=True)
            found.append(row)
    settings = {"dtype": args.dtype, "isa": cpu.isa(), "chunk": args.chunk, **vars(shape)}
    write_json(args.out, {**result_header(MODULE), "settings": settings, "rows": found})
    print(f"results: {args.out}  time: {clock}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
