"""Tables of what fits in a machine: results of `benchmarks.serving fits`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Options, Results, markdown

GIB = 1 << 30


def contexts(results: Results, options: Options) -> str:
    """What models and contexts take: a row per context, in GiB; weights stand in the first."""
    (store,) = results.values()
    rows = []
    for name, model in store["models"].items():
        taken = [_gib(each["weights"]) for each in model["weights"].values()]
        first = [name, *taken]
        for size in model["contexts"]:
            parts = (_gib(size[part]) for part in ("kv", "index", "device", "disk", "file"))
            rows.append([*first, f"{size['context']:,}", *parts])
            first = [""] * len(first)
    some = next(iter(store["models"].values()))
    header = ["model", *(f"weights, {_code(name)}" for name in some["weights"]), "context"]
    header += ["KV cache", "page index", "`device`: memory", "`disk`: memory", "file"]
    return markdown(header, rows)


def machines(results: Results, options: Options) -> str:
    """The longest contexts that machines hold: a row per model and precision of its weights."""
    (store,) = results.values()
    rows, gibs = [], store["settings"]["machines"]
    for name, model in store["models"].items():
        first = [name, f"{model['longest']:,}"]
        for weights in model["weights"]:
            cells = [
                cell
                for row in model["machines"]
                if row["weights"] == weights
                for cell in _held(row, model["longest"])
            ]
            rows.append([*first, _code(weights), *cells])
            first = ["", ""]
    header = ["model", "tokens", "weights"]
    header += [f"{gib} GiB, `{home}`" for gib in gibs for home in ("device", "disk")]
    return markdown(header, rows)


def _held(row: Mapping[str, Any], longest: int) -> list[str]:
    """The cells of one machine: tokens in memory; from disk, with GiB of memory and of the file."""
    if not row["starts"]:
        return ["no start"] * 2
    memory, disk = (_tokens(row[home], longest) for home in ("device", "disk"))
    sizes = f" ({_gib(row['fast'])} + {_gib(row['file'])})" if row["disk"] else ""
    return [memory, disk + sizes]


def _tokens(tokens: int, longest: int) -> str:
    return "all" if tokens == longest else f"{tokens:,}" if tokens else "none"


def _code(weights: str) -> str:
    return weights if " " in weights else f"`{weights}`"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
