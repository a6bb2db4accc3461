"""Attention of prompts, and of single tokens over whole contexts: vLLM's kernel and ours, in turn.

    python -m benchmarks.ops prompt-attention --cases 128:2048 512:32768 --shapes smollm2-135m
    python -m benchmarks.ops prompt-attention --cases 1:32768 --avx2

The ops alone, over random queries, keys and values: a step that reads the last CHUNK tokens of a
prompt of CONTEXT tokens. vLLM's kernel reads blocks of 128 tokens, as it does by default, and then
the scattered pages of 32 that ours reads, as it would in our engine. A CHUNK of 1 is a decode step,
with so many layers that the cache comes from memory; there the table has what is read per second,
too, from pages and from the rows that methods of single tokens have, and what a plain sum of all
numbers reads.
On one thread, in processor time, medians of rounds: a shared machine is enough. It exits with 1
where ours is slower than the machine's goal (``GOALS``, ``DECODE_GOALS``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.cli import add_output
from benchmarks.common import Stopwatch
from benchmarks.emulation import avx2_only
from benchmarks.ops.setup import DTYPES, PAGE, Shape, keep, medians, one_thread, read_all
from benchmarks.ops.stock_attention import StockAttention
from vllm_kvretrieval.kernels import PromptLists, TokenLists, cpu
from vllm_kvretrieval.storage.huge_pages import use_huge_pages

BLOCK = 128
"""Tokens of a block of vLLM's cache."""
SHAPES = {
    "smollm2-135m": Shape(layers=1, kv_heads=3, group=3, head_size=64),
    "qwen2.5-0.5b": Shape(layers=1, kv_heads=2, group=7, head_size=64),
    "llama-3.1-8b": Shape(layers=1, kv_heads=8, group=4, head_size=128),
}
CASES = ((1, 32768), (128, 2048), (2048, 2048), (128, 8192), (2048, 8192), (512, 32768))
GOALS = {"avx2": {64: 1.8, 128: 1.5}}
"""By instruction set and head size: how many times as fast as vLLM's kernel ours has to be."""
DECODE_GOALS = {"avx2": 1.4}
"""The same of single tokens, by instruction set."""
LEAST_CACHE = 256 * 2**20
"""Bytes that are read by a decode step: more than caches of processors hold."""


