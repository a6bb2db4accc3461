"""The share of the tokens with the most attention that an index finds, and the size of the index.

    python -m benchmarks.quality recall --tokens 8192 --queries 32

As in FIER's figure 6: a model reads a novel in transformers, and shows its queries and keys. For
each query and KV head, the true top are the 64 tokens with the most attention, exactly computed and
pooled over the query heads as every method here pools. Each index selects as many tokens by its
records, and more: its recall is the share of the true top among them. There is no sink and no
window here. Keys and records are rounded to bfloat16, as in a cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.models import head_size
from benchmarks.quality import novel
from benchmarks.tables import quality
from vllm_kvretrieval.observed_model import CHUNK, ObservedModel, Seen
from vllm_kvretrieval.retrieval.index import Index, make_index
from vllm_kvretrieval.retrieval.index.base import pack, unpack
from vllm_kvretrieval.retrieval.pooling import Pooling

TOP = 64
SELECTED = (64, 256, 1024)
DENSE_LAYERS = 2
"""Number of the first layers, in which FIER does not select."""

ALIGNED = 32
"""Contexts are cut to a multiple of this, so that all indexes cover the same tokens."""

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """An index, tokens per entry, and whether it selects single tokens.

    With ``shortlist`` only one entry in so many is scored, the best by the means of their keys.
    """

    index: Any
    entry_tokens: int
    per_token: bool = False
    shortlist: int = 1

    @property
    def made(self) -> Index:
        """The index."""
        index = make_index(self.index)
        assert isinstance(index, Index)
        return index

    @property
    def name(self) -> str:
        """The name in the table."""
        unit = "tokens" if self.per_token else f"pages of {self.entry_tokens}"
        some = f", one in {self.shortlist} by means first" if self.shortlist > 1 else ""
        return f"{self.made.name}, {unit}{some}"

    def bytes_per_token(self, head_size: int) -> float:
        """Bytes that the index keeps per token and KV head."""
        return self.made.record_bytes(head_size, self.entry_tokens, DTYPE) / self.entry_tokens


CASES = (
    Case("one_bit", 32, per_token=True),
    Case("min_max", 16),
    Case("one_bit", 16),
    Case("mean_std", 16),
    Case("low_rank", 32),
    Case("low_rank", 32, shortlist=2),
    Case("low_rank", 32, shortlist=4),
    Case("min_max", 32),
    Case("exact", 16),
)


class Records(NamedTuple):
    """An index over the keys of one KV head, in its order of entries."""

    made: Index
    fields: dict[str, torch.Tensor]
    means: torch.Tensor  # of keys, [entries, head_size]

    @classmethod
    def of(cls, case: Case, keys: torch.Tensor) -> Records:
        """Over keys, float32 [tokens, head_size]; an unfinished entry has none."""
        index, size = case.made, keys.shape[1]
        entries = keys[: len(keys) // case.entry_tokens * case.entry_tokens]
        entries = entries.view(-1, case.entry_tokens, size)
        if index.reads_keys:
            return cls(index, {"keys": entries}, entries.mean(1))
        fields = index.fields(size, case.entry_tokens)
        packed = pack(fields, index.build(entries), DTYPE)
        return cls(index, unpack(fields, packed, DTYPE), entries.mean(1))


class Recall:
    """Sums, per case, the recall of every query at every number of tokens selected.

    Attributes:
        found: float64 [cases, numbers of tokens selected]; recall, summed.
        count: Queries times KV heads times layers so far.
    """

    def __init__(self) -> None:
        self.found = torch.zeros(len(CASES), len(SELECTED), dtype=torch.float64)
        self.count = 0

    def observe(self, seen: Seen) -> None:
        """Take in one layer's queries."""
        if seen.layer < DENSE_LAYERS:
            return
        queries = seen.query.to(DTYPE).float().unflatten(0, (len(seen.key), -1))
        for head, keys in enumerate(seen.key.to(DTYPE).float()):
            records = [Records.of(case, keys) for case in CASES]
            for place, tokens in enumerate(seen.context.tolist()):
                self._add(queries[head, :, place], keys, records, tokens, seen.scale)

    def _add(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        records: Sequence[Records],
        tokens: int,
        scale: float,
    ) -> None:
        """One query, float32 [group, head_size], over its first ``tokens`` tokens."""
        tokens -= tokens % ALIGNED
        true = pooled(query @ keys[:tokens].T * scale).topk(TOP).indices
        wanted = torch.zeros(tokens, dtype=torch.float64)
        wanted[true] = 1 / TOP
        for number, (case, (index, fields, means)) in enumerate(zip(CASES, records, strict=True)):
            entries = {name: field[: tokens // case.entry_tokens] for name, field in fields.items()}
            if case.per_token:
                scores, unit = index.score_tokens(query, entries, scale).flatten(1), 1
            else:
                scores, unit = index.score(query, entries, scale), case.entry_tokens
            shares = pooled(scores)
            if case.shortlist > 1:
                first = pooled(query @ means[: tokens // unit].T * scale)
                first = first.topk(len(first) // case.shortlist).indices
                shares = torch.zeros_like(shares).index_copy(0, first, shares[first])
            best = shares.topk(max(SELECTED) // unit).indices
            found = wanted.view(-1, unit).sum(1)[best].cumsum(0)
            self.found[number] += found[[selected // unit - 1 for selected in SELECTED]]
        self.count += 1


def pooled(scores: torch.Tensor) -> torch.Tensor:
    """Scores of a group, [group, n], as methods pool them: [n]."""
    pooling = Pooling.MEAN_SOFTMAX
    return pooling.pool(scores - pooling.norms(scores), 1)


def measure(model: Path, tokens: int, queries: int) -> list[dict[str, Any]]:
    """A row per case, of one model.

    Raises:
        ObservationError: The model or the text cannot be measured.
    """
    observed = ObservedModel(str(model))
    recall = Recall()
    novel.read(observed, tokens, queries, recall.observe)
    size = head_size(observed.config)
    return [
        {
            "model": model.name,
            "case": case.name,
            "bytes_per_token": case.bytes_per_token(size),
            "queries": recall.count,
            "recall": dict(zip(map(str, SELECTED), found.tolist(), strict=True)),
        }
        for case, found in zip(CASES, recall.found / recall.count, strict=True)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    novel.add_arguments(parser, 8192, "recall.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    return novel.run(args, max(SELECTED) + 2 * CHUNK, measure, quality.recall, top=TOP)
