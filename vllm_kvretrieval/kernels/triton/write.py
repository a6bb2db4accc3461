"""Write-through: new keys and values to mapped host memory and to the slots of their pages."""

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.triton.checks import check_heads, check_list, check_units

MAX_HEADS = 8
"""KV heads that one program writes, at most."""


@triton.jit
def _write_kernel(
    key,
    value,
    slot_mapping,
    home,
    slots,
    tail_slots,
    key_stride,
    value_stride,
    kv_heads,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    destination = tl.load(slot_mapping + token)
    if destination < 0:
        return
    page = destination // PAGE
    offset = destination % PAGE
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    mask = (heads < kv_heads)[:, None] & (dims < HEAD_SIZE)[None, :]
    read = heads[:, None] * HEAD_SIZE + dims[None, :]
    k = tl.load(key + token * key_stride + read, mask=mask)
    v = tl.load(value + token * value_stride + read, mask=mask)

    row = ((page * kv_heads + heads) * PAGE + offset) * (2 * HEAD_SIZE)
    written = row[:, None] + dims[None, :]
    tl.store(home + written, k, mask=mask)
    tl.store(home + written + HEAD_SIZE, v, mask=mask)
    if HAS_TAIL:
        slot = tl.load(tail_slots + token * kv_heads + heads, mask=heads < kv_heads, other=-1)
        row = (slot.to(tl.int64) * PAGE + offset) * (2 * HEAD_SIZE)
        written = row[:, None] + dims[None, :]
        mask = mask & (slot >= 0)[:, None]
        tl.store(slots + written, k, mask=mask)
        tl.store(slots + written + HEAD_SIZE, v, mask=mask)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    home: torch.Tensor,
    slots: torch.Tensor,
    tail_slots: torch.Tensor | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.write_kv`.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature.
    """
    _, kv_heads, page, row = home.shape
    head_size, tokens = row // 2, len(slot_mapping)
    check_units("home", home, key.dtype)
    check_units("slots", slots, key.dtype)
    check_heads("key", key, head_size, key.dtype)
    check_heads("value", value, head_size, key.dtype)
    check_list("slot_mapping", slot_mapping, (tokens,), torch.int64)
    if tail_slots is not None:
        check_list("tail_slots", tail_slots, (tokens, kv_heads), torch.int32)
    if tokens == 0:
        return
    heads = min(triton.next_power_of_2(kv_heads), MAX_HEADS)
    _write_kernel[(tokens, triton.cdiv(kv_heads, heads))](
        key,
        value,
        slot_mapping,
        home,
        slots,
        tail_slots,
        key.stride(0),
        value.stride(0),
        kv_heads,
        HEAD_SIZE=head_size,
        PAGE=page,
        HEADS=heads,
        DIMS=triton.next_power_of_2(head_size),
        HAS_TAIL=tail_slots is not None,
        enable_fp_fusion=True,
    )
