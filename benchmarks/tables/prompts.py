"""Tables of prompts: `benchmarks.ops`, `benchmarks.quality prefill`, and of observation."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.tables.markdown import Options, Results, markdown, percent, ratio

SHAPES = {
    "smollm2-135m": "9 heads of 64 channels, 3 KV heads",
    "qwen2.5-0.5b": "14 of 64, 2 KV heads",
    "llama-3.1-8b": "32 of 128, 8 KV heads",
}
"""Words for the shapes of `benchmarks.ops prompt-attention`."""

DTYPES = ("float32", "bfloat16", "float16")


def kernels(results: Results, options: Options) -> str:
    """Attention of prompts, vLLM's kernel and ours: rows per shape, columns for each file."""
    header, columns = ["heads", "element"], []
    for store in results.values():
        isa = store["settings"]["isa"]
        header += [f"{isa}: vLLM, ns per logit", "ours", "speed-up"]
        found: dict[tuple[str, str], list[Any]] = {}
        for row in store["rows"]:
            found.setdefault((row["shape"], row["dtype"]), []).append(row)
        columns.append(found)
    rows = []
    for shape, dtype in dict.fromkeys(key for column in columns for key in column):
        row = [SHAPES.get(shape, shape), dtype]
        for column in columns:
            cases = column.get((shape, dtype), [])
            row += [_span(case[key] for case in cases) for key in ("vllm_ns", "own_ns", "ratio")]
        rows.append(row)
    return markdown(header, rows)


def ratios(results: Results, options: Options) -> str:
    """How many times as fast as vLLM's our kernel reads prompts at least: a row per file.

    vLLM's reads the same pages, where that was measured.
    """
    rows = []
    for store in results.values():
        least: dict[str, float] = {}
        for row in store["rows"]:
            if row["chunk"] > 1:
                found = row.get("ratio_in_pages", row["ratio"])
                least[row["dtype"]] = min(found, least.get(row["dtype"], found))
        cells = (f"{least[dtype]:.2f}" if dtype in least else "" for dtype in DTYPES)
        rows.append([store["settings"]["isa"], *cells])
    return markdown(["kernels for", *DTYPES], rows)


def _span(values: Iterable[float]) -> str:
    """The least and the most of several cases; nothing of none."""
    found = sorted(values)
    if not found:
        return ""
    least, most = f"{found[0]:.2f}", f"{found[-1]:.2f}"
    return least if least == most else f"{least} to {most}"


def decode(results: Results, options: Options) -> str:
    """Single tokens over whole contexts: rows per shape, columns for each file."""
    header, columns = ["heads", "element"], []
    for store in results.values():
        isa = store["settings"]["isa"]
        header += [f"{isa}: speed-up", "ours, GB/s", "in rows, GB/s", "a plain read, GB/s"]
        columns.append({(row["shape"], row["dtype"]): row for row in store["rows"]})
    rows = []
    for shape, dtype in dict.fromkeys(key for column in columns for key in column):
        cells = [SHAPES.get(shape, shape), dtype]
        for column in columns:
            if row := column.get((shape, dtype)):
                cells += [ratio(row["ratio"])]
                read = (row.get(f"{kind}_gb_per_s") for kind in ("own", "rows", "read"))
                cells += ["" if speed is None else f"{speed:.1f}" for speed in read]
            else:
                cells += ["", "", "", ""]
        rows.append(cells)
    return markdown(header, rows)


def layers(results: Results, options: Options) -> str:
    """A layer's attention with sparse prefill: rows per context, columns per budget."""
    (store,) = results.values()
    by_size = {(row["context"], row["budget"]): row for row in store["rows"]}
    contexts, budgets = (sorted(set(column)) for column in zip(*by_size, strict=True))
    rows = []
    for context in contexts:
        found = [by_size[context, budget] for budget in budgets]
        exact = statistics.median(row["exact_ms"] for row in found)
        cells = [f"{row['sparse_ms']:.0f} ({row['ratio']:.1f}x)" for row in found]
        select = statistics.median(row["select_ms"] for row in found)
        rows.append([f"{context:,}", f"{exact:,.0f}", *cells, f"{select:.0f}"])
    header = ["a layer's attention, ms, at", "exact", *(f"budget {budget}" for budget in budgets)]
    return markdown([*header, "a filter besides"], rows)


def sparse(results: Results, options: Options) -> str:
    """Sparse prefill: time to the first token and KL, a row per context and setting.

    Ratios are of processor time, since a prefill may run only once: a stall of the machine takes
    none of it.
    """
    (store,) = results.values()
    header = ["context", "budget, chunk", "attended to", "first token, s", "processor time, s"]
    header += ["of processor time: speed-up"]
    header += ["KL: novel", "copy", "perplexity: novel", "copy"]
    rows = []
    for name, cell in store["cells"].items():
        context, setting = name.split("/")
        exact = store["cells"][f"{context}/exact"]
        seconds, worked = (statistics.median(cell[key]) for key in ("prefill_s", "cpu_s"))
        row = [f"{int(context):,}", setting.replace(":", ", "), percent(cell["read_share"], 0)]
        row += [f"{seconds:.1f}", f"{worked:.1f}"]
        if setting == "exact":
            row += ["", "", ""]
            row += [f"{cell[text]['perplexity']:.1f}" if text in cell else "" for text in _TEXTS]
        else:
            row.append(ratio(statistics.median(exact["cpu_s"]) / worked))
            row += [f"{cell[text]['kl']:.4f}" for text in _TEXTS]
            row += [f"{cell[text]['perplexity']:.1f}" for text in _TEXTS]
        rows.append(row)
    return markdown(header, rows)


_TEXTS = ("novel", "copy")


def observation(results: Results, options: Options) -> str:
    """Watching a prompt for methods that drop tokens: a row per context, a column per method."""
    (store,) = results.values()
    names = list(next(iter(store["cells"].values())))
    rows = []
    for context, cells in store["cells"].items():
        rest = statistics.median(cells[names[0]]["rest_seconds"])
        row = [f"{int(context):,}", f"{rest:.1f} s"]
        for name in names:
            cell = cells.get(name)
            if cell is None:
                row.append("")
                continue
            watching = 1e3 * statistics.median(cell["watching_seconds"])
            row.append(f"{watching:,.0f} ms, {percent(cell['ratio'])}")
        rows.append(row)
    return markdown(["context", "rest of the prompt", *names], rows)
