"""Shows the results: tables of tasks and of indexes, criteria, accuracy against cache read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import build
from benchmarks.tasks.base import Task
from benchmarks.tasks.catalogue import FULL, OWN, VARIANTS, Variant
from benchmarks.tasks.criteria import Criterion, Figures

PLANNED_CONTEXT = 32768
"""The context of which the times of planning are."""


def table(tasks: Sequence[Task], budgets: Sequence[int], cells: Figures) -> str:
    """Return the results as text: a block per task, a row per variant, a column per budget.

    Beside the variants stands what they keep to select pages by, per token and KV head, and as a
    share of the KV cache; beside the figures of those that speculate, how many of the KV heads
    selected anew before attention.
    """
    lines = [
        "index: bytes kept per token and KV head, and as a share of keys and values in bfloat16",
        "corr: KV heads that selected anew before attention, of all in the steps over budget",
    ]
    for task in tasks:
        full = cells[f"{task.name}/full/all"]
        lines.append(f"{task.name}: {full['samples']} samples, full attention {_figure(full)}")
        columns = [str(budget) for budget in sorted(budgets)]
        if "covering" in task.checks:
            columns.append("all")
        rows = [["budget", "index", "", *columns]]
        rows.append(["KV cache read", "", "", *_shares(task, columns, cells)])
        for variant in VARIANTS:
            found = [cells.get(f"{task.name}/{variant.name}/{column}") for column in columns]
            if any(found):
                figures = (_figure(cell) if cell else "-" for cell in found)
                rows.append([variant.name, *_kept(found), *figures])
        lines += [*_aligned(rows), ""]
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, every column as wide as it has to be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _kept(found: Iterable[Any]) -> tuple[str, str]:
    """Bytes of a variant's index per token and KV head, and its share of the KV cache.

    They depend on the model's heads; the least and the most of them are shown.
    """
    known = [cell for cell in found if cell and cell.get("index_bytes") is not None]
    if not known:
        return "-", "-"
    counts = sorted({f"{cell['index_bytes']:.1f}" for cell in known}, key=float)
    shares = sorted({round(100 * cell["index_share"], 1) for cell in known})
    share = "-".join(f"{share:.1f}" for share in dict.fromkeys((shares[0], shares[-1])))
    return "-".join(dict.fromkeys((counts[0], counts[-1]))), f"{share}%"


@dataclass(frozen=True)
class Planning:
    """What selecting pages takes, by index; from `benchmarks.planning`."""

    us: Mapping[str, float] = field(default_factory=dict)
    """Microseconds per decode step of all layers, at `PLANNED_CONTEXT` and batch 1."""

    note: str = ""
    """What a reader has to know about them."""


def planning(stored: Mapping[str, Any] | None, mine: build.Build) -> Planning:
    """Read the times of planning out of a result file.

    Args:
        stored: the file's content; None where there is none.
        mine: the build of the accuracy figures.
    """
    us = {
        row["index"]: row["planning_us"]
        for row in (stored or {}).get("rows", ())
        if row.get("context", PLANNED_CONTEXT) == PLANNED_CONTEXT and row.get("batch", 1) == 1
    }
    if stored is None or not us:
        return Planning(note="us: run `python -m benchmarks.planning`")
    theirs = stored.get("build")
    if build.same(mine, theirs):
        return Planning(us)
    return Planning(us, f"us are of another build: {build.label(theirs)}")


def indexes(
    tasks: Sequence[Task], budgets: Sequence[int], cells: Figures, planned: Planning
) -> str:
    """Return the comparison of indexes as text: a row per index, the control first and the oracle
    last, all with selection at every step; KL or the share of answers found, by task and budget."""
    budgets = sorted(budgets)
    in_cells = {cell["variant"] for cell in cells.values()}
    variants = [v for v in VARIANTS if v.index and v.name in in_cells]
    order = {"none": 0, "exact": 2}
    variants.sort(key=lambda variant: order.get(variant.index, 1))
    columns = [
        _index_column(task, budgets, variants, cells)
        for task in tasks
        if any(f"{task.name}/{v.name}/{budget}" in cells for v in variants for budget in budgets)
    ]
    names = [v.name if v.name == v.index else f"{v.index} ({v.name})" for v in variants]
    kept = [_kept(cell for cell in cells.values() if cell["variant"] == v.name) for v in variants]
    times = [f"{planned.us[v.index]:.0f}" if v.index in planned.us else "-" for v in variants]
    rows = zip(
        ["", "index", *names, "mean_std to min_max"],
        ["of", "KV", *(share for _, share in kept), ""],
        ["us at", f"{PLANNED_CONTEXT >> 10}K", *times, ""],
        *columns,
        strict=True,
    )
    lines = [
        "which index? (selection at every step; KL, or answers found, by budget)",
        "of KV: what is kept, as a share of it; us: microseconds of planning per decode step",
    ]
    shown = [row for row in rows if any(text.strip(" -") for text in row[1:])]
    return "\n".join([*lines, *_aligned(shown), *([f"  {planned.note}"] * bool(planned.note)), ""])


def _index_column(
    task: Task, budgets: Sequence[int], variants: Sequence[Variant], cells: Figures
) -> list[str]:
    """One task's column of `indexes`, all budgets side by side."""

    def cell_of(name: str, budget: int) -> Any:
        return cells.get(f"{task.name}/{name}/{budget}")

    def figure(name: str, budget: int) -> str:
        cell = cell_of(name, budget)
        if cell is None:
            return "-"
        return f"{cell['accuracy']:.0%}" if "accuracy" in cell else f"{cell['kl']:.4f}"

    def beside(budget: int) -> str:
        one, other = cell_of("mean_std", budget), cell_of("every_step", budget)
        if one is None or other is None:
            return "-"
        if "accuracy" in one:
            return f"{100 * (one['accuracy'] - other['accuracy']):+.0f}"
        return f"{one['kl'] / other['kl']:.2f}x" if other["kl"] > 0 else "-"

    rows = [
        [str(budget) for budget in budgets],
        *([figure(variant.name, budget) for budget in budgets] for variant in variants),
        [beside(budget) for budget in budgets],
    ]
    return [task.name, *(" ".join(text.rjust(6) for text in row) for row in rows)]


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
    return [f"{cells[f'{task.name}/{OWN}/{column}']['share']:.1%}" for column in columns]


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
    _plot(path, tasks, lambda panel, task: _panel(panel, task, sorted(budgets), cells))


