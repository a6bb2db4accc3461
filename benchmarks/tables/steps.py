"""Tables of decode steps: results of `benchmarks.decode`."""

from __future__ import annotations

from typing import Any

from benchmarks import decode_report
from benchmarks.tables.markdown import Options, Results, listed, markdown, ratio

Cell = dict[str, Any]


def steps(results: Results, options: Options) -> str:
    """Decode steps by context and batch: a column of vLLM alone and of a method for each file."""
    by_file = {name: _by_size(store) for name, store in results.items()}
    header = ["context", "batch"]
    for cells in by_file.values():
        _, method = decode_report.pair(next(iter(cells.values())))
        header += ["vLLM alone, ms", f"{method}, ms", "speed-up (min..max)"]
    sizes = sorted({size for cells in by_file.values() for size in cells})
    rows = []
    for batch, context in sizes:
        row = [f"{context:,}", str(batch)]
        for cells in by_file.values():
            row += _figures(cells.get((batch, context)), with_range=True)
        rows.append(row)
    return markdown(header, rows)


def methods(results: Results, options: Options) -> str:
    """Decode steps of several methods at one ``context``: a row for each file."""
    context = int(options["context"])
    batches = [int(batch) for batch in listed(options, "batches")]
    header = ["method"]
    for batch in batches:
        header += [f"batch {batch}: vLLM alone, ms", "with it, ms", "speed-up"]
    rows = []
    for store in results.values():
        cells = _by_size(store)
        row = [decode_report.pair(next(iter(cells.values())))[1]]
        for batch in batches:
            row += _figures(cells.get((batch, context)), with_range=False)
        rows.append(row)
    return markdown(header, rows)


def parts(results: Results, options: Options) -> str:
    """Parts of a profiled decode step at one ``context`` and ``batch``: a column for each file."""
    size = int(options["batch"]), int(options["context"])
    columns = {}
    for store in results.values():
        cell = _by_size(store)[size]
        name = decode_report.pair(cell)[1]
        columns[name] = cell["engines"][name]["profile_ms"]
    names = list(next(iter(columns.values())))
    rows = [[name, *(f"{column[name]:.1f}" for column in columns.values())] for name in names]
    return markdown([f"ms of a step at {size[1]:,}, batch {size[0]}", *columns], rows)


def _by_size(store: Any) -> dict[tuple[int, int], Cell]:
    return {(cell["batch"], cell["context"]): cell for cell in decode_report.pooled(store["cells"])}


def _figures(cell: Cell | None, *, with_range: bool) -> list[str]:
    """Milliseconds of both engines and the speed-up; empty where nothing was measured."""
    if cell is None:
        return ["", "", ""]
    ups = sorted(1 / each for each in decode_report.decode_ratios(cell))
    limits = f" ({ups[0]:.2f}..{ups[-1]:.2f})" if with_range else ""
    times = [f"{decode_report.step_ms(cell, name):.1f}" for name in decode_report.pair(cell)]
    return [*times, ratio(1 / cell["decode_ratio"]) + limits]
