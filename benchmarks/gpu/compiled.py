"""Registers, spills and shared memory of the Triton kernels, compiled without a GPU.

    python -m benchmarks.gpu.compiled

Calls the ops with launches that are compiled instead of made, so what is compiled is what a GPU of
that architecture would run. Records registers and spilled bytes per thread, shared memory per
program, bytes of a thread's loads and of the wide and narrow ones among them, and the number of
instructions of tensor cores. Exits with status 1 where a kernel spills more than it did, or could
not be launched.

The record of a version of Triton says for each launch what it was compiled from, so only changed
launches are compiled again. For another version than the environment's, such as the one that vLLM's
CUDA wheel is pinned to (requirements/cuda-*.txt):

    pip install --no-deps --target build/triton triton==3.7.1
    PYTHONPATH=build/triton python -m benchmarks.gpu.compiled
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from benchmarks.common import RESULTS, read_json, result_header, write_json
from benchmarks.gpu.launches import calls

MODULE = "benchmarks.gpu.compiled"
VERSION = metadata.version("triton")
SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
"""KiB of shared memory of a multiprocessor, by architecture; each program takes one more."""
REGISTERS = 65536
"""Registers of a multiprocessor."""
COLUMNS = (
    "registers",
    "spilled_bytes",
    "shared_bytes",
    "warps",
    "read_bytes",
    "wide_bytes",
    "narrow_bytes",
    "tensor_ops",
)

WIDE, NARROW = 16, 4
"""Bytes of the widest load of a thread, and of the least one that can go to shared memory."""
LOAD = re.compile(r"\bld\.global(?:\.(?!v\d)[a-zA-Z][\w:]*?)*?(?:\.v(\d))?\.[bfsu](\d+)\s")
COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^,]*, [^,]*, (\w+)")
TENSOR_OP = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")

Results = dict[str, dict[str, Any]]
"""Per launch, by its name: the digest, and per architecture numbers as in ``COLUMNS``."""


def record_of(version: str) -> Path:
    """The file of a version of Triton."""
    return RESULTS / f"gpu_compiled_triton{''.join(version.split('.')[:2])}.json"


@dataclass(frozen=True)
class _StandIn:
    """The part of Triton's driver that the compiler needs."""

    arch: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Launch:
    """A launch that was not made.

    Attributes:
        run: Compiles it; returns Triton's kernel.
        digest: Of the source that it is compiled from, and of all that the compiler is told.
    """

    run: Callable[[], Any]
    digest: str


@contextmanager
def not_launching() -> Iterator[list[Launch]]:
    """Collect launches of kernels instead of making them; yields the list that they get into."""
    launches: list[Launch] = []
    run = JITFunction.run

    def collect(self: JITFunction, *args: Any, warmup: bool, **options: Any) -> None:
        digest = _digest(self, args, options)
        launches.append(Launch(partial(run, self, *args, warmup=True, **options), digest))

    with mock.patch.object(JITFunction, "run", collect):
        yield launches


def launches() -> dict[str, Launch]:
    """All of them, under the names of the results."""
    found = {}
    with not_launching() as made:
        for name, call in calls():
            call()
            found[name] = made[-1]
    return found


