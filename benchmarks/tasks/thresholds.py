"""Correction thresholds of freekv: their cost in accuracy, and the waiting that they save."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import build
from benchmarks.tasks.base import Task
from benchmarks.tasks.catalogue import VARIANTS
from benchmarks.tasks.criteria import Figures
from vllm_kvretrieval.options.table import DEFAULT_THRESHOLD

EVERY_STEP = 1.0
_VARIANTS = {v.threshold: v.name for v in VARIANTS if v.threshold is not None}
THRESHOLDS = sorted(_VARIANTS, reverse=True)
_WORDS = {EVERY_STEP: " (every step)", DEFAULT_THRESHOLD: " (default)", -1.0: " (reuse)"}


@dataclass(frozen=True)
class Waits:
    """What decoding from disk waits for, by threshold; from `benchmarks.slow_home steady`."""

    rows: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """Milliseconds per step and threshold, by size."""

    note: str = ""
    """What a reader has to know about them."""


def waits(steady: Mapping[str, Any] | None, mine: build.Build) -> Waits:
    """Read the waiting out of a result file.

    Args:
        steady: the file's content; None where there is none.
        mine: the build of the accuracy figures.
    """
    rows: dict[str, dict[float, float]] = {}
    for row in (steady or {}).get("rows", ()):
        if row.get("threshold") is not None:
            size = f"{row['context']:,} x {row['batch']}"
            rows.setdefault(size, {})[row["threshold"]] = row["waited_ms"]
    if steady is None or not rows:
        return Waits(note="ms waited: run `python -m benchmarks.slow_home steady`")
    theirs = steady.get("build")
    if build.same(mine, theirs):
        return Waits(rows)
    return Waits(rows, f"ms waited are of another build: {build.label(theirs)}")


def table(tasks: Sequence[Task], budgets: Sequence[int], cells: Figures, waited: Waits) -> str:
    """Return the comparison as text, a column per threshold; costs are means over budgets.

    Empty where there is nothing to compare: no threshold has been run beside that of every step.
    """
    names = [f"{task.name}/{{}}/{budget}" for task in tasks for budget in budgets]
    if not any(_pairs(names, t, cells) for t in THRESHOLDS if t != EVERY_STEP):
        return ""
    rows = [["threshold", *(f"{t:g}{_WORDS.get(t, '')}" for t in THRESHOLDS)]]
    rows.append(["KV heads corrected", *(_mean_share(names, t, cells) for t in THRESHOLDS)])
    for task in tasks:
        of_task = [f"{task.name}/{{}}/{budget}" for budget in budgets]
        needle = "accuracy" in cells[f"{task.name}/full/all"]
        unit = "points found less than" if needle else "KL above that"
        found = (_cost(of_task, t, cells, needle) for t in THRESHOLDS)
        rows.append([f"{unit} of every step, {task.name}", *found])
    for size, by_threshold in waited.rows.items():
        values = (by_threshold.get(t) for t in THRESHOLDS)
        shown = ("-" if value is None else f"{value:.2f}" for value in values)
        rows.append([f"ms waited per step on disk, {size}", *shown])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["which threshold? (costs: means over budgets)"]
    for first, *others in rows:
        right = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join(["", first.ljust(widths[0]), *right]))
    return "\n".join([*lines, *([f"  {waited.note}"] if waited.note else []), ""])


def _pairs(
    names: Sequence[str], threshold: float, cells: Figures
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Cells of a threshold beside those of every step, where both have been run."""
    named = [
        (name.format(_VARIANTS[threshold]), name.format(_VARIANTS[EVERY_STEP])) for name in names
    ]
    return [(cells[a], cells[b]) for a, b in named if a in cells and b in cells]


def _mean_share(names: Sequence[str], threshold: float, cells: Figures) -> str:
    found = [cell.get("corrected_share") for cell, _ in _pairs(names, threshold, cells)]
    known = [share for share in found if share is not None]
    return f"{statistics.fmean(known):.1%}" if known else "-"


def _cost(names: Sequence[str], threshold: float, cells: Figures, needle: bool) -> str:
    pairs = _pairs(names, threshold, cells)
    if not pairs:
        return "-"
    if needle:
        lost = statistics.fmean(every["accuracy"] - cell["accuracy"] for cell, every in pairs)
        return f"{100 * lost:+.1f}"
    return f"{statistics.fmean(cell['kl'] / every['kl'] - 1 for cell, every in pairs):+.1%}"
