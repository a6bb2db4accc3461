"""The cost of an index beside the keys and values: bytes, and time to select and to build.

    python -m benchmarks.ops planning --context 32768 --batch 1 4

The ops alone, over random keys, with as many layers as a model has, so that records come from
memory and not from a cache. Every round times all indexes one after the other; the figures are
medians of rounds. Times are per decode step of all layers; building is per token of all layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cli import add_output
from benchmarks.common import Stopwatch
from benchmarks.ops.setup import DTYPES, PAGE, Shape, add_common, add_step, keep
from benchmarks.tables import indexes
from vllm_kvretrieval.kernels import Chooser, Contexts, DecodeRows, IndexRecords, Selection, cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.index import Index, make_index
from vllm_kvretrieval.retrieval.pooling import Pooling


@dataclass(frozen=True)
class Case:
    """One index, whether its candidates are scored again by their keys, and the unit selected."""

    name: str
    index: Any
    rerank: int = 0
    per_token: bool = False


CASES = (
    Case("min_max", "min_max"),
    Case("mean", "mean"),
    Case("mean_std", "mean_std"),
    Case("bounding", "bounding"),
    Case("representative", "representative"),
    Case("one_bit", "one_bit"),
    Case("one_bit_tokens", "one_bit", per_token=True),
    Case("low_rank_4", {"low_rank": {"rank": 4}}),
    Case("low_rank_8", {"low_rank": {"rank": 8}}),
    Case("low_rank", "low_rank"),
    Case("low_rank_rerank", "low_rank", 2),
    Case("exact", "exact"),
)


class Layer:
    """The KV cache of one layer, and the indexes over it."""

    def __init__(self, shape: Shape, pages: int, batch: int, budget: int, dtype: torch.dtype):
        self.cache = torch.randn(pages, shape.kv_heads, PAGE, 2 * shape.head_size).to(dtype)
        self.shape, self.batch, self.budget, self.dtype = shape, batch, budget, dtype

    def chooser(self, case: Case) -> Chooser:
        """An index of this layer's own, not built yet."""
        made = make_index(case.index)
        assert isinstance(made, Index)
        shape: dict[str, Any] = {
            "kv_heads": self.shape.kv_heads,
            "head_size": self.shape.head_size,
            "dtype": self.dtype,
        }
        store = IndexRecords.empty(
            made, pages=len(self.cache), page_size=PAGE, cache=self.cache, **shape
        )
        selection = Selection.empty(
            seats=self.batch, group=self.shape.group, most_selected=self.budget, **shape
        )
        return Chooser(
            store, selection, Pooling.MEAN_SOFTMAX, self.shape.head_size**-0.5, case.rerank
        )


def rows_of(
    shape: Shape, pages: int, batch: int, budget: Any, per_token: bool = False
) -> DecodeRows:
    """Requests of equal contexts that select at every step; the same number of tokens per unit."""
    units = PAGE if per_token else 1  # of a page

    tables = torch.randperm(pages * batch).int().view(batch, pages)
    lens = torch.full((batch,), pages * PAGE, dtype=torch.int32)
    return DecodeRows.selecting(
        Contexts(tables, lens, torch.arange(batch, dtype=torch.int32)),
        torch.empty(batch * shape.kv_heads, pages * units, dtype=torch.int32),
        sink=budget.sink * units,
        window=budget.window * units,
        select=budget.select * units,
        fresh=False,
        corrected=torch.zeros(batch, dtype=torch.int64),
        per_token=per_token,
    )


def measure(shape: Shape, context: int, batch: int, dtype: torch.dtype, rounds: int) -> list[Any]:
    """A row per case: microseconds of planning per step, and of building per token."""
    pages, config = context // PAGE, RetrievalConfig(budget=1024)
    budget = config.page_budget()
    by_unit = {t: rows_of(shape, pages, batch, budget, t) for t in (False, True)}
    query = torch.randn(batch, shape.kv_heads * shape.group, shape.head_size).to(dtype)
    layers = [
        Layer(shape, pages * batch, batch, budget.select * PAGE, dtype) for _ in range(shape.layers)
    ]
    choosers = {case.name: [layer.chooser(case) for layer in layers] for case in CASES}
    ids = torch.arange(pages * batch, dtype=torch.int32)
    full = torch.full((len(ids),), PAGE, dtype=torch.int32)
    building, planning = ({case.name: list[float]() for case in CASES} for _ in range(2))
    for case in CASES:
        for chooser in choosers[case.name]:
            begin = time.perf_counter()
            cpu.index_pages(ids, full, chooser.store)
            building[case.name].append(time.perf_counter() - begin)
    for turn in range(rounds + 1):
        for case in CASES:
            if case.name == "exact" and turn > max(1, rounds // 10):
                continue
            begin = time.perf_counter()
            for chooser in choosers[case.name]:
                cpu.plan_decode(query, by_unit[case.per_token], chooser)
            if turn:
                planning[case.name].append(time.perf_counter() - begin)
    least = statistics.median(planning["min_max"])
    found = []
    for case in CASES:
        seconds = statistics.median(planning[case.name])
        store = choosers[case.name][0].store
        found.append(
            {
                "index": case.name,
                "rerank": case.rerank,
                "context": context,
                "batch": batch,
                "bytes_per_token": store.records.shape[-1] / PAGE,
                "share": store.records.shape[-1] / (PAGE * 2 * shape.head_size * dtype.itemsize),
                "planning_us": round(1e6 * seconds, 1),
                "to_min_max": round(seconds / least, 3),
                "building_us_per_token": round(
                    1e6 * statistics.median(building[case.name]) * shape.layers / len(ids) / PAGE, 3
                ),
            }
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_step(parser)
    add_common(parser, 20)
    add_output(parser, "planning.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    clock, shape, found = Stopwatch(), Shape(), []
    for batch in args.batch:
        print(f"[{clock}] {args.context} tokens, batch {batch}", flush=True)
        found += measure(shape, args.context, batch, DTYPES[args.dtype], args.rounds)
    print(indexes.planning({"": {"rows": found}}, {}))
    keep(args, found, shape)
    return 0
