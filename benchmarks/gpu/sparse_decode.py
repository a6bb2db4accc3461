"""Sparse decode attention beside the time its bytes take and beside FlashAttention 3.

    python -m benchmarks.gpu.sparse_decode

Llama-3.1-8B's shape: 8 KV heads with 4 query heads each, head size 128, bf16, pages of 32. Times
are medians of replays of a CUDA graph that goes through more buffers than the L2 cache holds. The
floor is the bytes of keys and values over the measured speed of a device copy (bytes read and
written). FlashAttention 3, vLLM's build of it, attends to a dense context of the same length:
paged as vLLM keeps it by default, and contiguous; left out where vLLM is not installed. FlashInfer
and xFormers attend to the same lists of slots, planned beforehand; where they are installed.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.ceilings import device_copy
from benchmarks.gpu.common import Report, gpu_header, graph_seconds, multiprocessors, parser
from benchmarks.gpu.peers import PEERS, installed
from tests.spec import slots as slots_reference
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.slots import DecodeWorkspace

MODULE = "benchmarks.gpu.sparse_decode"
DTYPE = torch.bfloat16
KV_HEADS, GROUP, HEAD_SIZE, PAGE = 8, 4, 128, 32
SCALE = HEAD_SIZE**-0.5
DENSE_BLOCK = 16
BATCHES = (1, 4, 8, 16)
LENGTHS = (512, 1024, 2048, 4096)
TARGET = (8, 2048)
"""The batch and the length for which a figure is to be reached, and variants are tried."""
ROTATED_BYTES = 256 * 2**20
TOLERANCE = 1e-2


def kv_bytes(batch: int, length: int) -> int:
    """Bytes of keys and values that a step attends to."""
    return batch * length * KV_HEADS * 2 * HEAD_SIZE * DTYPE.itemsize


def rotation(batch: int, length: int) -> int:
    """Number of sets of buffers that together are well beyond the L2 cache."""
    return max(2, ROTATED_BYTES // kv_bytes(batch, length))


def ours(batch: int, length: int, splits: int | None = None, **tuning: Any) -> float:
    """Seconds of `sparse_decode`; raises where it is wrong."""
    rows = batch * KV_HEADS
    width = length // PAGE
    splits = splits or kernels.count_splits(rows, multiprocessors(), length, HEAD_SIZE)
    lengths = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    lse = torch.empty(rows, GROUP, device="cuda")
    workspace = DecodeWorkspace.empty(
        rows=rows, splits=splits, group=GROUP, head_size=HEAD_SIZE, device="cuda"
    )
    steps: list[Callable[[], None]] = []
    for _ in range(rotation(batch, length)):
        query = torch.randn(batch, KV_HEADS * GROUP, HEAD_SIZE, device="cuda").to(DTYPE)
        slots = torch.randn(rows * width, PAGE, 2 * HEAD_SIZE, device="cuda", dtype=DTYPE)
        lists = torch.randperm(rows * width, device="cuda").int().view(rows, width)
        out = torch.empty_like(query)
        arguments = (query, slots, lists, lengths, SCALE, out, lse, workspace)
        steps.append(partial(kernels.sparse_decode, *arguments, **tuning))
    seconds = graph_seconds(steps)
    expected = torch.empty_like(out)
    slots_reference.sparse_decode(*arguments[:5], expected, lse, workspace)
    error = ((out - expected).double().norm() / expected.double().norm()).item()
    if not error < TOLERANCE:
        raise RuntimeError(f"relative error {error:.2e}")
    return seconds


def flash_attention(batch: int, length: int, paged: bool) -> float:
    """Seconds of FlashAttention 3 over a dense context."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    steps: list[Callable[[], object]] = []
    for _ in range(rotation(batch, length)):
        query = torch.randn(batch, KV_HEADS * GROUP, HEAD_SIZE, device="cuda").to(DTYPE)
        shared = {
            "q": query,
            "out": torch.empty_like(query),
            "max_seqlen_q": 1,
            "cu_seqlens_q": starts,
            "max_seqlen_k": length,
            "softmax_scale": SCALE,
            "causal": True,
            "fa_version": 3,
        }
        kv = torch.randn(batch * length, KV_HEADS, 2 * HEAD_SIZE, device="cuda", dtype=DTYPE)
        if paged:
            blocks = torch.randperm(batch * length // DENSE_BLOCK, device="cuda").int()
            k, v = kv.view(-1, DENSE_BLOCK, KV_HEADS, 2 * HEAD_SIZE).chunk(2, dim=-1)
            cache = {"seqused_k": lengths, "block_table": blocks.view(batch, -1)}
        else:
            k, v = (part.contiguous() for part in kv.chunk(2, dim=-1))
            cache = {"cu_seqlens_k": starts * length}
        steps.append(partial(flash_attn_varlen_func, k=k, v=v, **cache, **shared))
    return graph_seconds(steps)


def peer(name: str, batch: int, length: int) -> float:
    """Seconds of another library's kernel over lists as ours has them."""
    rows, width = batch * KV_HEADS, length // PAGE
    lists = torch.randperm(rows * width, device="cuda").int().view(rows, width)
    attend = PEERS[name](lists, [length] * rows, PAGE, GROUP, HEAD_SIZE, SCALE)
    steps: list[Callable[[], object]] = []
    for _ in range(rotation(batch, length)):
        query = torch.randn(rows, GROUP, HEAD_SIZE, device="cuda").to(DTYPE)
        slots = torch.randn(rows * width, PAGE, 2 * HEAD_SIZE, device="cuda", dtype=DTYPE)
        steps.append(partial(attend, query, slots))
    return graph_seconds(steps)


def main() -> None:
    """Measure every batch and length, then variants of the one that matters; tables last."""
    report = Report(parser(MODULE, __doc__).parse_args().output, gpu_header(MODULE))
    copy = report.measure("device copy, GB/s", device_copy)
    dense = importlib.util.find_spec("vllm") is not None
    rows: list[list[Any]] = []
    for batch, length in itertools.product(BATCHES, LENGTHS):
        name = f"batch {batch}, {length} tokens"
        floor = kv_bytes(batch, length) / copy / 1e9
        seconds = report.measure(f"sparse, {name}", partial(ours, batch, length))
        others = [
            report.measure(f"FA3 {kind}, {name}", partial(flash_attention, batch, length, paged))
            for kind, paged in (("paged", True), ("contiguous", False))
            if dense
        ]
        others += [
            report.measure(f"{library}, {name}", partial(peer, library, batch, length))
            for library in installed()
        ]
        micros = [time * 1e6 if time else None for time in (floor, seconds, *others)]
        rows.append([batch, length, *micros[:2], seconds and seconds / floor, *micros[2:]])
    columns = ["batch", "tokens", "floor, us", "sparse, us", "x floor"]
    if dense:
        columns += ["FA3 paged, us", "FA3 contiguous, us"]
    columns += [f"{library}, us" for library in installed()]
    report.table("Sparse decode attention, Llama-3.1-8B's shape", columns, rows)

    found = []
    for splits, tile, stages, warps in itertools.product(
        (2, 4, 8), (4096, 8192), (3, 5, 7), (4, 8)
    ):
        tuning = {"splits": splits, "tile_elements": tile, "stages": stages, "warps": warps}
        seconds = report.measure(f"variant {tuning}", partial(ours, *TARGET, **tuning))
        if seconds:
            found.append([splits, tile, stages, warps, seconds * 1e6])
    best = sorted(found, key=lambda row: row[-1])[:5]
    title = "Batch {}, {} tokens, best variants".format(*TARGET)
    report.table(title, ["splits", "tile", "stages", "warps", "us"], best)
    report.finish()


if __name__ == "__main__":
    main()
