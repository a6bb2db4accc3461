"""What `benchmarks.serving decode` makes of its measurements: figures, tables and verdicts."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks import build
from benchmarks.serving.worker_timing import (
    ATTENTION_KERNEL,
    ATTENTION_LAYER,
    FORWARD,
    INDEX_UPDATE,
    KV_WRITE,
    PLANNING,
    RUNNER,
)

Cell = dict[str, Any]

HEADER = (
    f"{'context':>8}{'batch':>6} | {'decode, ms/step':>17}{'speed-up':>9}{'(min..max)':>15}"
    f"{'corrected':>10} | {'prefill, s':>17}{'ratio':>7} | {'first token, s':>17}"
)


def spread(milliseconds: Sequence[float]) -> dict[str, float]:
    """The steps of one repeat: mean of the middle 80 %, median, and the limits of that middle.

    Processes that hand work to each other on few cores wake at the scheduler's tick (often
    4 ms), so step times come in clusters: a median jumps from one to the next, a mean does not.
    """
    steps = sorted(milliseconds)
    cut = len(steps) // 10
    middle = steps[cut : len(steps) - cut]
    return {
        "mean": round(statistics.fmean(middle), 3),
        "median": round(statistics.median(steps), 3),
        "p10": round(middle[0], 3),
        "p90": round(middle[-1], 3),
    }


def profile(steps_ms: Sequence[float], parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Split the mean step into disjoint parts, in milliseconds.

    steps_ms: lengths of the last decode steps, as seen from outside the engine.
    parts: inclusive seconds of the worker's parts per step, the same steps last.
    """
    last = parts[-len(steps_ms) :]

    def mean(label: str) -> float:
        return 1e3 * statistics.fmean(part.get(label, 0.0) for part in last)

    layers = mean(ATTENTION_LAYER) + mean(KV_WRITE)
    ops = [mean(label) for label in (ATTENTION_KERNEL, PLANNING, INDEX_UPDATE)]
    step = statistics.fmean(steps_ms)
    split = {
        "attention kernel": ops[0],
        "retrieval planning": ops[1],
        "index update": ops[2],
        "rest of attention, KV write": layers - sum(ops),
        "rest of the model": mean(FORWARD) - layers,
        "rest of the model runner": mean(RUNNER) - mean(FORWARD),
        "outside the model runner": step - mean(RUNNER),
    }
    return {"step": round(step, 3)} | {name: round(ms, 3) for name, ms in split.items()}


def retrieval(requests: Sequence[str]) -> dict[str, float]:
    """Means of what the plug-in noted about the requests of a batch; empty for stock vLLM."""
    notes = [dict(re.findall(r"(\w+_share)=([\d.]+)", line)) for line in requests]
    names = notes[0] if notes else {}
    return {name: round(statistics.fmean(float(note[name]) for note in notes), 4) for name in names}


def step_ms(cell: Cell, engine: str) -> float:
    """Decode milliseconds per step: the median over repeats of each repeat's mean."""
    return statistics.median(repeat["mean"] for repeat in cell["engines"][engine]["step_ms"])


def pair(cell: Cell) -> tuple[str, str]:
    """Names of the stock engine and of its counterpart; further methods follow these."""
    stock, other, *_ = cell["engines"]
    return stock, other


def pooled(cells: Sequence[Cell]) -> list[Cell]:
    """One cell per size: the repeats of both orders in which the engines were started."""
    by_size: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        by_size.setdefault((cell["context"], cell["batch"]), []).append(cell)
    return [_pool(orders) for _, orders in sorted(by_size.items())]


def _pool(orders: Sequence[Cell]) -> Cell:
    engines = {
        name: engine
        | {
            key: [repeat for cell in orders for repeat in cell["engines"][name][key]]
            for key in ("step_ms", "prefill_s", "first_token_s")
        }
        for name, engine in orders[0]["engines"].items()
    }
    prefilled = [ratios for ratios in map(_prefill_ratios, orders) if ratios]
    figures = {
        "decode_ratio": _mean_of_medians(map(decode_ratios, orders)),
        "prefill_ratio": _mean_of_medians(prefilled) if prefilled else None,
        "builds": [cell.get("build") for cell in orders],
    }
    return orders[0] | {"engines": engines} | figures


def _mean_of_medians(orders: Iterable[Sequence[float]]) -> float:
    return statistics.geometric_mean(map(statistics.median, orders))


def decode_ratios(cell: Cell) -> list[float]:
    """Per repeat, the counterpart's step time over stock's."""
    return ratios(cell, *pair(cell))


def ratios(cell: Cell, base: str, name: str) -> list[float]:
    """Per repeat, the step time of one engine or method over another's."""
    steps = (cell["engines"][each]["step_ms"] for each in (base, name))
    return [b["mean"] / a["mean"] for a, b in zip(*steps, strict=True)]


def _prefill_ratios(cell: Cell) -> list[float]:
    stock, other = (cell["engines"][name]["prefill_s"] for name in pair(cell))
    return [b / a for a, b in zip(stock, other, strict=True)]


