"""Tables of servers under load: results of `benchmarks.serving load`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables.markdown import Options, Results, listed, markdown, significant

ASKED = {"shared": "about one document", "new": "about a document each"}
WORST = "90"
"""The percentile of requests that have to be within a limit."""


def load(results: Results, options: Options) -> str:
    """What clients see: a row per number of requests at once, a column per server.

    The option ``figure`` names a figure of a cell; where it has percentiles, the median and, in
    parentheses, the 99th are shown.
    """
    (store,) = results.values()
    cells, lanes = _read(store, options)
    rows = [
        [ASKED[kind], str(at_once), *(_shown(of[lane][options["figure"]]) for lane in lanes)]
        for (kind, at_once), of in cells.items()
    ]
    return markdown(["requests", "at once", *lanes], rows)


def within(results: Results, options: Options) -> str:
    """How many requests at once get a token within a limit: a row per server, a column per limit.

    Limits are in ms; nine of ten requests have to be within one, on average over their tokens. As
    many wait for their first token at most as long as stands beside the number.
    """
    (store,) = results.values()
    cells, lanes = _read(store, options)
    shared = {at_once: of for (kind, at_once), of in cells.items() if kind == "shared"}
    limits, rows = listed(options, "limits"), []
    for lane in lanes:
        found = []
        for limit in map(float, limits):
            held = [n for n, of in shared.items() if of[lane]["token_ms"][WORST] <= limit]
            if most := max(held, default=0):
                first = significant(shared[most][lane]["first_token_ms"][WORST] / 1000)
                found.append(f"{most}{' or more' * (most == max(shared))}; {first} s")
            else:
                found.append("none")
        rows.append([lane, *found])
    return markdown(["server", *(f"within {limit} ms" for limit in limits)], rows)


def _read(
    store: Mapping[str, Any], options: Options
) -> tuple[dict[tuple[str, int], dict[str, Mapping[str, Any]]], Sequence[str]]:
    """The cells of one generator, by kind and number of requests and then by server."""
    cells = dict[tuple[str, int], dict[str, Mapping[str, Any]]]()
    for cell in store["cells"]:
        if cell["generator"] == options.get("generator", "vllm"):
            cells.setdefault((cell["kind"], cell["at_once"]), {})[cell["lane"]] = cell
    return cells, store["settings"]["lanes"]


def _shown(value: float | Mapping[str, float]) -> str:
    if isinstance(value, Mapping):
        return f"{significant(value['50'])} ({significant(value['99'])})"
    return significant(value)
