"""Which tasks, methods and budgets the accuracy benchmark knows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common import MODELS
from benchmarks.tasks import forced, needles
from benchmarks.tasks.base import Task
from vllm_kvretrieval.config import RetrievalConfig

_QWEN = MODELS / "Qwen2.5-Coder-0.5B-Instruct"
_GEMMA3 = MODELS / "gemma-3-270m"
_SMOLLM2 = MODELS / "SmolLM2-135M-Instruct"

BUDGETS = (256, 512, 1024)
QUICK_BUDGETS = (512,)

DEFAULT_THRESHOLD = RetrievalConfig.correction_threshold

TASKS = (
    Task("passkey", "qwen", _QWEN, 4096, 20, needles.passkey_in_novel, ("passkey",)),
    Task("passkey", "qwen", _QWEN, 8192, 10, needles.passkey_in_novel, ("passkey",)),
    Task("passkey", "gemma3", _GEMMA3, 4096, 20, needles.passkey_in_novel, ("passkey",)),
    Task("passkey", "gemma3", _GEMMA3, 16384, 10, needles.passkey_in_novel, ("passkey",)),
    Task("lookup", "qwen", _QWEN, 4096, 20, needles.key_value_lookup),
    Task("copy", "smollm2", _SMOLLM2, 2048, 16, forced.second_copy, ("control",)),
    Task("copy", "qwen", _QWEN, 4096, 16, forced.second_copy, ("control",)),
    Task(
        "novel", "smollm2", _SMOLLM2, 4096, 8, forced.novel, ("covering", "control", "speculation")
    ),
)
"""The tasks of the full benchmark."""

QUICK_TASKS = (
    Task("sentences", "smollm2", _SMOLLM2, 2048, 6, needles.passkey_in_sentences, ("passkey",)),
    Task("copy", "smollm2", _SMOLLM2, 2048, 4, forced.second_copy, ("covering",)),
)
"""The quick tier, for every change's tests. Copying is judged at the covering budget alone: within
512 of 2K tokens, minima and maxima of pages find too few of the tokens to be copied."""


@dataclass(frozen=True)
class Variant:
    """One way of decoding, as options of a request to the retrieval engine."""

    name: str
    meaning: str
    options: dict[str, Any]
    """The request's ``kv_retrieval`` options."""

    engine: dict[str, Any] = field(default_factory=dict)
    """The engine's, where they are others than the defaults. Such a variant needs an engine and a
    prefill of its own, and runs only where it is asked for."""

    style: str = ""
    """Of its line in the plot, as matplotlib writes it; empty: it is not drawn."""

    @property
    def selects(self) -> bool:
        """Whether pages are selected, or sinks and window are all."""
        return "method" not in self.options

    @property
    def threshold(self) -> float | None:
        """Below this similarity a KV head selects anew; None where nothing is selected, or where
        more than the threshold differs from the default."""
        if self.engine or not self.selects:
            return None
        return self.options.get("correction_threshold", DEFAULT_THRESHOLD)


VARIANTS = (
    Variant("freekv", "speculative retrieval with correction", {}, style="o-"),
    Variant(
        "every_step",
        "selection at every step (threshold 1)",
        {"correction_threshold": 1.0},
        style="s--",
    ),
    Variant("threshold_0.8", "fewer heads select anew", {"correction_threshold": 0.8}),
    Variant("threshold_0.7", "fewer still", {"correction_threshold": 0.7}),
    Variant(
        "reuse",
        "no correction: always the previous step's selection (threshold -1)",
        {"correction_threshold": -1.0},
        style="^-.",
    ),
    Variant("summary_8", "freekv, 8 tokens per entry of the index", {}, {"summary_size": 8}, "d-."),
    Variant("page_16", "freekv, pages of 16 tokens", {}, {"page_size": 16}, "v-."),
    Variant(
        "sink_window", "sinks and window alone, the control", {"method": "streamingllm"}, style="x:"
    ),
)

EXTRA = tuple(variant.name for variant in VARIANTS if variant.engine)

FULL = Variant("full", "stock vLLM, full attention", {})


@dataclass(frozen=True)
class Cell:
    """One figure of the benchmark: a task under one variant at one budget."""

    task: Task
    variant: Variant
    budget: int
    covering: bool = False
    """The budget covers the whole context."""

    @property
    def name(self) -> str:
        """What the cell is stored under; one per task, variant and budget."""
        return f"{self.task.name}/{self.variant.name}/{'all' if self.covering else self.budget}"

    @property
    def options(self) -> dict[str, Any]:
        """The request's ``kv_retrieval`` options."""
        return {"budget": self.budget, **self.variant.options}


def cells_of(
    task: Task, budgets: tuple[int, ...], covering_budget: int, also: Collection[str]
) -> list[Cell]:
    """Return the cells to be computed for one task.

    Args:
        task: the task.
        budgets: budgets in tokens.
        covering_budget: a budget that covers the longest context, for tasks that run one.
        also: names of `EXTRA` variants to run.
    """
    variants = [v for v in VARIANTS if not v.engine or v.name in also]
    cells = [Cell(task, variant, budget) for variant in variants for budget in budgets]
    if "covering" in task.checks:
        cells.append(Cell(task, VARIANTS[0], covering_budget, covering=True))
    return cells


def with_model(tasks: tuple[Task, ...], model: Path) -> tuple[Task, ...]:
    """Return the tasks put to another model (each kind of task and context once)."""
    unique = {(task.what, task.context): task for task in tasks}
    return tuple(replace(task, label=model.name, model=model) for task in unique.values())
