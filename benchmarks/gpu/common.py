"""Shared by the programs: the GPU's description, timing by graph replay, results, tables."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, Stopwatch, read_json, result_header, write_json

GIB = 2**30
WARM_CALLS = 3


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Argument parser with the option that every program has: where its results go."""
    result = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    name = f"gpu_{module.rpartition('.')[2]}.json"
    result.add_argument("--output", type=Path, default=RESULTS / name, help="result file (JSON)")
    return result


def gpu_header(module: str) -> dict[str, Any]:
    """The header of a result file, with the GPU and the versions that matter on it.

    Args:
        module: The program's module name.

    Raises:
        SystemExit: There is no GPU; says so.
    """
    if not torch.cuda.is_available():
        raise SystemExit(f"{module} needs an NVIDIA GPU and a CUDA build of torch: found none")
    header = result_header(module)
    properties = torch.cuda.get_device_properties(0)
    header["machine"]["gpu"] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "l2_mib": properties.L2_cache_size // 2**20,
    } | _driver("driver_version", "pcie.link.gen.max", "pcie.link.width.max")
    header["versions"] |= {"triton": metadata.version("triton"), "cuda": torch.version.cuda}
    return header


def _driver(*fields: str) -> dict[str, str]:
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return {"driver_version": f"unknown: {error}"}
    values = answer.stdout.splitlines()[0].split(", ")
    return dict(zip(fields, values, strict=True))


def multiprocessors() -> int:
    """Streaming multiprocessors of the GPU."""
    return torch.cuda.get_device_properties(0).multi_processor_count


def graph_seconds(steps: Sequence[Callable[[], object]], repeats: int = 30) -> float:
    """Median time of a step in seconds, replayed from a CUDA graph that holds all of ``steps``.

    Steps that do the same to different buffers, together larger than the L2 cache, keep it from
    serving one replay with what the previous one left.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_CALLS):
            for step in steps:
                step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    times = []
    for repeat in range(WARM_CALLS + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= WARM_CALLS:
            times.append(start.elapsed_time(end) / 1e3 / len(steps))
    return statistics.median(times)


class Report:
    """Collects results, writes them after every part, and prints the tables last.

    A part that fails is reported and does not keep the others from being measured: time on a GPU
    may be scarce.

    Args:
        output: The result file.
        header: Of it.
        add: Whether results and errors of the file as it is are kept.
    """

    def __init__(self, output: Path, header: dict[str, Any], *, add: bool = False) -> None:
        self._output = output
        found = (read_json(output) if add else None) or {}
        if found:
            header = header | {"command": f"{found['command']}; {header['command']}"}
        kept = {part: found.get(part, {}) for part in ("results", "errors")}
        self._data: dict[str, Any] = header | kept
        self._before = set(kept["errors"])
        self._tables: list[str] = []
        self._watch = Stopwatch()

    def measure(self, name: str, part: Callable[[], Any]) -> Any:
        """Run a part and store what it returns; None where it fails."""
        print(f"[{self._watch}] {name}", flush=True)
        result = None
        self._before.discard(name)
        self._data["errors"].pop(name, None)
        try:
            result = self._data["results"][name] = part()
        except Exception as error:
            traceback.print_exc()
            self._data["errors"][name] = f"{type(error).__name__}: {error}"
        write_json(self._output, self._data)
        return result

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Keep a table for the end."""
        cells = [list(columns), *[[_cell(value) for value in row] for row in rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        lines = [
            "  ".join(value.rjust(width) for value, width in zip(row, widths, strict=True))
            for row in cells
        ]
        self._tables.append("\n".join([title, *lines]))

    def finish(self) -> None:
        """Print the tables; exit with status 1 where a part failed."""
        write_json(self._output, self._data)
        print(*self._tables, f"results: {self._output}", sep="\n\n", flush=True)
        failed = {n: e for n, e in self._data["errors"].items() if n not in self._before}
        for name, error in failed.items():
            print(f"FAILED {name}: {error}")
        sys.exit(bool(failed))


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
