"""Shows the results: a table of each task, and the criteria."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.quality.tasks.base import Task
from benchmarks.quality.tasks.criteria import Criterion, Figures
from benchmarks.quality.tasks.variant import OWN
from benchmarks.quality.tasks.variants import FULL, VARIANTS


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
        if f"{task.name}/{OWN}/{columns[0]}" in cells:
            rows.append(["attended to", "", "", *_shares(task, columns, cells)])
        of_cells = (cell["variant"] for cell in cells.values() if cell["variant"] != FULL.name)
        for name in dict.fromkeys([*(variant.name for variant in VARIANTS), *of_cells]):
            found = [cells.get(f"{task.name}/{name}/{column}") for column in columns]
            if any(found):
                figures = (_figure(cell) if cell else "-" for cell in found)
                rows.append([name, *_kept(found), *figures])
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


def _figure(cell: Any) -> str:
    corrected = cell.get("corrected_share")
    share = "" if corrected is None else f" corr {corrected:.0%}"
    if "accuracy" in cell:
        return f"{cell['accuracy']:.0%}{share}"
    agreement, perplexity = f"agr {cell['agreement']:.1%}", f"ppl {cell['perplexity']:.2f}"
    if right := cell.get("right_samples"):
        perplexity += f" right {sum(right) / len(right):.1%}"
    if cell["variant"] == FULL.name:
        return perplexity
    return f"KL {cell['kl']:.4f} {agreement} {perplexity}{share}"


def _shares(task: Task, columns: Sequence[str], cells: Figures) -> list[str]:
    found = [cells.get(f"{task.name}/{OWN}/{column}") for column in columns]
    return [f"{cell['share']:.1%}" if cell else "-" for cell in found]


def verdicts(criteria: Sequence[Criterion]) -> str:
    """Return the list of criteria with PASS, FAIL or, where a task cannot tell, SKIP."""
    words = {True: "PASS", False: "FAIL", None: "SKIP"}
    width = max((len(criterion.text) for criterion in criteria), default=0)
    return "\n".join(
        f"{words[criterion.passed]}  {criterion.text.ljust(width)}  {criterion.figures}"
        for criterion in criteria
    )
