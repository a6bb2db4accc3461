"""New keys and values to the slots of their pages."""

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import DeviceRows
from vllm_kvretrieval.kernels.slots import Residency
from vllm_kvretrieval.kernels.triton.checks import check_heads, check_list, check_units


@triton.jit
def _write_tail_kernel(
    key,
    value,
    seats,
    choosers,
    fresh,
    seq_lens,
    held,
    slots,
    key_stride,
    value_stride,
    kv_heads,
    capacity,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    DIMS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    if (tl.load(choosers + row) < 0) | (tl.load(fresh + row) != 0):
        return
    last = tl.load(seq_lens + row) - 1
    first = (tl.load(seats + row) * kv_heads + head) * capacity
    slot = tl.arange(0, SLOTS)
    page = tl.load(held + first + slot, mask=slot < capacity, other=-1)
    found = tl.max(tl.where(page == last // PAGE, first + slot, -1), 0)
    if found < 0:
        return
    dims = tl.arange(0, DIMS)
    mask = dims < HEAD_SIZE
    token = row.to(tl.int64)
    read = head * HEAD_SIZE + dims
    written = (found.to(tl.int64) * PAGE + last % PAGE) * (2 * HEAD_SIZE) + dims
    k = tl.load(key + token * key_stride + read, mask=mask)
    tl.store(slots + written, k, mask=mask)
    v = tl.load(value + token * value_stride + read, mask=mask)
    tl.store(slots + written + HEAD_SIZE, v, mask=mask)


def write_tail(
    key: torch.Tensor,
    value: torch.Tensor,
    rows: DeviceRows,
    residency: Residency,
    slots: torch.Tensor,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.write_tail`.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature.
    """
    seats, kv_heads, capacity = residency.held.shape
    _, page, width = slots.shape
    check_units("slots", slots, key.dtype)
    check_heads("key", key, width // 2, key.dtype)
    check_heads("value", value, width // 2, key.dtype)
    check_list("held", residency.held, (seats, kv_heads, capacity), torch.int32)
    if len(slots) != residency.held.numel():
        raise ValueError(f"{len(slots)} slots, but {residency.held.numel()} that may hold a page")
    if len(rows) == 0:
        return
    _write_tail_kernel[(len(rows), kv_heads)](
        key,
        value,
        rows.seats,
        rows.choosers,
        rows.fresh,
        rows.seq_lens,
        residency.held,
        slots,
        key.stride(0),
        value.stride(0),
        kv_heads,
        capacity,
        HEAD_SIZE=width // 2,
        PAGE=page,
        SLOTS=triton.next_power_of_2(capacity),
        DIMS=triton.next_power_of_2(width // 2),
        num_warps=2,
        enable_fp_fusion=True,
    )
