"""Attention of prompts, and of single tokens over whole contexts: vLLM's kernel and ours, in turn.

    python -m benchmarks.prompt_attention [--cases CHUNK:CONTEXT ...] [--shapes NAME ...] [--avx2]

The ops alone, over random queries, keys and values: a step that reads the last CHUNK tokens of a
prompt of CONTEXT tokens. vLLM's kernel reads blocks of 128 tokens, as it does by default, and ours
scattered pages of 32. A CHUNK of 1 is a decode step, with so many layers that the cache comes from
memory; there the table has what is read per second, too, and what a plain sum of all numbers reads.
On one thread, in processor time, medians of rounds: a shared machine is enough. It exits with 1
where ours is slower than the machine's goal (``GOALS``, ``DECODE_GOALS``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, Stopwatch, result_header, write_json
from benchmarks.emulation import avx2_only
from benchmarks.planning import DTYPES, PAGE, Shape
from benchmarks.stock_attention import StockAttention
from vllm_kvretrieval.kernels import PromptLists, TokenLists, cpu
from vllm_kvretrieval.tiers.huge_pages import use_huge_pages

MODULE = "benchmarks.prompt_attention"
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
        self.query = torch.randn(chunk, heads * shape.group, size).to(dtype)
        self.output, self.expected = torch.empty_like(self.query), torch.empty_like(self.query)
        layer = context * heads * 2 * size * dtype.itemsize
        layers = 1 if chunk > 1 else -(-LEAST_CACHE // layer)
        table = torch.randperm(context // PAGE, dtype=torch.int32)
        self.caches, self.blocks = [], []
        for _ in range(layers):
            pages = torch.randn(context // PAGE, heads, PAGE, 2 * size).to(dtype)
            blocks = torch.empty(context // BLOCK, heads, BLOCK, 2 * size, dtype=dtype)
            cpu.stage_pages(pages, table, blocks, self.isa)
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
        for cache in self.caches:
            if self.chunk == 1:
                cpu.attend(self.query, self.tokens, cache, self.output, self.isa, self.scale)
            else:
                cpu.attend_prompt(self.query, self.lists, cache, self.output, self.isa, self.scale)

    def vllm(self) -> None:
        """By vLLM's, scheduled once for all layers, as an engine does."""
        shape = self.shape
        attend = StockAttention(
            self.starts,
            self.lens,
            self.table,
            kv_heads=shape.kv_heads,
            group=shape.group,
            head_size=shape.head_size,
            dtype=self.dtype,
            isa=self.isa,
            scale=self.scale,
        )
        for blocks in self.blocks:
            attend(self.query, blocks, self.expected)

    def read(self) -> None:
        """All of the caches, by a plain sum."""
        for cache in self.caches:
            cache.view(torch.float32).sum()

    def check(self) -> None:
        """Raise AssertionError where both do not compute the same."""
        tolerance = 1e-4 if self.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(self.output, self.expected, rtol=tolerance, atol=tolerance)


def seconds_of(run: Callable[[], None]) -> float:
    """Processor time of one run."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Nanoseconds per logit; of a decode step also what is read per second."""
    case.vllm()
    case.own()
    case.check()
    runs = (case.vllm, case.own) if case.chunk > 1 else (case.vllm, case.own, case.read)
    times = [[seconds_of(run) for run in runs] for _ in range(rounds)]
    theirs, ours, *read = (statistics.median(column) for column in zip(*times, strict=True))
    found = {
        "vllm_ns": round(1e9 * theirs / case.logits, 2),
        "own_ns": round(1e9 * ours / case.logits, 2),
        "ratio": round(theirs / ours, 2),
    }
    if read:
        found["own_gb_per_s"] = round(case.bytes / ours / 1e9, 1)
        found["read_gb_per_s"] = round(case.bytes / read[0] / 1e9, 1)
    return found


def goal_of(row: dict[str, Any], isa: str) -> float:
    """How many times as fast as vLLM's kernel ours has to be in a case, by instruction set."""
    if row["chunk"] == 1:
        return DECODE_GOALS.get(isa, 0)
    return GOALS.get(isa, {}).get(SHAPES[row["shape"]].head_size, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    pair = lambda text: tuple(int(part) for part in text.split(":"))  # noqa: E731
    parser.add_argument("--cases", type=pair, nargs="+", default=CASES, metavar="CHUNK:CONTEXT")
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=[*DTYPES], choices=DTYPES)
    parser.add_argument("--isa", choices=cpu.isas(), help="instruction set of our kernel")
    parser.add_argument("--avx2", action="store_true", help="both as on a machine without AVX-512")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "prompt-attention.json", metavar="FILE"
    )
    args = parser.parse_args(arguments)
    if args.avx2:  # vLLM chooses one of its libraries when it is imported
        avx2_only()
    if args.isa:
        cpu.use_isa(args.isa)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = Stopwatch()
    found: list[dict[str, Any]] = []
    for shape in args.shapes:
        for dtype in args.dtypes:
            for chunk, context in args.cases:
                case = Case(SHAPES[shape], chunk, context, DTYPES[dtype])
                row = {"shape": shape, "dtype": dtype, "chunk": chunk, "context": context}
                row |= measure(case, args.rounds)
                print(f"[{clock}] {row}", flush=True)
                found.append(row)
    settings = {"isa": cpu.isa(), "rounds": args.rounds}
    write_json(args.out, {**result_header(MODULE), "settings": settings, "rows": found})
    print(f"results: {args.out}  time: {clock}")
    slow = [row for row in found if row["ratio"] < goal_of(row, cpu.isa())]
    for row in slow:
        print(f"slower than the goal: {row}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