class Case:
    """A step with the last tokens of a prompt."""

    def __init__(self, shape: Shape, chunk: int, context: int, dtype: torch.dtype) -> None:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        heads, size = shape.kv_heads, shape.head_size
        self.shape, self.dtype, self.scale, self.chunk = shape, dtype, size**-0.5, chunk
        self.isa = _get_attn_isa(dtype, BLOCK, size)
        if self.isa == "amx":
            torch.cpu._init_amx()
        self.query = torch.randn(chunk, heads * shape.group, size).to(dtype)
        self.output, self.expected = torch.empty_like(self.query), torch.empty_like(self.query)
        layer = context * heads * 2 * size * dtype.itemsize
        layers = 1 if chunk > 1 else -(-LEAST_CACHE // layer)
        table = torch.randperm(context // PAGE, dtype=torch.int32)
        self.caches, self.blocks = [], []
        for _ in range(layers):
            rows = torch.randn(context // PAGE, heads, PAGE, 2 * size).to(dtype)
            pages = torch.empty_like(rows)
            blocks = torch.empty(context // BLOCK, heads, BLOCK, 2 * size, dtype=dtype)
            cpu.stage_pages(rows, table.sort().values, pages, self.isa, token_major=True)
            cpu.stage_pages(rows, table, blocks, self.isa, token_major=True)
            self.caches.append(pages)
            self.blocks.append(blocks)
        if chunk == 1:
            use_huge_pages([*self.caches, *self.blocks])
        self.starts = torch.tensor([0, chunk], dtype=torch.int32)
        self.lens = torch.tensor([context], dtype=torch.int32)
        self.table = torch.arange(context // BLOCK, dtype=torch.int32)[None]
        self.lists = PromptLists(table[None], self.starts, self.lens - chunk + 1, heads)
        self.tokens = TokenLists(
            table[None], self.lens.expand(heads).contiguous(), PAGE, heads, per_head=False
        )
        self.logits = layers * heads * shape.group * (chunk * context - chunk * (chunk - 1) // 2)
        self.bytes = layers * layer

    def own(self) -> None:
        """By our kernel."""
        if self.chunk == 1:
            self._decode(self.isa)
            return
        for cache in self.caches:
            cpu.attend_prompt(self.query, self.lists, cache, self.output, self.isa, self.scale)

    def rows(self) -> None:
        """A decode step by our kernel, which takes the same numbers for rows of tokens."""
        self._decode(cpu.TOKEN_MAJOR)

    def _decode(self, layout: str) -> None:
        for cache in self.caches:
            cpu.attend(self.query, self.tokens, cache, self.output, layout, self.scale)

    def vllm(self) -> None:
        """By vLLM's, scheduled once for all layers, as an engine does."""
        self._by_vllm(self.table, self.blocks)

    def vllm_in_pages(self) -> None:
        """The same over the pages that ours reads, as our engine has it without staging."""
        self._by_vllm(self.lists.entries, self.caches)

    def _by_vllm(self, table: torch.Tensor, caches: list[torch.Tensor]) -> None:
        attend = StockAttention(
            self.starts,
            self.lens,
            table,
            shape=self.shape,
            dtype=self.dtype,
            isa=self.isa,
            scale=self.scale,
        )
        for cache in caches:
            attend(self.query, cache, self.expected)

    def check(self) -> None:
        """Raise AssertionError where both do not compute the same."""
        tolerance = 1e-4 if self.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(self.output, self.expected, rtol=tolerance, atol=tolerance)


def measure(case: Case, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Nanoseconds per logit; of a decode step also what is read per second."""
    case.vllm()
    case.own()
    case.check()
    runs = [case.vllm, case.vllm_in_pages, case.own]
    if case.chunk == 1:
        runs += [case.rows, partial(read_all, case.caches)]
    theirs, in_pages, ours, *decoding = medians(runs, rounds, clock)
    found = {
        "vllm_ns": round(1e9 * theirs / case.logits, 2),
        "vllm_in_pages_ns": round(1e9 * in_pages / case.logits, 2),
        "own_ns": round(1e9 * ours / case.logits, 2),
        "ratio": round(theirs / ours, 2),
        "ratio_in_pages": round(in_pages / ours, 2),
    }
    if decoding:
        for name, seconds in zip(("own", "rows", "read"), (ours, *decoding), strict=True):
            found[f"{name}_gb_per_s"] = round(case.bytes / seconds / 1e9, 1)
    return found


def goal_of(row: dict[str, Any], isa: str) -> float:
    """How many times as fast as vLLM's kernel ours has to be in a case, by instruction set."""
    if row["chunk"] == 1:
        return DECODE_GOALS.get(isa, 0)
    return GOALS.get(isa, {}).get(SHAPES[row["shape"]].head_size, 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--cases", type=pair, nargs="+", default=CASES, metavar="CHUNK:CONTEXT", help="tokens that "
        "the step reads, and tokens of the prompt up to its end")  # fmt: skip
    add("--shapes", nargs="+", default=[*SHAPES], choices=SHAPES, help="heads as in these models")
    add("--dtypes", nargs="+", default=[*DTYPES], choices=DTYPES, help="elements of the cache")
    add("--isa", choices=cpu.isas(), help="instruction set of our kernel")
    add("--avx2", action="store_true", help="both as on a machine without AVX-512")
    add("--rounds", type=int, default=5, metavar="N", help="runs, of which medians are shown")
    add_output(parser, "prompt-attention.json")


def pair(text: str) -> tuple[int, int]:
    """A case of ``--cases``."""
    chunk, _, context = text.partition(":")
    return int(chunk), int(context)


def run(args: argparse.Namespace) -> int:
    """Measure, print and store; returns 1 where a goal is missed."""
    if args.avx2:  # vLLM chooses one of its libraries when it is imported
        avx2_only()
    if args.isa:
        cpu.use_isa(args.isa)
    processor, watch = one_thread(), Stopwatch()
    found: list[dict[str, Any]] = []
    for shape in args.shapes:
        for dtype in args.dtypes:
            for chunk, context in args.cases:
                case = Case(SHAPES[shape], chunk, context, DTYPES[dtype])
                row = {"shape": shape, "dtype": dtype, "chunk": chunk, "context": context}
                row |= measure(case, args.rounds, processor)
                print(f"[{watch}] {row}", flush=True)
                found.append(row)
    keep(args, found)
    slow = [row for row in found if row["ratio"] < goal_of(row, cpu.isa())]
    for row in slow:
        print(f"slower than the goal: {row}")
    return 1 if slow else 0