def _digest(kernel: JITFunction, args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    told = [str(a.dtype) if isinstance(a, torch.Tensor) else repr(a) for a in args]
    told += [f"{name}={value!r}" for name, value in options.items() if name != "grid"]
    sources: dict[str, str] = {}
    _read(kernel, sources)
    text = json.dumps([told, sorted(sources.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(function: JITFunction, sources: dict[str, str]) -> None:
    """The source of a kernel, of what it calls of ours, and the constants that they name."""
    known = function.fn.__globals__
    sources[f"{function.fn.__module__}.{function.fn.__name__}"] = inspect.getsource(function.fn)
    for name in function.fn.__code__.co_names:
        value = known.get(name)
        if isinstance(value, triton.language.constexpr):
            sources[f"{function.fn.__module__}.{name}"] = repr(value.value)
        ours = isinstance(value, JITFunction) and not value.fn.__module__.startswith("triton.")
        if ours and f"{value.fn.__module__}.{value.fn.__name__}" not in sources:
            _read(value, sources)


def compile_for(arch: int, digests: dict[str, str]) -> dict[str, list[int]]:
    """Compile launches for an architecture.

    This process launches no kernel afterwards: the stand-in driver stays.

    Args:
        arch: Of ``SHARED``.
        digests: Of the launches, by their names.

    Returns:
        Their resources, by their names.
    """
    triton.runtime.driver.set_active(_StandIn(arch))
    all_launches = launches()
    by_digest: dict[str, list[int]] = {}
    for name, digest in digests.items():
        if digest not in by_digest:
            by_digest[digest] = resources(all_launches[name].run())
    return {name: by_digest[digest] for name, digest in digests.items()}


def resources(kernel: Any) -> list[int]:
    """Numbers in the order of ``COLUMNS``.

    Registers, local memory and what is read of global memory are a thread's; loads count once, in
    loops, too.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(kernel.asm["cubin"])
        disassembler = triton.knobs.nvidia.cuobjdump.path
        command = [disassembler, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(field.split(":", 1) for field in usage.split() if ":" in field)
    spilled = int(fields["STACK"]) + int(fields["LOCAL"])
    used = [int(fields["REG"]), spilled, kernel.metadata.shared, kernel.metadata.num_warps]
    widths, ptx = read_widths(kernel.asm["ptx"]), kernel.asm["ptx"]
    wide = sum(width for width in widths if width >= WIDE)
    narrow = sum(width for width in widths if width < NARROW)
    return [*used, sum(widths), wide, narrow, len(TENSOR_OP.findall(ptx))]


def read_widths(ptx: str) -> list[int]:
    """Bytes of each load from global memory, those that go to shared memory included."""
    widths = [int(number, 0) for number in COPY.findall(ptx)]
    for vector, bits in LOAD.findall(ptx):
        widths.append(int(vector or 1) * int(bits) // 8)
    return widths


def missing(held: Results, wanted: Results, arch: int) -> dict[str, str]:
    """Digests of the wanted launches whose results for an architecture are not held, by name."""
    return {
        name: one["digest"]
        for name, one in wanted.items()
        if held.get(name, {}).get("digest") != one["digest"] or f"sm_{arch}" not in held[name]
    }


def programs(arch: int, used: list[int]) -> int:
    """Number of programs that a multiprocessor holds at once."""
    registers, _, shared, warps = used[:4]
    return min(REGISTERS // (registers * 32 * warps), SHARED[arch] * 1024 // (shared + 1024))


def regressions(held: Results, results: Results, archs: list[int]) -> Iterator[str]:
    """Descriptions of launches that are worse than recorded, or wrong without a record."""
    for name, result in results.items():
        for arch in archs:
            key = f"sm_{arch}"
            before, used = held.get(name, {}).get(key), result[key]
            if not programs(arch, used):
                yield f"{name} cannot be launched on {key}: {described(used)}"
            elif before and programs(arch, used) < programs(arch, before):
                yield f"fewer of {name} on {key}: {described(used)}; it was {described(before)}"
            if used[1] > (before[1] if before else 0):
                yield f"{name} spills on {key}: {described(used)}"


def described(used: list[int]) -> str:
    """Resources in words."""
    return ", ".join(f"{name} {number}" for name, number in zip(COLUMNS, used, strict=False))


def write(output: Path, archs: list[int], results: Results) -> None:
    """Write a record: one line for each launch."""
    header = result_header(MODULE)
    header["versions"]["triton"] = VERSION
    header |= {"architectures": archs, "columns": COLUMNS, "results": results}
    write_json(output, header)


def main() -> None:
    """Compile what has changed, for every architecture."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=record_of(VERSION), help="the record (JSON)")
    parser.add_argument("--all", action="store_true", help="compile what is recorded, too")
    parser.add_argument("--arch", type=int, action="append", choices=SHARED, help="only this")
    options = parser.parse_args()
    known = read_json(options.output)
    if known is None or known["versions"]["triton"] != VERSION:
        known = {"architectures": list(SHARED), "results": {}}
    before: Results = known["results"]
    results: Results = {name: {"digest": one.digest} for name, one in launches().items()}
    archs: list[int] = known["architectures"]
    if options.arch:  # and those that the record has of these launches
        others = [arch for arch in archs if not missing(before, results, arch)]
        archs = sorted({*others, *options.arch})
    todo = {arch: missing({} if options.all else before, results, arch) for arch in archs}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=spawn) as pool:
        made = pool.map(compile_for, todo.keys(), todo.values()) if any(todo.values()) else ()
        found = dict(zip(archs, made, strict=False))
    for arch in archs:
        for name, result in results.items():
            result[f"sm_{arch}"] = found.get(arch, {}).get(name) or before[name][f"sm_{arch}"]
    worse = list(regressions(before, results, archs))
    write(options.output, archs, results)
    counted = sum(len(names) for names in found.values())
    print(f"Triton {VERSION}: {counted} launches compiled, {len(results) * len(archs)} recorded")
    print(*worse, sep="\n")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
