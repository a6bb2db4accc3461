"""How alike the queries of adjacent steps are, head by head.

    python -m benchmarks.quality query-similarity --tokens 4096 --queries 512

As in FreeKV's figure 3a (arXiv 2505.13109): a model reads a novel in transformers. Each query of
the last tokens, after rotary embedding, is compared by its cosine with the one before. A query head
has the mean over these steps. FreeKV corrects a KV head at a step where the mean cosine over the
query heads of its group is below a threshold: ``corrected`` is the share of such steps and heads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.cli import GEMMA3, QWEN, SMOLLM2
from benchmarks.quality import novel
from benchmarks.tables import quality
from vllm_kvretrieval.observed_model import CHUNK, ObservedModel, Seen

LIKE = (0.84, 0.9)
"""The paper's marks: every head's mean is above the first, most heads' above the second."""

THRESHOLDS = (0.8, 0.9)
"""FreeKV's thresholds for long inputs, and for long generations."""


class Similarity:
    """Collects the cosines of adjacent queries.

    Attributes:
        heads: Mean cosine of each query head so far.
        groups: Mean cosine over the group, of each step and KV head so far; [steps * kv_heads] per
            layer.
    """

    def __init__(self) -> None:
        self.heads: list[torch.Tensor] = []
        self.groups: list[torch.Tensor] = []

    def observe(self, seen: Seen) -> None:
        """Take in one layer's queries."""
        query, context = seen.query, seen.context
        if not (context.diff() == 1).all():
            raise ValueError(f"contexts are {context.tolist()}: the queries are not adjacent")
        cosines = torch.cosine_similarity(query[:, 1:], query[:, :-1], dim=-1)
        self.heads.append(cosines.mean(1))
        self.groups.append(cosines.unflatten(0, (len(seen.key), -1)).mean(1).flatten())


def measure(model: Path, tokens: int, queries: int) -> list[dict[str, Any]]:
    """The row of one model.

    Raises:
        ObservationError: The model or the text cannot be measured.
    """
    observed = ObservedModel(str(model))
    found = Similarity()
    novel.read(observed, tokens, queries, found.observe)
    heads, groups = torch.cat(found.heads), torch.cat(found.groups)
    return [
        {
            "model": model.name,
            "layers": len(found.heads),
            "heads": len(heads),
            "least": float(heads.min()),
            "tenth": float(heads.quantile(0.1)),
            "median": float(heads.median()),
            "alike": {str(mark): float((heads >= mark).float().mean()) for mark in LIKE},
            "corrected": {str(t): float((groups < t).float().mean()) for t in THRESHOLDS},
        }
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    models = SMOLLM2, QWEN, GEMMA3
    novel.add_arguments(parser, 4096, "query-similarity.json", CHUNK, models)


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    if args.queries != CHUNK:
        args.usage_error(f"--queries must be {CHUNK}: those of adjacent tokens are compared")
    return novel.run(args, CHUNK, measure, quality.query_similarity)
