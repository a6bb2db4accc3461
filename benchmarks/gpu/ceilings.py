"""Limits of the hardware: device copy, host to device in two ways, zero-copy write.

    python -m benchmarks.gpu.ceilings

The gather is `recall_units` on listed units at random places in mapped host memory, by unit size
and by the number of programs (each on a multiprocessor of its own, as long as there are no more
of them than multiprocessors). Speeds are in GB/s (1e9 bytes), medians of graph replays.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.common import Report, gpu_header, graph_seconds, multiprocessors, parser
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.triton.mapped import map_host

MODULE = "benchmarks.gpu.ceilings"
DTYPE = torch.bfloat16
UNITS = {4: (16, 64), 8: (32, 64), 16: (32, 128), 32: (64, 128), 64: (128, 128)}
"""Unit size in KiB: tokens of a page, head size."""
PROGRAMS = (1, 2, 4, 8, 16, 32, 64)
HOME_BYTES = 2 * 2**30
MOVED_BYTES = 128 * 2**20
LARGE_BYTES = 2**30
COPIES = 2048
KV_HEADS, HEAD_SIZE, PAGE = 8, 128, 32


def device_copy() -> float:
    """Bytes read and written per second by a copy within device memory."""
    source = torch.randn(LARGE_BYTES, device="cuda", dtype=DTYPE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_seconds([lambda: target.copy_(source)]) / 1e9


class HostToDevice:
    """Copies from one large piece of mapped host memory."""

    def __init__(self) -> None:
        self._host, self._device = map_host(HOME_BYTES)
        # Random contents: a link or a memory controller that compresses gains nothing from them.
        self._host.view(torch.int64).random_()
        self._target = torch.empty(MOVED_BYTES, dtype=torch.uint8, device="cuda")

    def large(self) -> float:
        """One copy by the copy engine, large enough that nothing but the link counts."""
        target = torch.empty(LARGE_BYTES, dtype=torch.uint8, device="cuda")
        source = self._host[:LARGE_BYTES]
        return LARGE_BYTES / graph_seconds([lambda: target.copy_(source, non_blocking=True)]) / 1e9

    def copy_engine(self, unit_kib: int) -> float:
        """One copy per unit by the copy engine, from random places, in a graph."""
        size = unit_kib * 1024
        sources = torch.randperm(HOME_BYTES // size)[:COPIES].tolist()
        host, target = self._host.view(-1, size), self._target.view(-1, size)

        def copy() -> None:
            for i, source in enumerate(sources):
                target[i % len(target)].copy_(host[source], non_blocking=True)

        return COPIES * size / graph_seconds([copy], repeats=10) / 1e9

    def gather(self, unit_kib: int, programs: int, **tuning: int) -> float:
        """The units of a list by `recall_units`."""
        page, head_size = UNITS[unit_kib]
        home = self._device.view(DTYPE).view(-1, 1, page, 2 * head_size)
        slots = self._target.view(DTYPE).view(-1, page, 2 * head_size)
        sources = torch.randperm(len(home), device="cuda")[: len(slots)].int()
        targets = torch.randperm(len(slots), device="cuda").int()
        count = torch.tensor([len(slots)], dtype=torch.int32, device="cuda")

        def recall() -> None:
            kernels.recall_units(home, slots, sources, targets, count, programs=programs, **tuning)

        seconds = graph_seconds([recall], repeats=10)
        # As integers: among random bits there are NaNs, which are not equal to themselves.
        arrived = slots.view(torch.int32)[targets.long()]
        if not torch.equal(arrived, home.flatten(0, 1).view(torch.int32)[sources.long()]):
            raise RuntimeError("the gather did not deliver what the home holds")
        return slots.nbytes / seconds / 1e9

    def write(self, tokens: int, mapped: bool) -> float:
        """New keys and values of `tokens` tokens to random places of a home."""
        shape = (-1, KV_HEADS, PAGE, 2 * HEAD_SIZE)
        home = self._device.view(DTYPE).view(shape)
        if not mapped:
            home = torch.empty_like(home)
        key, value = torch.randn(2, tokens, KV_HEADS, HEAD_SIZE, device="cuda").to(DTYPE)
        places = torch.randperm(len(home) * PAGE, device="cuda")[:tokens]
        seconds = graph_seconds([lambda: kernels.write_kv(key, value, places, home, [])])
        return 2 * key.nbytes / seconds / 1e9


def main() -> None:
    """Measure everything; tables last."""
    report = Report(parser(MODULE, __doc__).parse_args().output, gpu_header(MODULE))
    copy = report.measure("device copy, read + written", device_copy)
    link = HostToDevice()
    large = report.measure("copy engine, 1 GiB", link.large)
    report.table("Ceilings, GB/s", ["device copy", "host to device"], [[copy, large]])

    programs = (*PROGRAMS, multiprocessors())
    rows: list[list[Any]] = []
    for unit in UNITS:
        engine = report.measure(f"copy engine, {unit} KiB", partial(link.copy_engine, unit))
        gathers = [
            report.measure(f"gather, {unit} KiB, {p} programs", partial(link.gather, unit, p))
            for p in programs
        ]
        rows.append([unit, engine, *gathers])
    columns = ["unit, KiB", "copy engine", *[f"{p} SMs" for p in programs]]
    report.table("Host to device by unit, GB/s: copy engine, gather", columns, rows)

    variants = itertools.product((1, 2, 3, 4), (4096, 8192, 16384), (4, 8, 16))
    found = []
    for stages, chunk, warps in variants:
        tuning = {"stages": stages, "chunk_bytes": chunk, "warps": warps}
        speed = report.measure(
            f"gather, 16 KiB, 16 programs, {tuning}", partial(link.gather, 16, 16, **tuning)
        )
        found.append([stages, chunk, warps, speed or 0.0])
    best = sorted(found, key=lambda row: -row[-1])[:5]
    report.table(
        "Gather, 16 KiB on 16 SMs, best variants", ["stages", "chunk", "warps", "GB/s"], best
    )

    writes = [
        [
            tokens,
            *[
                report.measure(
                    f"write, {tokens} tokens, {'host' if mapped else 'device'}",
                    partial(link.write, tokens, mapped),
                )
                for mapped in (True, False)
            ],
        ]
        for tokens in (1, 8, 64, 512, 8192)
    ]
    report.table("Write-through, GB/s", ["tokens", "to host", "to device"], writes)
    report.finish()


if __name__ == "__main__":
    main()
