"""Tables of a cache on disk: results of `benchmarks.serving disk`, `capacity` and `store`."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import Options, Results, markdown, percent, ratio

MIB = 1 << 20


STARTS = {
    "none": "without a store",
    "empty": "with a new store",
    "stopped": "after a stop",
    "killed": "after `kill -9`",
    "cold": "after that, files not in the page cache",
}
"""How an engine has started, in the order of the table."""


def restarts(results: Results, options: Options) -> str:
    """Times to the first token of a document with a store: a row per context and start."""
    (store,) = results.values()
    rows = []
    for context, figures in store["contexts"].items():
        for start, name in STARTS.items():
            if (row := figures.get(start)) is None:
                continue
            times = f"{row['start_s']:.1f}", f"{row['first_token_s']:.2f}", f"{row['step_ms']:.1f}"
            rows.append([f"{int(context):,}", name, *times])
    header = ["tokens", "engine", "its start, s", "first token, s", "a step, ms"]
    return markdown(header, rows)


def price(results: Results, options: Options) -> str:
    """What a store costs new documents: medians without and with one, and of their ratios."""
    (store,) = results.values()
    given, pairs = store["settings"], store["price"]
    starts = statistics.median(start["cpu_s"] for start in store["starts"])
    rows = []
    for name, figure, scale in (
        (f"a new prompt of {given['price_context']:,} tokens, s", "prompt_s", 1),
        ("a step, ms", "step_s", 1000),
    ):
        found = [[scale * pair[figure] for pair in pairs[kind]] for kind in ("none", "store")]
        more = statistics.median(after / before for before, after in zip(*found, strict=True)) - 1
        medians = (f"{statistics.median(each):.2f}" for each in found)
        rows.append([name, *medians, percent(more)])
    found_s = f"finding {given['stored']:,} blocks at the start, s of CPU"
    rows.append([found_s, "", f"{starts:.2f}", ""])
    return markdown(["", "without a store", "with one", "longer by"], rows)


def disk(results: Results, options: Options) -> str:
    """Decode steps with a cache on disk: a row per batch and variant, times as ratios to ``base``.

    In the option's value ``_`` stands for a space.
    """
    (store,) = results.values()
    base = options["base"].replace("_", " ")
    tail = all("tail_ms" in row for row in store["rows"])
    first = {
        (row["context"], row["batch"]): row["step_ms"]
        for row in store["rows"]
        if row["variant"] == base
    }
    header = ["variant", "batch", "first step: ms", "MiB", "other steps: ms", f"to {base}"]
    header += ["95 % within, ms"] * tail + ["corrected", "hits", "MiB/step", "ms waited"]
    rows = []
    for row in store["rows"]:
        threshold = "" if row["threshold"] is None else f", threshold {row['threshold']:g}"
        read = row["recalled_mib"] > 0
        times = [f"{row['first_ms']:.1f}", f"{row['first_recalled_mib']:.1f}" if read else ""]
        times += [
            f"{row['step_ms']:.1f}",
            ratio(row["step_ms"] / first[row["context"], row["batch"]]),
        ]
        times += [f"{row['tail_ms']:.1f}"] if tail else []
        corrected = row.get("corrected_share")
        shares = ["" if corrected is None else percent(corrected, 0)]
        shares += [percent(row["hit_rate"]) if read else ""]
        waits = [f"{row['recalled_mib']:.2f}", f"{row['waited_ms']:.2f}"] if read else ["", ""]
        name = row["variant"] + ("" if "threshold" in row["variant"] else threshold)
        rows.append([name, str(row["batch"]), *times, *shares, *waits])
    return markdown(header, rows)


def capacity(results: Results, options: Options) -> str:
    """Tokens of context in the same fast memory: a row per size and file, each of a method."""
    header = ["fast memory", "vLLM alone: tokens", "method", "on disk", "", "page index"]
    header += ["slots", "file"]
    rows = []
    for store in results.values():
        method = store["settings"].get("method", "freekv")  # early files name none
        for row in store["rows"]:
            planned = row["planned"]
            sizes = f"{row['fast_memory'] // MIB:,} MiB", f"{row['stock_tokens']:,}"
            tokens = f"{row['tokens']:,} ({row['requests']} of {row['context']:,})"
            parts = (
                f"{planned['index'] / MIB:,.1f} MiB",
                f"{planned['recall_cache'] / MIB:,.1f} MiB",
            )
            home = f"{planned['home'] / MIB:,.0f} MiB"
            rows.append([*sizes, f"`{method}`", tokens, f"{row['ratio']:.1f}x", *parts, home])
    return markdown(header, rows)
