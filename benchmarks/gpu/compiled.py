"""What the Triton kernels compile to, for GPUs that need not be there.

    python -m benchmarks.gpu.compiled

Calls the ops with a driver that compiles instead of launching, so what is compiled is what a GPU
of that architecture would run. Records registers and spilled bytes per thread, and shared memory
per program; exits with status 1 where a kernel spills.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
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

from benchmarks.common import result_header, write_json
from benchmarks.gpu.common import parser
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.slots import DecodeWorkspace

MODULE = "benchmarks.gpu.compiled"
ARCHITECTURES = (80, 90, 100)
HEAD_SIZES = (64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
PAGE = 32
KV_HEADS = 8


@dataclass(frozen=True)
class _StandIn:
    """As much of Triton's driver as compiling asks for."""

    arch: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(arch: int) -> Iterator[list[Any]]:
    """Compile kernels for ``sm_<arch>`` where they would be launched; yields them as they come.

    This process launches no kernel afterwards: the stand-in driver stays.
    """
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, warmup=True, **kwargs))

    triton.runtime.driver.set_active(_StandIn(arch))
    with mock.patch.object(JITFunction, "run", compile_only):
        yield compiled


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Calls of the ops that cover every kernel and head size, under the names of the results."""
    for head_size in HEAD_SIZES:
        for dtype in DTYPES:
            name = f"d{head_size} {str(dtype).removeprefix('torch.')}"
            yield f"sparse_decode {name}", partial(_decode, head_size, dtype)
        yield f"recall_units d{head_size}", partial(_recall, head_size)
        yield f"write_kv d{head_size}", partial(_write, head_size)


def _slots(head_size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(KV_HEADS, PAGE, 2 * head_size, dtype=dtype)


def _decode(head_size: int, dtype: torch.dtype, group: int = 4, splits: int = 4) -> None:
    query = torch.empty(1, KV_HEADS * group, head_size, dtype=dtype)
    rows = {"rows": KV_HEADS, "group": group, "head_size": head_size}
    kernels.sparse_decode(
        query,
        _slots(head_size, dtype),
        torch.empty(KV_HEADS, 64, dtype=torch.int32),
        torch.empty(KV_HEADS, dtype=torch.int32),
        head_size**-0.5,
        query,
        torch.empty(KV_HEADS, group),
        DecodeWorkspace.empty(**rows, splits=splits, device="cpu"),
    )


def _recall(head_size: int) -> None:
    units = torch.empty(16, dtype=torch.int32)
    count = torch.empty(1, dtype=torch.int32)
    kernels.recall_units(_slots(head_size)[None], _slots(head_size), units, units, count)


def _write(head_size: int) -> None:
    tokens = torch.empty(1, KV_HEADS, head_size, dtype=torch.bfloat16)
    kernels.write_kv(
        tokens,
        tokens,
        torch.empty(1, dtype=torch.int64),
        _slots(head_size)[None],
        _slots(head_size),
        torch.empty(1, KV_HEADS, dtype=torch.int32),
    )


def resources(kernel: Any) -> dict[str, int]:
    """Registers and local memory (spills) in bytes per thread, shared memory per program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(kernel.asm["cubin"])
        disassembler = triton.knobs.nvidia.cuobjdump.path
        command = [disassembler, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(field.split(":", 1) for field in usage.split() if ":" in field)
    return {
        "registers": int(fields["REG"]),
        "spilled_bytes": int(fields["STACK"]) + int(fields["LOCAL"]),
        "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
    }


def main() -> None:
    """Compile everything for every architecture."""
    arguments = parser(MODULE, __doc__)
    output = arguments.parse_args().output
    results: dict[str, dict[str, dict[str, int]]] = {}
    for arch in ARCHITECTURES:
        with compiling(arch) as compiled:
            for name, call in calls():
                call()
                results.setdefault(name, {})[f"sm_{arch}"] = resources(compiled.pop())
    header = result_header(MODULE) | {"command": f"python -m {MODULE}"}
    header["versions"]["triton"] = metadata.version("triton")
    write_json(output, header | {"results": results})
    print(f"{'registers / spilled bytes / shared KiB':40}", *[f"sm_{a:<12}" for a in ARCHITECTURES])
    for name, by_arch in results.items():
        cells = [
            f"{used['registers']} / {used['spilled_bytes']} / {used['shared_bytes'] / 1024:.0f}"
            for used in by_arch.values()
        ]
        print(f"{name:40}", *[f"{cell:15}" for cell in cells])
    sys.exit(any(used["spilled_bytes"] for by in results.values() for used in by.values()))


if __name__ == "__main__":
    main()
