"""The table of `benchmarks.serving peers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Options, Results, markdown, significant

MIB = 1 << 20
HEADINGS = {
    "steps": "token at {}, ms",
    "first": "first token of {}, s",
    "memory": "memory at {}, MiB",
    "start_cold": "start, cold, s",
    "start_warm": "warm, s",
    "restart": "restart with {} saved, s",
    "passkey": "pass keys in {}",
}
"""Columns by figure, in their order; each has one per context."""


def _shown(cell: Mapping[str, Any]) -> str:
    if "reason" in cell:
        return str(cell["reason"])
    value, figure = cell["value"], cell["figure"]
    if figure == "memory":
        return f"{value / MIB:,.0f}"
    if figure == "passkey":
        return f"{value} of {cell['of']}"
    return significant(value)


def peers(results: Results, options: Options) -> str:
    """A row per engine and its options: times of tokens and starts, memory, pass keys found."""
    (store,) = results.values()
    cells = {(c["lane"], c["figure"], c["context"]): c for c in store["cells"]}
    lanes = dict.fromkeys(lane for lane, _, _ in cells)
    columns = sorted(
        {(figure, context) for _, figure, context in cells},
        key=lambda each: ([*HEADINGS].index(each[0]), each[1] or 0),
    )
    header = ["engine"]
    header += [HEADINGS[figure].format(f"{context or 0:,}") for figure, context in columns]
    rows = []
    for lane in lanes:
        found = [cells.get((lane, *column)) for column in columns]
        rows.append([lane, *(_shown(cell) if cell else "" for cell in found)])
    return markdown(header, rows)