def plot_indexes(path: Path, tasks: Sequence[Task], budgets: Sequence[int], cells: Figures) -> bool:
    """Write a PNG: one panel per task, accuracy (or KL) against what an index keeps.

    Returns:
        Whether there is anything to compare: some index beside those that always run.
    """
    ran = {cell["variant"] for cell in cells.values()}
    compared = [v for v in VARIANTS if v.index and v.name in ran]
    if all("core" in variant.groups for variant in compared):
        return False
    _plot(path, tasks, lambda panel, task: _index_panel(panel, task, budgets, compared, cells))
    return True


def _plot(path: Path, tasks: Sequence[Task], draw: Callable[[Any, Task], None]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.4 * rows), squeeze=False, layout="constrained"
    )
    for panel, task in zip(axes.flat, tasks, strict=False):
        draw(panel, task)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(tasks) :]:
        panel.set_axis_off()
    named = axes.flat[0].get_legend_handles_labels()
    figure.legend(*named, fontsize=8, loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _index_panel(
    panel: Any,
    task: Task,
    budgets: Sequence[int],
    compared: Sequence[Variant],
    cells: Figures,
) -> None:
    """A point per index and budget, all budgets of an index above each other."""
    full = cells[f"{task.name}/full/all"]
    for number, budget in enumerate(sorted(budgets)):
        shown = [(v, cells.get(f"{task.name}/{v.name}/{budget}")) for v in compared]
        found = [(v, cell) for v, cell in shown if cell and cell.get("index_share") is not None]
        shares = [100 * cell["index_share"] for _, cell in found]
        values = [_height(cell) for _, cell in found]
        panel.plot(shares, values, "osD^v"[number % 5], label=f"budget {budget}")
        for (variant, _), share, value in zip(found, shares, values, strict=True):
            panel.annotate(variant.name, (share, value), fontsize=5, rotation=30)
    panel.set_title(f"{task.name} ({full['samples']} samples)", fontsize=10)
    panel.margins(x=0.15)
    panel.set_xlabel("index, % of a 16-bit KV cache")
    _scale(panel, full)


def _height(cell: Mapping[str, Any]) -> float:
    return float(100 * cell["accuracy"] if "accuracy" in cell else cell["kl"])


def _scale(panel: Any, full: Mapping[str, Any]) -> None:
    """The figure on the vertical axis: answers found, or KL."""
    if "accuracy" in full:
        panel.axhline(100 * full["accuracy"], color="grey", linewidth=0.8, label=FULL.name)
        panel.set_ylim(-5, 105)
        panel.set_ylabel("answers found, %")
    else:
        panel.set_yscale("log")
        panel.set_ylabel("KL to full attention")


def _panel(panel: Any, task: Task, budgets: Sequence[int], cells: Figures) -> None:
    full = cells[f"{task.name}/full/all"]
    for variant in filter(lambda variant: variant.style, VARIANTS):
        names = [f"{task.name}/{variant.name}/{budget}" for budget in budgets]
        points = [cells[name] for name in names if name in cells]
        if not points:
            continue
        shares = [100 * point["share"] for point in points]
        values = [_height(point) for point in points]
        panel.plot(shares, values, variant.style, label=variant.name)
    panel.set_title(f"{task.name} ({full['samples']} samples)", fontsize=10)
    panel.set_xlabel("KV cache read, %")
    _scale(panel, full)
