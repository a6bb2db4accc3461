"""The tasks of the accuracy benchmark, and its figures: a task under a variant at a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cli import GEMMA3, QWEN, SMOLLM2, SMOLLM2_32K
from benchmarks.quality.examples import Example
from benchmarks.quality.intensive import MAKERS
from benchmarks.quality.tasks import forced, needles
from benchmarks.quality.tasks.base import Task
from benchmarks.quality.tasks.variant import Variant
from vllm_kvretrieval.calibration.needles import passkey_in_text
from vllm_kvretrieval.calibration.samples import Sample, TokenText

BUDGETS = (256, 512, 1024)
QUICK_BUDGETS = (512,)

TASKS = (
    Task("passkey", "qwen", QWEN, 4096, 20, passkey_in_text, ("passkey",)),
    Task("passkey", "qwen", QWEN, 8192, 10, passkey_in_text, ("passkey",)),
    Task("passkey", "gemma3", GEMMA3, 4096, 20, passkey_in_text, ("passkey",)),
    Task("passkey", "gemma3", GEMMA3, 16384, 10, passkey_in_text, ("passkey",)),
    Task("lookup", "qwen", QWEN, 4096, 20, needles.key_value_lookup, ("oracle",)),
    Task("copy", "smollm2", SMOLLM2, 2048, 16, forced.second_copy, ("oracle", "control")),
    Task("copy", "qwen", QWEN, 4096, 16, forced.second_copy, ("oracle", "control")),
    Task(
        "novel",
        "smollm2",
        SMOLLM2,
        4096,
        8,
        forced.novel,
        ("covering", "oracle", "control", "speculation"),
    ),
    Task("turns", "smollm2", SMOLLM2, 4096, 4, forced.turns, ("oracle", "control")),
    Task("alike", "smollm2", SMOLLM2, 4096, 4, forced.alike, ("oracle", "control")),
)
"""The tasks of the full benchmark."""

MORE_TASKS = (
    Task("generation", "smollm2", SMOLLM2, 4864, 2, forced.generation),
    Task("novel", "smollm2_32k", SMOLLM2_32K, 8192, 2, forced.novel),
    Task("novel", "smollm2_32k", SMOLLM2_32K, 16384, 2, forced.novel),
    *(
        Task(name, label, model, context, 4, forced.answers(make))
        for name, make in MAKERS.items()
        for label, model in (("gemma3", GEMMA3), ("smollm2_32k", SMOLLM2_32K))
        for context in (2048, 4096)
    ),
)
"""Tasks that are run where they are asked for: thousands of steps, or a prompt of a minute and
more, per variant and budget, or those that need much of their prompts (see `intensive`)."""

QUICK_TASKS = (
    Task("sentences", "smollm2", SMOLLM2, 2048, 6, needles.passkey_in_sentences, ("found",)),
    Task("copy", "smollm2", SMOLLM2, 2048, 4, forced.second_copy, ("covering",)),
)
"""The quick tier, for every change's tests. Copying is judged at the covering budget alone."""


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
        """The key under which the cell is stored; one per task, variant and budget."""
        return f"{self.task.name}/{self.variant.name}/{'all' if self.covering else self.budget}"

    @property
    def options(self) -> dict[str, Any]:
        """The request's ``kv_retrieval`` options."""
        budget = {} if self.variant.whole else {"budget": self.budget}
        return {**budget, "method": self.variant.method, **self.variant.asks}


def cells_of(
    task: Task, budgets: Sequence[int], covering_budget: int, variants: Sequence[Variant]
) -> list[Cell]:
    """Return the cells to be computed for one task.

    Args:
        task: the task.
        budgets: budgets in tokens.
        covering_budget: a budget that covers the longest context, for tasks that run one.
        variants: variants to be run; the first also at the covering budget.
    """
    cells = [Cell(task, variant, budget) for variant in variants for budget in budgets]
    if "covering" in task.checks:
        cells.append(Cell(task, variants[0], covering_budget, covering=True))
    return cells


def also_of(cells: Iterable[Cell]) -> dict[str, Any]:
    """Return the option ``also`` of an engine that serves these cells and nothing else."""
    return {name: options for cell in cells for name, options in cell.variant.also.items()}


def of_examples(name: str, examples: Sequence[Example], model: Path, context: int) -> Task:
    """Return a task that forces the right answers of a file's examples.

    Args:
        name: Of the task.
        examples: Its examples.
        model: Directory of the checkpoint.
        context: Tokens of the longest one.
    """

    def build(text: TokenText, context: int, count: int) -> list[Sample]:
        return [forced.answer(text, example) for example in examples[:count]]

    return Task(name, model.name, model, context, len(examples), build)


def with_model(tasks: Sequence[Task], model: Path) -> tuple[Task, ...]:
    """Return the tasks put to another model (each kind of task and context once)."""
    unique = {(task.what, task.context): task for task in tasks}
    return tuple(replace(task, label=model.name, model=model) for task in unique.values())