def row(cell: Cell, mine: build.Build) -> str:
    """One line of the table under `HEADER`, of a cell from `pooled`; mine: the build in use."""
    stock, other = pair(cell)
    ups = sorted(1 / ratio for ratio in decode_ratios(cell))
    corrected = cell["engines"][other].get("retrieval", {}).get("corrected_share")
    prefill, first = (
        [cell["engines"][name][key] for name in (stock, other)]
        for key in ("prefill_s", "first_token_s")
    )
    decode = f"{step_ms(cell, stock):.1f} -> {step_ms(cell, other):.1f}"
    between = f"({ups[0]:.2f}..{ups[-1]:.2f})"
    share = "-" if corrected is None else f"{corrected:.0%}"
    ratio = "-" if cell["prefill_ratio"] is None else f"{cell['prefill_ratio']:.3f}"
    marks = " *" * cell["one_by_one"] + " †" * (not _all_of(mine, cell["builds"]))
    return (
        f"{cell['context']:8,}{cell['batch']:6} | {decode:>17}{1 / cell['decode_ratio']:8.2f}x"
        f"{between:>15}{share:>10} | {_medians(prefill):>17}{ratio:>7} | {_medians(first):>17}"
        f"{marks}"
    )


def _beside(cell: Cell) -> list[str]:
    """One line for each further method: its step, how many times as fast as each other's, and its
    time to the first token where there was a prefill."""
    names = [*cell["engines"]]
    firsts = {name: cell["engines"][name]["first_token_s"] for name in names}
    return [
        f"{cell['context']:8,}{cell['batch']:6} | {name}: {step_ms(cell, name):.1f} ms; "
        + (f"first token {statistics.median(firsts[name]):.2f} s; " if firsts[name] else "")
        + ", ".join(
            f"{statistics.median(ratios(cell, name, each)):.2f}x {each}"
            for each in names
            if each != name
        )
        for name in names[2:]
    ]


def _medians(seconds: Sequence[Sequence[float]]) -> str:
    """Of stock and its counterpart; nothing was prefilled where there are none."""
    if not all(seconds):
        return "-"
    stock, other = map(statistics.median, seconds)
    return f"{stock:.2f} -> {other:.2f}"


def _all_of(mine: build.Build, builds: Iterable[build.Build | None]) -> bool:
    return all(build.same(mine, other) for other in builds)


def acceptance(store: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets, what was measured, and whether it is enough (None: not measured)."""
    cells, budget = pooled(store["cells"]), store["settings"]["budget"]
    by_size = {(cell["context"], cell["batch"]): cell for cell in cells}
    long = 32768
    verdicts: list[dict[str, Any]] = []

    def judge(target: str, measure: Callable[[], float], limit: float, at_least: bool) -> None:
        try:
            value = round(measure(), 3)
        except (KeyError, ValueError):
            verdicts.append({"target": target, "limit": limit, "value": None, "pass": None})
            return
        passed = value >= limit if at_least else value <= limit
        verdicts.append({"target": target, "limit": limit, "value": value, "pass": passed})

    def speed_up(batch: int) -> float:
        return 1 / by_size[long, batch]["decode_ratio"]

    def within_budget() -> float:
        return max(cell["decode_ratio"] for cell in cells if cell["context"] <= budget)

    def prefill() -> float:
        beyond = [cell["prefill_ratio"] for cell in cells if cell["context"] > budget]
        return max(ratio for ratio in beyond if ratio is not None)

    judge(f"decode at {long:,}, batch 1: speed-up over stock", lambda: speed_up(1), 2.0, True)
    judge(f"decode at {long:,}, batch 4: speed-up over stock", lambda: speed_up(4), 3.5, True)
    judge("decode within the budget, over stock, worst cell", within_budget, 1.03, False)
    judge("prefill beyond the budget, over stock, worst cell", prefill, 1.05, False)
    return verdicts


def summary(store: dict[str, Any]) -> str:
    """The whole result as text: table, parts of a step, verdicts."""
    cells = sorted(pooled(store["cells"]), key=lambda cell: (cell["batch"], cell["context"]))
    mine = store["build"]
    lines = ["", f"build {build.label(mine)}"]
    if store["settings"].get("fill"):
        lines.append("random keys and values, no prefill: for timing only, what is selected is "
            "random, and how often KV heads are corrected, too")  # fmt: skip
    lines += [HEADER, *(row(cell, mine) for cell in cells)]
    lines += [line for cell in cells for line in _beside(cell)]
    if any(cell["one_by_one"] for cell in cells):
        lines.append("* prefill and first token: the batch's documents handed in one after another")
    others = {build.label(b) for cell in cells for b in cell["builds"] if not build.same(mine, b)}
    if others:
        lines.append(f"† kept by --resume, of another build: {', '.join(sorted(others))}")
    lines += [*_profile_lines(cells), ""]
    for verdict in store["acceptance"]:
        word = {True: "PASS", False: "FAIL", None: "not measured"}[verdict["pass"]]
        value = "" if verdict["value"] is None else f" {verdict['value']:.3f}"
        lines.append(f"{word:>4}{value}  {verdict['target']} (limit {verdict['limit']})")
    return "\n".join(lines)


def _profile_lines(cells: list[Cell]) -> list[str]:
    """Where the time of a step goes, one block per engine and one column per cell."""
    cells = [c for c in cells if all("profile_ms" in e for e in c["engines"].values())]
    if not cells:
        return []
    lines = ["", "where a step's time goes, ms (measured apart, with timers inside the worker)"]
    for name in cells[0]["engines"]:
        columns = [cell["engines"][name]["profile_ms"] for cell in cells]
        sizes = "".join(f"{cell['context']:>8,} x{cell['batch']}" for cell in cells)
        lines.append(f"{name:<28}{sizes}")
        for part in columns[0]:
            lines.append(f"  {part:<26}" + "".join(f"{column[part]:11.2f}" for column in columns))
        notes = [cell["engines"][name]["retrieval"] for cell in cells]
        for share in notes[-1]:
            shares = "".join(f"{note.get(share, math.nan):11.1%}" for note in notes)
            lines.append(f"  {share:<26}{shares}")
    return lines
