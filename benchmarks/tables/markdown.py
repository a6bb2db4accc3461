"""Cells and rows of Markdown tables, and the result files that they are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import build

Results = Mapping[str, Mapping[str, Any]]
"""Result files by name, in the order in which the page names them."""

Options = Mapping[str, str]
"""Options of the table on the page, such as ``budgets=256,1024``."""

CELL = re.compile(r"(?<!\\)\|")
"""Where a cell of a table ends."""

LOST = frozenset({"8b667726f", "9efe6839e", "a1e572657", "e39cde5bb", "e8dfed486"})
"""Builds of result files whose commits are in no history of this repository."""


def read_results(names: Iterable[str], directory: Path) -> Results:
    """Read result files; an `OSError` says that one is absent."""
    return {name: json.loads((directory / name).read_text()) for name in names}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, its last line ended."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def listed(options: Options, name: str) -> list[str]:
    """Return the values of an option: ``budgets=256,1024`` gives two."""
    return options[name].split(",")


def ratio(value: float) -> str:
    """Return a speed-up: 2.31x."""
    return f"{value:.2f}x"


def percent(share: float, digits: int = 1) -> str:
    """Return a share of 0 to 1 in percent."""
    return f"{100 * share:.{digits}f} %"


def significant(value: float) -> str:
    """Return a number with three significant digits, without an exponent."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def builds(store: Mapping[str, Any], cells: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the builds of cells of a result file, the file's own first; none if it names none.

    A cell names its build where that is not the file's: a file may be completed by a later run.
    Commits whose package has the same code are one build: see `benchmarks.build`.
    """
    own = store.get("build")
    found = [each for cell in cells if (each := cell.get("build") or own)]
    found = [own if own and build.same(each, own) else each for each in found]
    found.sort(key=lambda each: each is not own)
    return list(dict.fromkeys(map(_name, found)))


def _name(found: Mapping[str, Any]) -> str:
    lost = " that is in no history" if found["commit"] in LOST else ""
    return f"{found['commit']}{lost}{' with changes' if found.get('dirty') else ''}"


def source(store: Mapping[str, Any]) -> str:
    """Return a sentence on a result file: its command, builds, day and machine."""
    machine, cells = store["machine"], store.get("cells") or [{}]
    found = builds(store, cells.values() if isinstance(cells, Mapping) else cells)
    commit = f"build{'s' * (len(found) > 1)} {', '.join(found)}, " if found else ""
    sets = [name for flag, name in _SETS.items() if flag in machine["isa"]]
    dtype = store.get("settings", {}).get("dtype", "auto")
    dtype = "" if dtype == "auto" else f"{dtype}, "
    where = (
        f"{machine['cores']} cores of an {machine['cpu']} with {sets[-1] if sets else 'no AVX2'}"
    )
    return f"`{store['command']}` ({commit}{store['date'][:10]}, {dtype}{where})"


_SETS = {
    "avx2": "AVX2 only",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX",
}
"""Flags of a CPU in the order of what they add, and the words for a CPU whose last one it is."""
