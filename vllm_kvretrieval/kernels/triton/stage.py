"""Contexts from mapped host memory into a buffer on the device, for prefill."""

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.triton.checks import check_list, check_units
from vllm_kvretrieval.kernels.triton.recall import CHUNK_BYTES


@triton.jit(do_not_specialize=["rows"])
def _stage_kernel(
    home,
    buffer,
    block_table,
    lengths,
    starts,
    rows,
    table_stride,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,  # 4-byte words of a page of all KV heads; as is CHUNK
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    chunks: tl.constexpr = WORDS // CHUNK
    for row in tl.range(rows):
        start = tl.load(starts + row).to(tl.int64)
        work = tl.cdiv(tl.load(lengths + row), PAGE) * chunks
        pages = block_table + tl.cast(row, tl.int64) * table_stride
        for item in tl.range(tl.program_id(0), work, tl.num_programs(0), num_stages=STAGES):
            position = item // chunks
            words = item % chunks * CHUNK + tl.arange(0, CHUNK)
            source = tl.load(pages + position).to(tl.int64)
            copied = tl.load(home + source * WORDS + words)
            tl.store(buffer + (start + position) * WORDS + words, copied)


def stage_context(
    home: torch.Tensor,
    buffer: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    *,
    programs: int = 16,
    chunk_bytes: int = CHUNK_BYTES,
    stages: int = 3,
    warps: int = 8,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.stage_context`.

    The programs share out the pages of each context, cut into chunks; each keeps ``stages - 1``
    chunks in flight.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature.
    """
    check_units("home", home, buffer.dtype)
    check_units("buffer", buffer, buffer.dtype)
    check_list("lengths", lengths, (len(lengths),), torch.int32)
    check_list("starts", starts, (len(lengths),), torch.int32)
    if home.shape[1:] != buffer.shape[1:]:
        raise ValueError(f"pages of {list(home.shape[1:])} do not fit {list(buffer.shape[1:])}")
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError(f"block_table must be int32 with contiguous rows, got {block_table.dtype}")
    words = buffer[0].numel() * buffer.element_size() // 4
    chunk = min(chunk_bytes // 4, words & -words)  # a power of two that divides the page
    _stage_kernel[(programs,)](
        home.view(torch.int32),
        buffer.view(torch.int32),
        block_table,
        lengths,
        starts,
        len(lengths),
        block_table.stride(0),
        PAGE=home.shape[2],
        WORDS=words,
        CHUNK=chunk,
        STAGES=stages,
        num_warps=warps,
        enable_fp_fusion=True,
    )
