"""Recall: units from mapped host memory into slots, on a bounded number of multiprocessors."""

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.triton.checks import check_list, check_units

CHUNK_BYTES = 16384
"""What a program copies at a time, at most: 16 programs then keep 256 KiB and more in flight."""


@triton.jit
def _recall_kernel(
    home,
    slots,
    sources,
    targets,
    count,
    UNIT: tl.constexpr,  # 4-byte words, as is CHUNK
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    chunks: tl.constexpr = UNIT // CHUNK
    work = tl.load(count) * chunks
    for item in tl.range(tl.program_id(0), work, tl.num_programs(0), num_stages=STAGES):
        entry = item // chunks
        words = item % chunks * CHUNK + tl.arange(0, CHUNK)
        source = tl.load(sources + entry).to(tl.int64)
        target = tl.load(targets + entry).to(tl.int64)
        copied = tl.load(home + source * UNIT + words)
        tl.store(slots + target * UNIT + words, copied)


def recall_units(
    home: torch.Tensor,
    slots: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    count: torch.Tensor,
    *,
    programs: int = 16,
    chunk_bytes: int = CHUNK_BYTES,
    stages: int = 3,
    warps: int = 8,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.recall_units`.

    A persistent grid: the programs share out the listed units, cut into chunks, and each keeps
    ``stages - 1`` chunks in flight. ``home`` is a tensor on the device over host memory, as
    :func:`vllm_kvretrieval.kernels.triton.mapped.map_host` makes it.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature.
    """
    check_units("home", home, slots.dtype)
    check_units("slots", slots, slots.dtype)
    check_list("sources", sources, (len(sources),), torch.int32)
    check_list("targets", targets, (len(sources),), torch.int32)
    check_list("count", count, (1,), torch.int32)
    if home.shape[2:] != slots.shape[1:]:
        raise ValueError(f"units of {list(home.shape[2:])} do not fit {list(slots.shape[1:])}")
    words = slots[0].numel() * slots.element_size() // 4
    chunk = min(chunk_bytes // 4, words & -words)  # a power of two that divides the unit
    _recall_kernel[(programs,)](
        home.view(torch.int32),
        slots.view(torch.int32),
        sources,
        targets,
        count,
        UNIT=words,
        CHUNK=chunk,
        STAGES=stages,
        num_warps=warps,
        enable_fp_fusion=True,
    )
