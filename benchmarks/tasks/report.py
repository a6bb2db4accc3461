"""Shows the results: a table, the criteria, and a plot of accuracy against cache read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tasks.base import Task
from benchmarks.tasks.catalogue import FULL, VARIANTS
from benchmarks.tasks.criteria import Criterion, Figures


def table(tasks: Sequence[Task], budgets: Sequence[int], cells: Figures) -> str:
    """Return the results as text: a block per task, a row per variant, a column per budget.

    Beside every figure stands how many of the KV heads selected anew before attention.
    """
    lines = ["corr: KV heads that selected anew before attention, of all in the steps over budget"]
    for task in tasks:
        full = cells[f"{task.name}/full/all"]
        lines.append(f"{task.name}: {full['samples']} samples, full attention {_figure(full)}")
        columns = [str(budget) for budget in sorted(budgets)]
        if "covering" in task.checks:
            columns.append("all")
        rows = [["budget", *columns], ["KV cache read", *_shares(task, columns, cells)]]
        for variant in VARIANTS:
            found = [cells.get(f"{task.name}/{variant.name}/{column}") for column in columns]
            if any(found):
                rows.append([variant.name, *(_figure(cell) if cell else "-" for cell in found)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 1)]
        for row in rows:
            cells_text = (text.rjust(width) for text, width in zip(row, widths, strict=True))
            lines.append("  " + "  ".join(cells_text))
        lines.append("")
    return "\n".join(lines)


def _figure(cell: Any) -> str:
    corrected = cell.get("corrected_share")
    share = "" if corrected is None else f" corr {corrected:.0%}"
    if "accuracy" in cell:
        return f"{cell['accuracy']:.0%}{share}"
    agreement, perplexity = f"agr {cell['agreement']:.1%}", f"ppl {cell['perplexity']:.2f}"
    if cell["variant"] == FULL.name:
        return perplexity
    return f"KL {cell['kl']:.4f} {agreement} {perplexity}{share}"


def _shares(task: Task, columns: Sequence[str], cells: Figures) -> list[str]:
    return [f"{cells[f'{task.name}/freekv/{column}']['share']:.1%}" for column in columns]


def verdicts(criteria: Sequence[Criterion]) -> str:
    """Return the list of criteria with PASS, FAIL or, where a task cannot tell, SKIP."""
    words = {True: "PASS", False: "FAIL", None: "SKIP"}
    width = max((len(criterion.text) for criterion in criteria), default=0)
    return "\n".join(
        f"{words[criterion.passed]}  {criterion.text.ljust(width)}  {criterion.figures}"
        for criterion in criteria
    )


def plot(path: Path, tasks: Sequence[Task], budgets: Sequence[int], cells: Figures) -> None:
    """Write a PNG: one panel per task, accuracy (or KL) against the share of the cache read."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.4 * rows), squeeze=False, layout="constrained"
    )
    for panel, task in zip(axes.flat, tasks, strict=False):
        _panel(panel, task, sorted(budgets), cells)
    for panel in axes.flat[len(tasks) :]:
        panel.set_axis_off()
    axes.flat[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(panel: Any, task: Task, budgets: Sequence[int], cells: Figures) -> None:
    full = cells[f"{task.name}/full/all"]
    needle = "accuracy" in full
    for variant in filter(lambda variant: variant.style, VARIANTS):
        names = [f"{task.name}/{variant.name}/{budget}" for budget in budgets]
        points = [cells[name] for name in names if name in cells]
        if not points:
            continue
        shares = [100 * point["share"] for point in points]
        values = [100 * point["accuracy"] if needle else point["kl"] for point in points]
        panel.plot(shares, values, variant.style, label=variant.name)
    panel.set_title(f"{task.name} ({full['samples']} samples)", fontsize=10)
    panel.set_xlabel("KV cache read, %")
    if needle:
        panel.axhline(100 * full["accuracy"], color="grey", linewidth=0.8, label=FULL.name)
        panel.set_ylim(-5, 105)
        panel.set_ylabel("answers found, %")
    else:
        panel.set_yscale("log")
        panel.set_ylabel("KL to full attention")
    panel.grid(alpha=0.3)
