"""Tables of `benchmarks.gpu.predict`: decode steps on a GPU, and their launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Options, Results, markdown, ratio


def predicted(results: Results, options: Options) -> str:
    """Predicted milliseconds per decode step: a row per context and batch."""
    (store,) = results.values()
    steps: dict[tuple[str, str], dict[str, Any]] = {}
    for name, step in store["results"].items():
        engine, context, batch = name.split(", ")
        key = context.removeprefix("decode "), batch.removeprefix("batch ")
        steps.setdefault(key, {})[engine] = step
    rows = []
    for (context, batch), by_engine in steps.items():
        stock, device, host = (by_engine[engine] for engine in ("stock", "device", "host"))
        faster = ratio(stock["ms"] / device["ms"]) if device["fits"] else ""
        times = [_time(step) for step in (stock, device, host)]
        rows.append([f"{int(context):,}", batch, f"{stock['cache_gib']:.1f}", *times, faster])
    header = ["tokens", "batch", "KV cache, GiB", "stock vLLM, ms", "`home=device`, ms"]
    return markdown([*header, "`home=host`, ms", "device to stock, speed"], rows)


def launches(results: Results, options: Options) -> str:
    """Launches of a retrieval layer in a decode step, on the path and beside: a row per preset."""
    (store,) = results.values()
    rows = []
    for name, homes in store["presets"].items():
        device, host = homes.get("device"), homes.get("host")
        cells = [_count(device, "path"), _count(host, "path"), _count(host, "beside")]
        times = ["" if home is None else f"{home['ms']:.1f}" for home in (device, host)]
        rows.append([f"`{name}`", *cells, *times])
    header = ["preset", "`home=device`", "`home=host`, on the path", "beside the model"]
    return markdown([*header, "predicted step, ms: device", "host"], rows)


def _time(step: Mapping[str, Any]) -> str:
    return f"{step['ms']:.1f}" if step["fits"] else f"({step['ms']:.1f})"


def _count(home: Mapping[str, Any] | None, part: str) -> str:
    return "" if home is None else str(sum(count for count, _ in home[part].values()))
