"""A layer's attention while a prompt is read: exact prefill and sparse prefill, in turn.

    python -m benchmarks.ops prefill-layer --contexts 8192 --budgets 1024 2048

The ops alone, over random keys and values: the time of the last step of a prompt in a layer that
follows a filter, staging included, and the time for the selection in the filter. On one thread, in
processor time, medians of rounds: a shared machine is enough.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from benchmarks.cli import add_output, add_tokens
from benchmarks.common import Stopwatch
from benchmarks.ops.setup import DTYPES, PAGE, Shape, add_common, keep, medians, one_thread
from benchmarks.ops.stock_attention import StockAttention
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.kernels import ContextSelector, IndexRecords, cpu
from vllm_kvretrieval.methods.prompt_chunks import Prompts
from vllm_kvretrieval.methods.token_chunks import TokenChunkPlanner
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.index.exact import Exact

STEP = 2048
"""Tokens of a step."""


class Case:
    """The last step of a prompt; its chunks attend to ``budget`` tokens before them."""

    def __init__(
        self, shape: Shape, context: int, budget: int, chunk: int, dtype: torch.dtype
    ) -> None:
        heads, size = shape.kv_heads, shape.head_size
        options = {"prefill_budget": budget, "prefill_chunk": chunk}
        sparse = TokenChunkPlanner(RetrievalConfig.from_options("omnikv", options), heads)
        isa = _get_attn_isa(dtype, PAGE, size)
        self.shape, self.scale, self.dtype = shape, size**-0.5, dtype
        self.cache = torch.randn(context // PAGE, heads, PAGE, 2 * size).to(dtype)
        self.staging = PrefillStaging(PAGE, heads, size, dtype, context, isa, token_major=True)
        self.query = torch.randn(STEP, heads * shape.group, size).to(dtype)
        self.output = torch.empty_like(self.query)
        self.lens = torch.tensor([context], dtype=torch.int32)
        self.starts = torch.tensor([0, STEP], dtype=torch.int32)
        table = torch.randperm(len(self.cache), dtype=torch.int32)[None]
        (self.staged,) = self.staging.plan(table, self.lens, self.starts)
        division = sparse.divide(self.lens.numpy(), np.array([STEP]))
        always, lens = np.zeros((2, 1), int), self.lens.numpy()
        prompts = Prompts(0, division, always, lens, table, 0, 0)
        blocks = -(-division.attended // self.staging.block_size)
        self.turns = [
            (
                prompts.chunks(turn),
                sparse.plan(prompts.chunks(turn)),
                self.staging.block_table(blocks[turn]),
            )
            for turn in self.staging.turns(blocks)
        ]
        store = IndexRecords.empty(
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
            self.cache, self.staged.pages, self.staging.buffer, self.staging.isa, token_major=True
        )
        self._attend(slice(0, STEP), self.lens, self.starts, self.staged.block_table)

    def select(self) -> None:
        """Run the selection of a filter."""
        for _, chunks, _ in self.turns:
            query = self.query[chunks.queries]
            cpu.select_context(query, chunks.weights, chunks.rows, self.selector)
            cpu.list_context(chunks.rows, self.selector, self.shape.kv_heads)

    def sparse(self) -> None:
        """Run a layer that follows a filter."""
        for prompts, chunks, table in self.turns:
            cpu.stage_tokens(self.cache, chunks.lists, self.staging.buffer, self.staging.isa)
            lens = chunks.lists.lengths[:: self.shape.kv_heads].contiguous()
            starts = torch.from_numpy(prompts.division.new).cumsum(0).int()
            starts = torch.cat([torch.zeros(1, dtype=torch.int32), starts])
            tokens = slice(prompts.start, prompts.start + int(starts[-1]))
            self._attend(tokens, lens, starts, table)

    def _attend(
        self, tokens: slice, lens: torch.Tensor, starts: torch.Tensor, table: torch.Tensor
    ) -> None:
        attend = StockAttention(
            starts,
            lens,
            table,
            shape=self.shape,
            dtype=self.dtype,
            isa=self.staging.isa,
            scale=self.scale,
        )
        attend(self.query[tokens], self.staging.buffer, self.output[tokens])


def measure(case: Case, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Milliseconds."""
    case.select()  # what there is to stage
    exact, sparse, select = medians((case.exact, case.sparse, case.select), rounds, clock)
    return {
        "exact_ms": round(1e3 * exact, 1),
        "sparse_ms": round(1e3 * sparse, 1),
        "ratio": round(exact / sparse, 2),
        "select_ms": round(1e3 * select, 1),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_tokens(parser, "--contexts", [8192, 16384, 32768], "tokens of the prompts")
    add_tokens(parser, "--budgets", [1024, 2048, 4096], "earlier tokens that a chunk attends to")
    parser.add_argument("--chunk", type=int, default=512, metavar="TOKENS", help="size of a chunk")
    add_common(parser, 3)
    add_output(parser, "prefill-layer.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    processor, watch, shape = one_thread(), Stopwatch(), Shape()
    found: list[dict[str, Any]] = []
    for context in args.contexts:
        for budget in args.budgets:
            case = Case(shape, context, budget, args.chunk, DTYPES[args.dtype])
            row = {"context": context, "budget": budget}
            row |= measure(case, args.rounds, processor)
            print(f"[{watch}] {row}", flush=True)
            found.append(row)
    keep(args, found, shape)
    return 0
