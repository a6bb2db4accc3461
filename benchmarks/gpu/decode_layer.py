"""One retrieval layer's decode step, op by op, beside the time that its bytes take.

    python -m benchmarks.gpu.decode_layer

FreeKV on a layer of Llama-3.1-8B's shape: 8 KV heads with 4 query heads each, head size 128, bf16,
pages of 32, a budget of 2048 tokens; its KV cache on the device, or in mapped host memory. Every op
is captured in a CUDA graph over several layers, whose contexts together are beyond the L2 cache,
and `step` holds all ops of a layer, the recall of pages ahead on a stream of its own. Times are
medians of replays. A floor is the bytes over the measured speed of a copy, on the device (read and
written) or over the bus. `prepare_rows` runs once per step of the model, all else once per layer.

Queries stay as they are, so nothing is missed: attention takes 4 % of the units to be missing, and
reads them from random places over the bus; recall copies 15 % ahead. Contexts are drawn from one
pool of pages and may share them where the pool is smaller. `dense` is FlashAttention over rows that
are empty to it, as the engine calls it for rows that attend to a selection; left out where vLLM is
not installed.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common import Stopwatch
from benchmarks.gpu.ceilings import device_copy
from benchmarks.gpu.common import Report, gpu_header, graph_seconds, multiprocessors, parser
from benchmarks.gpu.layer_parts import DTYPE, Op, Pool, Shape
from benchmarks.gpu.layer_step import LayerStep
from vllm_kvretrieval.attention.cuda.side import SideStream, SideWork
from vllm_kvretrieval.kernels.device import RECORD_ALIGNMENT
from vllm_kvretrieval.kernels.triton.mapped import map_host
from vllm_kvretrieval.system_limits import available_memory

MODULE = "benchmarks.gpu.decode_layer"
SHAPE = Shape()
HOMES = ("device", "host")
# What matters most comes first: time on a GPU may be scarce.
CONTEXTS = (131072, 32768, 2048, 1048576)
BATCHES = (8, 1, 32)
POOL_BYTES = 20 * 2**30
POOL_SHARE = 0.5
"""Largest share of the free memory that a pool takes."""
ROTATED_BYTES = 256 * 2**20
MOST_LAYERS = 16
COPY_BYTES = 2**30
ERROR, AGREEMENT = 1e-2, 0.98
"""Largest relative error of attention, and least share of the selection that has to agree."""

Seconds = Callable[[Sequence[Callable[[], object]]], float]


def layers_for(batch: int, context: int, shape: Shape) -> int:
    """Number of layers whose contexts together are well beyond the L2 cache."""
    page_bytes = shape.kv_heads * shape.unit_bytes
    config = shape.config
    index = config.index_bytes(
        context * page_bytes // config.page_size, shape.head_size, DTYPE, RECORD_ALIGNMENT
    )
    moved = batch * (index + min(context, shape.budget) * page_bytes // config.page_size)
    return min(max(2, ROTATED_BYTES // moved), MOST_LAYERS)


def measure(
    step: LayerStep, copy: float, bus: float, seconds: Seconds = graph_seconds
) -> dict[str, Any]:
    """Time, bytes and floor of every op; raises where the step is wrong.

    Args:
        step: To be measured.
        copy, bus: Speeds of copies, in bytes per second.
        seconds: Times calls that do the same to different tensors.
    """
    found = step.check()
    if found and not (found["attention"] < ERROR and found["selection"] >= AGREEMENT):
        raise RuntimeError(f"the step is not that of its specification: {found}")
    ops = step.ops_of_step()
    timed = {name: _figures(op, seconds(op.calls), copy, bus) for name, op in ops.items()}
    return {"check": found, "sparse": step.sparse, "layers": len(step.layers), "ops": timed}


def _figures(op: Op, seconds: float, copy: float, bus: float) -> dict[str, float | None]:
    floor = max(op.nbytes / copy, op.over_bus / bus)
    return {
        "us": seconds * 1e6,
        "bytes": op.nbytes + op.over_bus,
        "floor_us": floor * 1e6,
        "x_floor": seconds / floor if floor else None,
    }


def dense_half(step: LayerStep) -> list[Callable[[], object]]:
    """Calls of FlashAttention as the engine's dense half makes them, over the pool in place."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    keys, values = step.pool.cache.transpose(1, 2).chunk(2, dim=-1)
    return [
        partial(
            flash_attn_varlen_func,
            q=layer.query,
            k=keys,
            v=values,
            out=torch.empty_like(layer.out),
            max_seqlen_q=1,
            cu_seqlens_q=layer.rows.query_start,
            max_seqlen_k=step.context,
            seqused_k=layer.rows.dense_lens,
            block_table=layer.rows.block_table,
            softmax_scale=step.scale,
            causal=True,
            fa_version=3 if torch.cuda.get_device_capability()[0] == 9 else 2,
        )
        for layer in step.layers
    ]


