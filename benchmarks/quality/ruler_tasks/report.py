"""Shows RULER's table in Markdown, the criterion, and what others have published."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks.quality.ruler_tasks.catalogue import (
    FULL,
    KNOWN,
    PUBLISHED,
    PUBLISHED_FULL,
    PUBLISHED_WHERE,
    RulerTask,
)
from benchmarks.quality.tasks.criteria import Criterion

ORACLE_LOSS = 1.0
"""Points; kvretrieval's mean is no further below the oracle's."""

_ROUNDING = 1e-9

Scores = Mapping[tuple[str, str, int | None], Mapping[str, Any]]
"""Cells by task, variant and budget in tokens; steps with full attention have no budget."""


def counts(task: RulerTask, cell: Mapping[str, Any]) -> bool:
    """Tell whether full attention's cell of a task makes the task count."""
    return cell["score"] > task.counts_above


def counted(tasks: Sequence[RulerTask], cells: Scores) -> list[RulerTask]:
    """Return the tasks that count, of those that full attention has answered."""
    return [
        task
        for task in tasks
        if (full := cells.get((task.name, FULL.name, None))) and counts(task, full)
    ]


def mean(
    tasks: Sequence[RulerTask], variant: str, budget: int | None, cells: Scores
) -> float | None:
    """Return a variant's mean over the tasks that count; None unless it has answered them all."""
    found = [cells.get((task.name, variant, budget)) for task in counted(tasks, cells)]
    scores = [cell["score"] for cell in found if cell is not None]
    return statistics.fmean(scores) if scores and len(scores) == len(found) else None


def table(tasks: Sequence[RulerTask], budgets: Sequence[int], cells: Scores) -> str:
    """Return the scores in points: a row per variant and budget, a column per task, the mean."""
    rows = [["preset", "budget", *(task.short for task in tasks), "mean"]]
    known = (variant.name for variant in (FULL, *KNOWN))
    names = dict.fromkeys([*known, *(variant for _, variant, _ in cells)])
    for name, budget in product(names, (None, *sorted(budgets))):
        found = [cells.get((task.name, name, budget)) for task in tasks]
        if any(found):
            scores = [cell["score"] if cell else None for cell in found]
            average = mean(tasks, name, budget, cells)
            first = [name, "all" if budget is None else f"{budget}"]
            rows.append([*first, *(_points(score) for score in [*scores, average])])
    return _markdown(rows)


def published(budgets: Sequence[int]) -> str:
    """Return the means that others have published, in points, a column per budget."""
    columns = sorted({budget for row in PUBLISHED for budget in row.by_budget} | set(budgets))
    rows = [["published", *(str(budget) for budget in columns), "full"]]
    for row in PUBLISHED:
        values = (_points(row.by_budget.get(budget)) for budget in columns)
        rows.append([row.name, *values, _points(PUBLISHED_FULL)])
    return f"{PUBLISHED_WHERE}\n\n{_markdown(rows)}"


def notes(tasks: Sequence[RulerTask], cells: Scores) -> list[str]:
    """Return what a reader of the table has to know."""
    answered = [task for task in tasks if (task.name, FULL.name, None) in cells]
    counting = counted(answered, cells)
    others = [task.short for task in answered if task not in counting]
    limits = " or ".join(f"{each:g}" for each in sorted({t.counts_above for t in answered}))
    over = f"{len(counting)} task{'s'[: len(counting) != 1]}"
    found = f"Means are over the {over} that full attention scores above {limits}"
    found += f" in{', so without ' if others else ''}{', '.join(others)}."
    lines = [found]
    if counting:
        samples = min(cells[task.name, FULL.name, None]["samples"] for task in counting)
        worth = 100 / samples / len(counting)
        lines.append(f"{samples} samples a task: one answer is worth {worth:.2f} points of a mean.")
    return lines


def criteria(tasks: Sequence[RulerTask], budgets: Sequence[int], cells: Scores) -> list[Criterion]:
    """Return the requirement at each budget: kvretrieval is within a point of the oracle."""
    found = []
    for budget in sorted(budgets):
        ours, oracle = (mean(tasks, name, budget, cells) for name in ("kvretrieval", "oracle"))
        if ours is None or oracle is None:
            continue
        found.append(
            Criterion(
                f"RULER: budget {budget}, kvretrieval within {ORACLE_LOSS:g} point of the oracle",
                f"kvretrieval {ours:.1f}, oracle {oracle:.1f}, {ours - oracle:+.1f}",
                ours >= oracle - ORACLE_LOSS - _ROUNDING,
            )
        )
    return found


def _points(score: float | None) -> str:
    return "-" if score is None else f"{score:.1f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that reads well as text, too: names to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        right = (text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))
        lines.append(f"| {' | '.join([row[0].ljust(widths[0]), *right])} |")
    return "\n".join(lines)
