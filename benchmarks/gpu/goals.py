"""Goals on a GPU, and whether the results in a folder reach them.

    python -m benchmarks.gpu.goals benchmarks/results

A figure whose program has not run, or has failed at it, is not measured.
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, read_json
from benchmarks.gpu.sparse_decode import TARGET, kv_bytes

LONG, SHORT, MILLION = 131072, 2048, 1000000
RUN = "bash tools/gpu/run.sh"

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """A figure, and how large it may, or has to be.

    Attributes:
        figure: What it is.
        result: Name of the result file that it is read from, without ``gpu_`` and suffix.
        call: The call of `tools/gpu/run.sh` that measures it.
        value: Of the file's results; raises KeyError, TypeError or ValueError where they lack it.
        at_least: Whether it has to be ``limit`` or more, not less.
        limit: Of the figure.
        unit: Of the figure.
    """

    figure: str
    result: str
    call: str
    value: Callable[[Results], float]
    at_least: bool
    limit: float
    unit: str = "x"

    @property
    def wanted(self) -> str:
        """The goal, for a table."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g} {self.unit}"

    def judge(self, results: Results | None) -> tuple[str, str]:
        """The measured figure and the verdict, for a table."""
        try:
            found = self.value(results or {})
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return "", "not measured"
        reached = (operator.ge if self.at_least else operator.le)(found, self.limit)
        return f"{found:.3g} {self.unit}", "reached" if reached else "MISSED"


def step_ms(results: Results, engine: str, context: int, batch: int) -> float:
    """Milliseconds of a decode step."""
    return float(results[f"{engine}, decode {context}, batch {batch}"]["ms"])


def largest(results: Results, engine: str, context: int) -> int:
    """The largest batch of an engine that was measured."""
    start = f"{engine}, decode {context}, batch "
    found = [int(n.removeprefix(start)) for n, r in results.items() if n.startswith(start) and r]
    return max(n for n in found if results[f"{start}{n}"]["fits"])


def _gather(results: Results) -> float:
    return results["gather, 16 KiB, 16 programs"] / results["copy engine, 1 GiB"]


def _selection(results: Results) -> float:
    return float(results[f"device, context {LONG}, batch 8"]["ops"]["select_ahead"]["us"])


def _attention(results: Results) -> float:
    seconds = results["sparse, batch {}, {} tokens".format(*TARGET)]
    return float(seconds * results["device copy, GB/s"] * 1e9 / kv_bytes(*TARGET))


def _beside_dense(results: Results) -> float:
    name = "batch {}, {} tokens".format(*TARGET)
    return float(results[f"sparse, {name}"] / results[f"FA3 paged, {name}"])


def _length(results: Results) -> float:
    return step_ms(results, "device", LONG, 1) / step_ms(results, "device", SHORT, 1)


def _faster(results: Results, batch: int) -> float:
    return step_ms(results, "stock", LONG, batch) / step_ms(results, "device", LONG, batch)


def _within(results: Results) -> float:
    return step_ms(results, "device", SHORT, 1) / step_ms(results, "stock", SHORT, 1)


def _home(results: Results) -> float:
    return step_ms(results, "host", LONG, 1) / step_ms(results, "device", LONG, 1)


def _memory(results: Results) -> float:
    host, stock = (
        results[f"{engine}, memory"]["device_bytes_per_request"][str(LONG)]
        for engine in ("host", "stock")
    )
    return host / stock


def _throughput(results: Results) -> float:
    host, stock = (
        max(
            decoded["tokens_per_second"]
            for name, decoded in results.items()
            if name.startswith(f"{engine}, decode {LONG},") and decoded and decoded["fits"]
        )
        for engine in ("host", "stock")
    )
    return host / stock


GOALS = (
    Goal(
        "recall: gather of 16 KiB units by 16 programs, to the large pinned copy",
        "ceilings",
        "kernels",
        _gather,
        True,
        0.85,
    ),
    Goal(
        "selection of one layer, 128K, batch 8 (on an H100)",
        "decode_layer",
        "kernels",
        _selection,
        False,
        60,
        "us",
    ),
    Goal(
        "sparse attention, budget 2048, batch 8, to its bytes' time",
        "sparse_decode",
        "kernels",
        _attention,
        False,
        1.3,
    ),
    Goal(
        "sparse attention, the same, to FlashAttention 3 over contexts of that length",
        "sparse_decode",
        "kernels",
        _beside_dense,
        False,
        1,
    ),
    Goal(
        "home=device, batch 1: step at 128K to the step at 2K",
        "day",
        "day",
        _length,
        False,
        1.15,
    ),
    Goal(
        "home=device, 128K, batch 1: speed to stock vLLM's",
        "day",
        "day",
        lambda results: _faster(results, 1),
        True,
        1.6,
    ),
    Goal(
        "home=device, 128K, the largest batch that stock fits: speed to stock vLLM's",
        "engine_decode",
        "engine",
        lambda results: _faster(results, largest(results, "stock", LONG)),
        True,
        3,
    ),
    Goal(
        "home=device, within the budget (2K), batch 1: step to stock vLLM's",
        "day",
        "day",
        _within,
        False,
        1.02,
    ),
    Goal(
        "home=host, 128K, batch 1: step to that of home=device",
        "engine_home",
        "host",
        _home,
        False,
        1.15,
    ),
    Goal(
        "home=host: device memory of a request of 128K, to stock vLLM's",
        "engine_equal_memory",
        "host",
        _memory,
        False,
        0.1,
    ),
    Goal(
        "home=host, 128K: tokens per second to stock vLLM's at equal device memory",
        "engine_equal_memory",
        "host",
        _throughput,
        True,
        5,
    ),
    Goal(
        "home=host: speed of one request of 1M tokens, Qwen2.5-7B-1M's shapes",
        "engine_million",
        "million",
        lambda results: 1e3 / step_ms(results, "host", MILLION, 1),
        True,
        1,
        "tokens/s",
    ),
)


def markdown() -> list[str]:
    """The table of docs/gpu.md."""
    head = ["| figure | to reach | measured by | read from |", "| --- | --- | --- | --- |"]
    rows = [
        f"| {goal.figure} | {goal.wanted} | `{RUN} {goal.call}` | `gpu_{goal.result}.json` |"
        for goal in GOALS
    ]
    return [*head, *rows]


def main() -> None:
    """Print every figure, and whether it is what it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.goals", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    folder = parser.parse_args().folder
    for goal in GOALS:
        stored = read_json(folder / f"gpu_{goal.result}.json")
        found, verdict = goal.judge(stored and stored["results"])
        print(f"{verdict:12}  {found:>14}  {goal.wanted:>14}  {goal.figure}")


if __name__ == "__main__":
    main()
