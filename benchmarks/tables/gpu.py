"""Tables of decode steps on a GPU, predicted and measured, and of their launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Options, Results, markdown, ratio

ENGINES = {"stock": "stock vLLM", "device": "`home=device`", "host": "`home=host`"}
"""Engines, by their names in result files, and for people."""


def predicted(results: Results, options: Options) -> str:
    """Predicted milliseconds per decode step: a row per context and batch.

    Files behind the first one are of `benchmarks.gpu.engine_decode`: they add a column for each
    engine that was measured.
    """
    first, *others = (_by_size(store) for store in results.values())
    measured = [(steps, engine) for steps in others for engine in ENGINES if _has(steps, engine)]
    rows = []
    for (context, batch), by_engine in first.items():
        stock, device = by_engine["stock"], by_engine["device"]
        faster = ratio(stock["ms"] / device["ms"]) if device["fits"] else ""
        times = [_time(by_engine[engine]) for engine in ENGINES]
        row = [f"{int(context):,}", batch, f"{stock['cache_gib']:.1f}", *times, faster]
        found = [steps.get((context, batch), {}).get(engine) for steps, engine in measured]
        rows.append([*row, *("" if step is None else _time(step) for step in found)])
    header = ["tokens", "batch", "KV cache, GiB", *(f"{name}, ms" for name in ENGINES.values())]
    header += [
        "device to stock, speed",
        *(f"measured: {ENGINES[name]}, ms" for _, name in measured),
    ]
    return markdown(header, rows)


Steps = dict[tuple[str, str], dict[str, Any]]
"""Decode steps by context and batch, and by engine."""


def _by_size(store: Mapping[str, Any]) -> Steps:
    steps: Steps = {}
    for name, step in store["results"].items():
        engine, *rest = name.split(", ")
        if step is not None and len(rest) == 2:
            context, batch = rest[0].removeprefix("decode "), rest[1].removeprefix("batch ")
            steps.setdefault((context, batch), {})[engine] = step
    return steps


def _has(steps: Steps, engine: str) -> bool:
    return any(engine in by_engine for by_engine in steps.values())


def launches(results: Results, options: Options) -> str:
    """Launches of a retrieval layer in a decode step, on the path and beside: a row per preset."""
    (store,) = results.values()
    rows = []
    for name, homes in store["presets"].items():
        device, host = homes.get("device"), homes.get("host")
        cells = [_count(home, part) for home in (device, host) for part in ("path", "beside")]
        times = [
            "" if home is None or home["ms"] is None else f"{home['ms']:.1f}"
            for home in (device, host)
        ]
        rows.append([f"`{name}`", *cells, *times])
    parts = (f"`home={home}`, {part}" for home in ("device", "host") for part in ("path", "beside"))
    return markdown(["preset", *parts, "predicted step, ms: device", "host"], rows)


def dense_layers(results: Results, options: Options) -> str:
    """Predicted milliseconds per decode step with a dense layer, and with none."""
    (store,) = results.values()
    rows = []
    for name, found in store["dense_layers"].items():
        home, batch = name.split(", batch ")
        rows.append([ENGINES[home], batch, *(f"{found[number]:.1f}" for number in ("1", "0"))])
    return markdown(["", "batch", "`dense_layers=1`, ms", "`dense_layers=0`, ms"], rows)


def bus(results: Results, options: Options) -> str:
    """Bytes over the bus in a step of a retrieval layer: a row per preset and codec."""
    (store,) = results.values()
    rows = []
    for name, codecs in store["bus"].items():
        for codec, found in codecs.items():
            kib, share = f"{found['bytes'] / 1024:.0f}", f"{found['share']:.2f}"
            rows.append([f"`{name}`", f"`{codec}`", kib, share, f"{found['ms']:.1f}"])
    header = ["preset", "`codec`", "KiB over the bus", "to raw", "predicted step, ms"]
    return markdown(header, rows)


def _time(step: Mapping[str, Any]) -> str:
    if "ms" not in step:
        return "does not fit"
    return f"{step['ms']:.1f}" if step["fits"] else f"({step['ms']:.1f})"


def _count(home: Mapping[str, Any] | None, part: str) -> str:
    return "" if home is None else str(sum(count for count, _ in home[part].values()))