def case_name(home: str, context: int, batch: int) -> str:
    """Under which results are found."""
    return f"{home}, context {context}, batch {batch}"


class Home:
    """A pool of pages, and how fast its bytes can be had.

    Args:
        name: One of `HOMES`.
        most: The largest pool, in bytes; a smaller one where memory is short.
    """

    def __init__(self, name: str, most: int = POOL_BYTES) -> None:
        self.name = name
        self._copy = device_copy() * 1e9
        page_bytes = SHAPE.kv_heads * SHAPE.unit_bytes
        free = torch.cuda.mem_get_info()[0] if name == "device" else available_memory()
        nbytes = min(most, int(free * POOL_SHARE)) // page_bytes * page_bytes
        self.side: SideWork | None = None
        self._bus, self._locked_s = self._copy, 0.0
        if name == "device":
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        else:
            self.side, watch = SideStream(), Stopwatch()
            host, memory = map_host(nbytes)
            self._locked_s = watch.seconds
            self._bus = self._host_to_device(host[:COPY_BYTES])
        self.pool = Pool(SHAPE, memory, "cuda")

    @staticmethod
    def _host_to_device(source: torch.Tensor) -> float:
        target = torch.empty_like(source, device="cuda")
        seconds = graph_seconds([lambda: target.copy_(source, non_blocking=True)], repeats=5)
        return source.nbytes / seconds

    def describe(self) -> dict[str, float]:
        """Sizes and speeds, for the record."""
        return {
            "pool_gib": round(self.pool.cache.nbytes / 2**30, 2),
            "copy_gb_per_s": self._copy / 1e9,
            "bus_gb_per_s": self._bus / 1e9,
            "locked_s": self._locked_s,
        }

    def case(self, batch: int, context: int) -> dict[str, Any]:
        """Everything about one batch and context."""
        step = LayerStep(
            self.pool,
            SHAPE,
            batch=batch,
            context=context,
            layers=layers_for(batch, context, SHAPE),
            units=multiprocessors(),
            side=self.side,
        )
        self._step = step
        return measure(step, self._copy, self._bus)

    def dense(self) -> dict[str, Any]:
        """The dense half of the last case's step."""
        step = self._step
        tokens = 0 if step.sparse else step.batch * step.context
        op = Op(dense_half(step), tokens * SHAPE.kv_heads * 2 * SHAPE.head_size * DTYPE.itemsize)
        return _figures(op, graph_seconds(op.calls), self._copy, self._bus)


def main() -> None:
    """Measure every home, context and batch; tables last."""
    arguments = parser(MODULE, __doc__)
    arguments.add_argument("--home", choices=HOMES, action="append", help="default: both")
    arguments.add_argument("--context", type=int, action="append", help=f"default: {CONTEXTS}")
    arguments.add_argument("--batch", type=int, action="append", help=f"default: {BATCHES}")
    given = arguments.parse_args()
    report = Report(given.output, gpu_header(MODULE))
    has_vllm = importlib.util.find_spec("vllm") is not None
    for name in given.home or HOMES:
        home = None
        cells: list[dict[str, Any]] = []

        def prepare(name: str = name) -> dict[str, float]:
            nonlocal home
            home = Home(name)
            return home.describe()

        if report.measure(f"{name}, pool", prepare) is None or home is None:
            continue
        for context, batch in itertools.product(given.context or CONTEXTS, given.batch or BATCHES):
            case = case_name(name, context, batch)
            found = report.measure(case, partial(home.case, batch, context))
            if not found:
                continue
            cells.append({"context": context, "batch": batch, **found["ops"]})
            if name == "device" and has_vllm:
                cells[-1]["dense"] = report.measure(f"{case}, dense", home.dense) or {}
        _table(report, name, cells)
        del home
        torch.cuda.empty_cache()
    report.finish()


def _table(report: Report, home: str, cases: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for case in cases for name in case))[2:]
    for title, key in (("us", "us"), ("times the floor", "x_floor")):
        rows = [
            [case["context"], case["batch"], *(case.get(name, {}).get(key) for name in names)]
            for case in cases
        ]
        report.table(f"One layer, home={home}, {title}", ["context", "batch", *names], rows)


if __name__ == "__main__":
    main()
