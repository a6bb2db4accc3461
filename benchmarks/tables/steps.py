"""Tables of decode steps: results of `benchmarks.serving decode`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.serving import report
from benchmarks.tables.markdown import Options, Results, builds, listed, markdown, ratio

Cell = dict[str, Any]
FULL = "full"
GIB = 1 << 30


def steps(results: Results, options: Options) -> str:
    """Decode steps by context and batch: a column of vLLM alone and of a method for each file."""
    by_file = {name: _by_size(store) for name, store in results.items()}
    header = ["context", "batch"]
    for cells in by_file.values():
        header += ["vLLM alone, ms"]
        names = _methods(cells)
        for name in names:
            header += [f"{name}, ms", "speed-up (min..max)", *["over full"] * _beats(name, names)]
    sizes = sorted({size for cells in by_file.values() for size in cells})
    rows = []
    for batch, context in sizes:
        row = [f"{context:,}", str(batch)]
        for cells in by_file.values():
            cell, names = cells.get((batch, context)), _methods(cells)
            if cell is None:
                row += [""] * (1 + sum(2 + _beats(name, names) for name in names))
                continue
            row.append(_stock_ms(cell))
            for name in names:
                row += _figures(cell, name)
                if _beats(name, names):
                    over = report.ratios(cell, name, FULL)
                    row.append(ratio(statistics.median(over)))
        rows.append(row)
    return markdown(header, rows)


def first(results: Results, options: Options) -> str:
    """Time to the first token of a prompt by context: a column of vLLM alone, and of each method.

    ``name=label`` among the options calls a method by another name.
    """
    (store,) = results.values()
    cells = sorted(_by_size(store).items())
    names = _methods(dict(cells))
    header = ["context", "vLLM alone, s"]
    for name in names:
        header += [f"{options.get(name, name).replace('_', ' ')}, s", "speed-up"]
    rows = []
    for (_, context), cell in cells:
        stock, *others = (
            statistics.median(cell["engines"][name]["first_token_s"])
            for name in (report.pair(cell)[0], *names)
        )
        row = [f"{context:,}", f"{stock:.1f}"]
        for seconds in others:
            row += [f"{seconds:.1f}", ratio(stock / seconds)]
        rows.append(row)
    return markdown(header, rows)


def tokens(results: Results, options: Options) -> str:
    """First tokens and further ones of a run whose prompts were read: a row per context.

    Of a run that has noted it the last row has the workers' memory, after the longest context.
    """
    (store,) = results.values()
    cells = sorted(_by_size(store).items())
    (name,) = _methods(dict(cells))
    header = ["context", "first token: vLLM alone, s", f"{name}, s", "speed-up"]
    header += ["further tokens: vLLM alone, ms", f"{name}, ms", "speed-up (min..max)"]
    rows = []
    for (_, context), cell in cells:
        stock, own = (
            statistics.median(cell["engines"][each]["first_token_s"])
            for each in (report.pair(cell)[0], name)
        )
        times = [f"{stock:.1f}", f"{own:.1f}", ratio(stock / own)]
        rows.append([f"{context:,}", *times, _stock_ms(cell), *_figures(cell, name)])
    memory = [engine.get("memory") for engine in store["engines"].values()]
    if all(memory):
        header += ["memory: vLLM alone, GiB", f"{name}, GiB"]
        sizes = [f"{(each['own'] + each['mapped']) / GIB:.1f}" for each in memory]
        rows = [[*row, *(sizes if row is rows[-1] else [""] * len(sizes))] for row in rows]
    return markdown(header, rows)


def methods(results: Results, options: Options) -> str:
    """Decode steps of several methods at one ``context``: a row for each method of a file.

    A row names its build: only rows of one build can be compared.
    """
    context = int(options["context"])
    batches = [int(batch) for batch in listed(options, "batches")]
    header = ["method", "build"]
    for batch in batches:
        header += [f"batch {batch}: vLLM alone, ms", "with it, ms", "speed-up (min..max)"]
    rows = []
    for store in results.values():
        cells = _by_size(store)
        for name in _methods(cells):
            found = [cells.get((batch, context)) for batch in batches]
            orders = [{"build": each} for cell in found if cell for each in cell["builds"]]
            row = [name, ", ".join(builds(store, orders))]
            for cell in found:
                if cell is None:
                    row += [""] * 3
                else:
                    row += [_stock_ms(cell), *_figures(cell, name)]
            rows.append(row)
    return markdown(header, rows)


def parts(results: Results, options: Options) -> str:
    """Parts of a profiled decode step at one ``context`` and ``batch``: a column for each file."""
    size = int(options["batch"]), int(options["context"])
    columns = {}
    for store in results.values():
        cell = _by_size(store)[size]
        name = report.pair(cell)[1]
        columns[name] = cell["engines"][name]["profile_ms"]
    names = list(next(iter(columns.values())))
    rows = [[name, *(f"{column[name]:.1f}" for column in columns.values())] for name in names]
    return markdown([f"ms of a step at {size[1]:,}, batch {size[0]}", *columns], rows)


def _by_size(store: Any) -> dict[tuple[int, int], Cell]:
    return {(cell["batch"], cell["context"]): cell for cell in report.pooled(store["cells"])}


def _methods(cells: dict[tuple[int, int], Cell]) -> list[str]:
    """Names of what was measured beside vLLM alone."""
    return [*next(iter(cells.values()))["engines"]][1:]


def _beats(name: str, names: list[str]) -> bool:
    """Whether a method is compared with full attention by our own kernel, too."""
    return FULL in names and name != FULL


def _stock_ms(cell: Cell) -> str:
    """Milliseconds of vLLM alone."""
    return f"{report.step_ms(cell, report.pair(cell)[0]):.1f}"


def _figures(cell: Cell, name: str) -> list[str]:
    """Milliseconds of a method, and the speed-up with its least and its most."""
    stock, first = report.pair(cell)
    ups = sorted(1 / each for each in report.ratios(cell, stock, name))
    middle = 1 / cell["decode_ratio"] if name == first else statistics.median(ups)
    limits = f"({ups[0]:.2f}..{ups[-1]:.2f})"
    return [f"{report.step_ms(cell, name):.1f}", f"{ratio(middle)} {limits}"]
