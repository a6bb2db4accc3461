"""One table of several result files, with confidence intervals: Markdown, CSV or LaTeX.

    python -m benchmarks.quality table benchmarks/results/ruler-apart.json
    python -m benchmarks.quality table FILE.json OTHER.json --against kvretrieval:512 --output t.tex

Of each variant and budget the table has the mean of every task, the mean of these, and its
difference from full attention, with what has a confidence of 95 % (see `intervals`). The difference
is that of each sample, which is far smaller than the difference of samples among each other; so it
is there where both have answered the same samples. CSV has the intervals of every task, too.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import write_text
from benchmarks.quality.intervals import LEVEL, Interval, interval
from benchmarks.tables.markdown import markdown, significant

Cell = Mapping[str, Any]

FULL = "full"


@dataclass(frozen=True)
class Measure:
    """What cells are compared by."""

    name: str
    meaning: str

    values: Callable[[Cell], Sequence[float] | None]
    """Of each sample; None: the cell has no such figures."""

    most: float
    """The largest value that there can be; the least is 0."""

    write: Callable[[float], str]


def _points(value: float) -> str:
    return f"{value:.1f}"


def _nats(value: float) -> str:
    return f"{'-' * (value < 0)}{significant(abs(value))}" if value else "0"


def _percent(name: str) -> Callable[[Cell], Sequence[float] | None]:
    return lambda cell: [100.0 * share for share in cell[name]] if name in cell else None


MEASURES = (
    Measure("score", "score, points", lambda cell: cell.get("scores"), 100.0, _points),
    Measure("found", "answers found, %", _percent("found"), 100.0, _points),
    Measure(
        "right",
        "values of the right answer, forced token by token, that the model finds likeliest, %",
        _percent("right_samples"),
        100.0,
        _points,
    ),
    Measure("kl", "KL from full attention, nats", lambda c: c.get("kl_samples"), math.inf, _nats),
    Measure(
        "nll",
        "negative log-probability of the right answer, nats per token",
        lambda cell: cell.get("nll_samples"),
        math.inf,
        _nats,
    ),
)


@dataclass(frozen=True)
class Row:
    """A variant at a budget; None: nothing is known, or there is a single sample."""

    variant: str
    budget: str

    tasks: Mapping[str, tuple[float, Interval | None, int]]
    """Mean, interval and samples."""

    mean: tuple[float, Interval | None] | None
    """Over all tasks; None: one is missing."""

    difference: tuple[float, Interval | None] | None
    """Of the mean, sample by sample, from the row that is compared with."""


@dataclass(frozen=True)
class Table:
    """The rows of one model and measure."""

    model: str
    measure: Measure
    against: str
    tasks: Sequence[str]
    rows: Sequence[Row]

    apart: bool
    """Whether each variant has had an engine of its own, with its own pages and dense layers."""


def tables(
    cells: Iterable[Cell], against: str = FULL, measures: Sequence[Measure] = MEASURES
) -> list[Table]:
    """Return a table per model and measure that cells have.

    Args:
        cells: Of the result files of `ruler` and `accuracy`.
        against: The variant that others are compared with, perhaps with ``:BUDGET``.
        measures: Those that are wanted.

    Raises:
        ValueError: No cell has such a measure, or none is of this variant.
    """
    by_model: dict[str, list[Cell]] = {}
    for cell in cells:
        by_model.setdefault(cell["model"], []).append(cell)
    found = [
        _table(model, measure, having, against)
        for model, of_model in by_model.items()
        for measure in measures
        if (having := [cell for cell in of_model if measure.values(cell) is not None])
    ]
    if not found:
        names = ", ".join(measure.name for measure in measures)
        raise ValueError(f"there are no cells with figures of samples ({names})")
    return found


def _table(model: str, measure: Measure, cells: Sequence[Cell], against: str) -> Table:
    rows: dict[tuple[str, str], dict[str, Cell]] = {}
    several = len({(cell["task"], cell["context"]) for cell in cells}) > len(
        {cell["task"] for cell in cells}
    )
    for cell in cells:
        budget = "all" if cell["budget"] is None else str(cell["budget"])
        task = f"{cell['task']} {cell['context']}" if several else cell["task"]
        rows.setdefault((cell["variant"], budget), {}).setdefault(task, cell)
    variant, _, budget = against.partition(":")
    if not (theirs := rows.get((variant, budget or "all"))):
        there = ", ".join(f"{name}:{tokens}" for name, tokens in rows)
        raise ValueError(f"--against {against}: no row of {model} is of it; there are: {there}")
    tasks = list(dict.fromkeys(task for row in rows.values() for task in row))
    counting = [task for task in tasks if all_have(rows.values(), task, theirs)]
    order = list(dict.fromkeys(name for name, _ in rows))
    keys = sorted(rows, key=lambda key: (key[0] != FULL, order.index(key[0]), _tokens(key[1])))
    made = [_row(key, rows[key], theirs, counting, measure) for key in keys]
    apart = all(cell.get("apart") for cell in cells if cell["variant"] != FULL)
    return Table(model, measure, against, tasks, made, apart)


def all_have(rows: Iterable[Mapping[str, Cell]], task: str, theirs: Mapping[str, Cell]) -> bool:
    """Tell whether a task is one of those that means are over: more than the reference has it."""
    return task in theirs and sum(task in row for row in rows) > 1


def _tokens(budget: str) -> float:
    return 0 if budget == "all" else int(budget)


def _row(
    key: tuple[str, str],
    cells: Mapping[str, Cell],
    theirs: Mapping[str, Cell],
    counting: Sequence[str],
    measure: Measure,
) -> Row:
    def values(cell: Cell) -> Sequence[float]:
        found = measure.values(cell)
        assert found is not None
        return found

    bounds = 0.0, measure.most
    alone = {task: interval([values(cell)], bounds) for task, cell in cells.items()}
    tasks = {
        task: (sum(values(cell)) / len(values(cell)), alone[task], len(values(cell)))
        for task, cell in cells.items()
    }
    mean = difference = None
    if counting and all(task in cells for task in counting):
        every = [values(cells[task]) for task in counting]
        mean = _mean(every), interval(every, bounds)
        same = all(
            cells[task].get("of_samples") is not None
            and cells[task]["of_samples"] == theirs[task].get("of_samples")
            for task in counting
        )
        if same and cells is not theirs:
            apart = [
                [ours - other for ours, other in zip(of, values(theirs[task]), strict=True)]
                for task, of in zip(counting, every, strict=True)
            ]
            difference = _mean(apart), interval(apart, (-measure.most, measure.most))
    return Row(*key, tasks, mean, difference)


def _mean(tasks: Sequence[Sequence[float]]) -> float:
    return sum(sum(values) / len(values) for values in tasks) / len(tasks)


def _shown(found: tuple[float, Interval | None] | None, table: Table, sign: bool = False) -> str:
    """A mean, and its interval in brackets."""
    if found is None:
        return "-"
    mean, within = found
    write = table.measure.write
    text = f"{'+' * (sign and mean > 0)}{write(mean)}"
    return text if within is None else f"{text} [{write(within.low)}, {write(within.high)}]"


def _header(table: Table) -> list[str]:
    return ["variant", "budget", *table.tasks, "mean", f"minus {table.against}"]


def _body(table: Table) -> list[list[str]]:
    rows = []
    for row in table.rows:
        of_tasks = [
            table.measure.write(row.tasks[task][0]) if task in row.tasks else "-"
            for task in table.tasks
        ]
        ends = _shown(row.mean, table), _shown(row.difference, table, sign=True)
        rows.append([row.variant, row.budget, *of_tasks, *ends])
    return rows


def _about(table: Table) -> str:
    counts = sorted({samples for row in table.rows for _, _, samples in row.tasks.values()})
    samples = "-".join(dict.fromkeys(map(str, (counts[0], counts[-1]))))
    engines = "an engine for each" if table.apart else "pages and dense layers shared by several"
    return (
        f"{table.model}: {table.measure.meaning}; {samples} samples a task; in brackets "
        f"{LEVEL:.0%} confidence; {engines}"
    )


def as_markdown(found: Sequence[Table]) -> str:
    """Return the tables in Markdown."""
    return "\n".join(f"{_about(t)}\n\n{markdown(_header(t), _body(t))}" for t in found)


def as_latex(found: Sequence[Table]) -> str:
    """Return the tables in LaTeX, which needs the package booktabs."""
    parts = []
    for table in found:
        lines = [" & ".join(map(_escaped, row)) + r" \\" for row in (_header(table), *_body(table))]
        about = _escaped(_about(table))
        columns = "ll" + "r" * (len(table.tasks) + 2)
        parts.append(
            "\n".join(
                [
                    f"% {about}",
                    rf"\begin{{tabular}}{{{columns}}}",
                    r"\toprule",
                    lines[0],
                    r"\midrule",
                    *lines[1:],
                    r"\bottomrule",
                    r"\end{tabular}",
                    "",
                ]
            )
        )
    return "\n".join(parts)


_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def as_csv(found: Sequence[Table]) -> str:
    """Return a line per task, variant and budget; the task ``mean`` is over the others."""
    file = io.StringIO()
    write = csv.writer(file, lineterminator="\n").writerow
    write("model measure task variant budget samples mean low high minus by by_low by_high".split())
    for table in found:
        for row in table.rows:
            first = [table.model, table.measure.name]
            for task, (mean, within, samples) in row.tasks.items():
                write([*first, task, row.variant, row.budget, samples, *_numbers(mean, within)])
            if row.mean is not None:
                by = ["", *_numbers(None, None)]
                if row.difference is not None:
                    by = [table.against, *_numbers(*row.difference)]
                of_mean = _numbers(*row.mean)
                write([*first, "mean", row.variant, row.budget, "", *of_mean, *by])
    return file.getvalue()


def _numbers(mean: float | None, within: Interval | None) -> list[str]:
    values = [mean, *((None, None) if within is None else (within.low, within.high))]
    return ["" if value is None else f"{value:.6g}" for value in values]


WRITERS = {".md": as_markdown, ".csv": as_csv, ".tex": as_latex}
"""By the ending of a file's name."""


