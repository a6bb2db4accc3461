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
from vllm_kvretrieval.kernels.device import DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.slots import DecodeWorkspace, Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.triton.index import build_entries, grows
from vllm_kvretrieval.kernels.triton.scores import score_entries
from vllm_kvretrieval.kernels.types import Chooser, IndexStore, Selection
from vllm_kvretrieval.retrieval.index.base import Index
from vllm_kvretrieval.retrieval.index.bounding import Bounding
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean import Mean
from vllm_kvretrieval.retrieval.index.mean_std import MeanStd
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.index.representative import Representative
from vllm_kvretrieval.retrieval.pooling import Pooling

MODULE = "benchmarks.gpu.compiled"
ARCHITECTURES = (80, 90, 100)
HEAD_SIZES = (64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
CAPACITIES = (128, 256, 1024)
CONTEXTS = (1024, 4096, 65536)
"""Pages; 4096 are 128K tokens, and more are ranked in tiles."""
INDEXES = (
    ("min_max", MinMax(), 128),
    ("mean", Mean(), 128),
    ("mean_std", MeanStd(), 128),
    ("low_rank", LowRank(), 128),
    ("bounding", Bounding(), 128),
    ("representative", Representative(), 128),
    ("exact", Exact(), 128),
)
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
        yield f"stage_context d{head_size}", partial(_stage, head_size)
        yield f"write_tail d{head_size}", partial(_tail, head_size)
    for capacity in CAPACITIES:
        yield f"resolve C{capacity}", partial(_resolve, capacity, False)
        yield f"resolve_ahead C{capacity}", partial(_resolve, capacity, True)
    yield "prepare_rows", lambda: kernels.prepare_rows(_rows(), _requests(), PAGE)
    for name, index, head_size in INDEXES:
        step = Step(index, head_size)
        yield f"write_kv {name} d{head_size}", step.write
        if step.builds:
            yield f"index {name} d{head_size}", step.build
        yield f"scores {name} d{head_size}", step.score
    for pages in CONTEXTS:
        yield f"select {pages} pages", partial(Step(MinMax(), 128).select, pages)


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


def _stage(head_size: int) -> None:
    home, numbers = _slots(head_size)[None], torch.empty(1, dtype=torch.int32)
    kernels.stage_context(home, home, numbers[:, None], numbers, numbers)


def _rows(pages: int = 1) -> DeviceRows:
    """A row of a context of so many pages."""
    one = torch.empty(1, dtype=torch.int32)
    table = torch.empty(1, pages, dtype=torch.int32)
    starts, slots = torch.empty(2, dtype=torch.int32), torch.empty(1, dtype=torch.int64)
    return DeviceRows(one, one, starts, one, slots, table, one, one, one)


def _requests() -> DeviceRequests:
    return DeviceRequests.empty(1, "cpu")


def _residency(capacity: int) -> Residency:
    step = torch.empty(1, dtype=torch.int32)
    traffic = torch.empty(1, len(Traffic), dtype=torch.int64)
    return Residency.empty(kv_heads=KV_HEADS, slots=capacity, step=step, traffic=traffic)


def _tail(head_size: int) -> None:
    tokens = torch.empty(1, KV_HEADS, head_size, dtype=torch.bfloat16)
    kernels.write_tail(tokens, tokens, _rows(), _residency(1), _slots(head_size))


def _resolve(capacity: int, ahead: bool) -> None:
    width = capacity // 2
    step = Step(MinMax(), 128, width)
    recalls = Recalls.empty(KV_HEADS * width, "cpu")
    lists = torch.empty(KV_HEADS, width, dtype=torch.int32)
    state = _residency(capacity), recalls, lists, PAGE
    if ahead:
        kernels.resolve_ahead(step.chooser.selection, _rows(), _requests(), *state)
    else:
        kernels.resolve(step.plan(1, positions=True), _rows(), *state)


class Step:
    """A layer of one method, and calls of the ops of its decode step."""

    def __init__(self, index: Index, head_size: int, width: int = 64, group: int = 4) -> None:
        cache = torch.empty(1, KV_HEADS, PAGE, 2 * head_size, dtype=torch.bfloat16)
        shape = {"kv_heads": KV_HEADS, "head_size": head_size, "dtype": torch.bfloat16}
        store = IndexStore.empty(
            index, pages=1, page_size=PAGE, cache=cache, layout="rows", **shape
        )
        selection = Selection.empty(seats=1, group=group, most_selected=width, **shape)
        self.chooser = Chooser(store, selection, Pooling.MEAN_SOFTMAX, 1.0)
        self._cache, self._store, self._group, self._width = cache, store, group, width
        self._query = selection.query

    def plan(self, pages: int, positions: bool = False) -> DevicePlan:
        """For a row of so many pages."""
        return DevicePlan.empty(
            rows=1,
            kv_heads=KV_HEADS,
            group=self._group,
            entries=pages,
            width=self._width,
            programs=16,
            device="cpu",
            positions=positions,
        )

    def write(self) -> None:
        """The cache, and an index that grows."""
        tokens = self._query[:, :KV_HEADS]
        stores = [self._store] if grows(self._store) else []
        kernels.write_kv(tokens, tokens, _rows().slot_mapping, self._cache, stores)

    @property
    def builds(self) -> bool:
        """Whether records are built from the keys of entries."""
        return not grows(self._store) and self._store.records.shape[2] > 0

    def build(self) -> None:
        """Records of entries that are complete."""
        build_entries(_rows().slot_mapping, self._store)

    def score(self) -> None:
        """One launch of the two of `plan_decode`."""
        score_entries(self._query, _rows(), _requests(), 0, self.chooser, self.plan(CONTEXTS[1]))

    def select(self, pages: int) -> None:
        """The other one is compiled last."""
        kernels.plan_decode(
            self._query, _rows(pages), _requests(), [self.chooser], self.plan(pages)
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
