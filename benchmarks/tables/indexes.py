"""Tables of operations alone: `benchmarks.ops planning`, `attention`, `linear` and `quantised`."""

from __future__ import annotations

from benchmarks.tables.labels import INDEXES
from benchmarks.tables.markdown import Options, Results, markdown, percent, ratio


def planning(results: Results, options: Options) -> str:
    """Time and size of indexes: a row per index, columns per batch."""
    (store,) = results.values()
    rows_of = {(row["index"], row["batch"]): row for row in store["rows"]}
    names = list(dict.fromkeys(name for name, _ in rows_of))
    batches = sorted({batch for _, batch in rows_of})
    header = ["index", "bytes per token and KV head", "of a 16-bit cache"]
    header += [f"batch {batch}: ms per step" for batch in batches]
    header += ["to `min_max`", "building, us per token"]
    rows = []
    for name in names:
        found = [rows_of[name, batch] for batch in batches]
        rows.append(
            [
                INDEXES.get(name, f"`{name}`"),
                f"{found[0]['bytes_per_token']:.1f}",
                percent(found[0]["share"]),
                *(f"{row['planning_us'] / 1e3:.2f}" for row in found),
                ", ".join(ratio(row["to_min_max"]) for row in found),
                f"{found[0]['building_us_per_token']:.1f}",
            ]
        )
    return markdown(header, rows)


def attention(results: Results, options: Options) -> str:
    """Attention of a decode step over selected pages: our kernel beside vLLM's, with huge pages."""
    (store,) = results.values()
    header = ["batch", "budget", "vLLM, ms", "ours, ms", "speed-up", "ours, GB/s"]
    header += ["single tokens, ms", "GB/s", "a plain read, GB/s"]
    rows = [
        [
            str(row["batch"]),
            f"{row['budget']:,}",
            f"{row['vllm_ms']:.2f}",
            f"{row['ours_ms']:.2f}",
            ratio(1 / row["ratio"]),
            f"{row['gb_per_s']:.1f}",
            f"{row['tokens_ms']:.2f}",
            f"{row['tokens_gb_per_s']:.1f}",
            f"{row['most_gb_per_s']:.1f}",
        ]
        for row in store["rows"]
        if row["huge_pages"]
    ]
    return markdown(header, rows)


def levels(results: Results, options: Options) -> str:
    """Microseconds of vLLM's scheduler and ours: a row per case of `benchmarks.ops scheduler`."""
    (store,) = results.values()
    rows = [
        [row["case"], f"{row['vllm_us']:.1f}", f"{row['ours_us']:.1f}", f"{row['more_us']:.1f}"]
        for row in store["rows"]
    ]
    return markdown(["us of processor time", "vLLM", "ours", "more"], rows)


def linear(results: Results, options: Options) -> str:
    """Milliseconds of a step's linear layers: rows by tokens, columns by type and way."""
    (store,) = results.values()
    rows_of = {(row["dtype"], row["tokens"]): row for row in store["rows"]}
    dtypes = list(dict.fromkeys(dtype for dtype, _ in rows_of))
    header = ["tokens"]
    for dtype in dtypes:
        header += [f"{dtype}: PyTorch, ms", "our kernel", "weights converted"]
    header.append("float32: vLLM, ms")
    rows = []
    for tokens in dict.fromkeys(tokens for _, tokens in rows_of):
        found = [rows_of[dtype, tokens] for dtype in dtypes]
        cells = [
            f"{row[way]:.1f}"
            for row in found
            for way in ("pytorch_ms", "kernel_ms", "converted_ms")
        ]
        rows.append([str(tokens), *cells, f"{found[0]['float32_ms']:.1f}"])
    return markdown(header, rows)


WAYS = {
    "vllm_16_ms": "vLLM, 16 bits",
    "ours_8_ms": "`kvr_int8`",
    "ours_4_ms": "`kvr_int4`",
    "vllm_8_ms": "vLLM, W8A8",
    "vllm_4_ms": "vLLM, W4A16",
    "pytorch_8_ms": "PyTorch, 8 bits",
    "pytorch_4_ms": "PyTorch, 4 bits",
}
"""Products of linear layers, in the order of the table."""


def quantised(results: Results, options: Options) -> str:
    """Milliseconds of a step's linear layers: a row per model and tokens, a column per product."""
    (store,) = results.values()
    ways = [way for way in WAYS if all(way in row for row in store["rows"])]
    rows = [
        [row["model"], f"{row['tokens']:,}", *(f"{row[way]:.1f}" for way in ways)]
        for row in store["rows"]
    ]
    return markdown(["model", "tokens", *(f"{WAYS[way]}, ms" for way in ways)], rows)