def _file(text: str) -> Path:
    path = Path(text)
    if path.suffix not in WRITERS:
        raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(WRITERS)}")
    return path


def add_tables(parser: argparse.ArgumentParser, name: str = "--table") -> None:
    """Add ``--table``, or another name of the files to be written."""
    parser.add_argument(name, type=_file, nargs="+", default=[], metavar="FILE",
        help="to write results to, with confidence intervals: NAME.md, .csv or .tex")  # fmt: skip


def write_tables(files: Sequence[Path], cells: Iterable[Cell]) -> None:
    """Write the files of ``--table``, and say so."""
    if files:
        found = tables(cells)
        for path in files:
            write_text(path, WRITERS[path.suffix](found))
            print(f"table:   {path}")


def read_cells(paths: Sequence[Path]) -> list[Cell]:
    """Return the cells of result files.

    Where a file has a cell that an earlier one has, its variant is called after the file, too;
    full attention that has answered the same samples is taken from the first.

    Raises:
        ValueError: a file is no result file of `ruler` or `accuracy`.
    """
    found: dict[tuple[Any, ...], Cell] = {}
    for path in paths:
        try:
            stored = json.loads(path.read_text())["cells"].values()
            of_file = [{**cell, "budget": cell["budget"]} for cell in stored]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is no result file of `ruler` or `accuracy`") from None
        places = ("model", "context", "task", "variant", "budget")
        keys = {tuple(cell.get(place) for place in places) for cell in of_file}
        again = {key[3] for key in keys & found.keys()} - {FULL}
        for cell in of_file:
            if cell["variant"] in again:
                cell["variant"] = f"{cell['variant']} ({path.stem})"
            found.setdefault(tuple(cell.get(place) for place in places), cell)
    return [*found.values()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE.json", help="result files")
    add("--against", default=FULL, metavar="VARIANT[:BUDGET]", help="what others are compared with")
    names = [measure.name for measure in MEASURES]
    add("--measure", nargs="+", choices=names, default=names, metavar="NAME",
        help=f"of {', '.join(names)}")  # fmt: skip
    add_tables(parser, "--output")


def run(options: argparse.Namespace) -> int:
    """Print the tables, and write them."""
    measures = [measure for measure in MEASURES if measure.name in options.measure]
    found = tables(read_cells(options.files), options.against, measures)
    print(as_markdown(found))
    for path in options.output:
        write_text(path, WRITERS[path.suffix](found))
        print(f"table:   {path}")
    return 0
