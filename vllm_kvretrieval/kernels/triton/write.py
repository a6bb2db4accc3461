"""New keys and values to the cache, and into the page indexes over it."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.triton.checks import check_heads, check_list, check_units
from vllm_kvretrieval.kernels.triton.index import build_entries, check_store, elements, grows
from vllm_kvretrieval.kernels.types import IndexRecords

MAX_HEADS = 8
"""KV heads that one program writes, at most."""
_AT_ONCE = tl.constexpr(4)
"""Keys that are read at a time to build a record anew."""


@triton.jit(do_not_specialize=["tokens"])
def _write_kernel(
    key,
    value,
    slot_mapping,
    cache,
    records,
    key_stride,
    value_stride,
    kv_heads,
    tokens,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    WRITES: tl.constexpr,
    GROWS: tl.constexpr,
    DRAFTED: tl.constexpr,  # whether records may have rejected drafts
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    mask = (heads < kv_heads)[:, None] & (dims < HEAD_SIZE)[None, :]
    read = heads[:, None] * HEAD_SIZE + dims[None, :]
    k = tl.load(key + token * key_stride + read, mask=mask)
    if WRITES:
        v = tl.load(value + token * value_stride + read, mask=mask)
        row = ((slot // PAGE * kv_heads + heads) * PAGE + slot % PAGE) * (2 * HEAD_SIZE)
        written = row[:, None] + dims[None, :]
        tl.store(cache + written, k, mask=mask)
        tl.store(cache + written + HEAD_SIZE, v, mask=mask)
    if GROWS:
        # The first token of a run within an entry takes all of the run in, so nobody else writes.
        offset = slot % ENTRY
        before = tl.load(slot_mapping + token - 1, mask=token > 0, other=-2)
        if (offset != 0) & (before == slot - 1):
            return
        row = (slot // ENTRY * kv_heads + heads) * (2 * HEAD_SIZE)
        record = row[:, None] + dims[None, :]
        low = k.to(tl.float32)
        high = low
        if DRAFTED:  # the keys of the entry before the run
            for first in tl.range(0, offset, _AT_ONCE):
                earlier = first + tl.arange(0, _AT_ONCE)
                unit = slot // PAGE * kv_heads + heads
                place = unit[None, :] * PAGE + (slot % PAGE - offset + earlier)[:, None]
                there = (earlier < offset)[:, None, None] & mask[None, :, :]
                at = place[:, :, None] * (2 * HEAD_SIZE) + dims[None, None, :]
                held = tl.load(cache + at, mask=there, other=0.0).to(tl.float32)
                low = tl.minimum(low, tl.min(tl.where(there, held, float("inf")), 0))
                high = tl.maximum(high, tl.max(tl.where(there, held, float("-inf")), 0))
        elif offset != 0:
            low = tl.minimum(low, tl.load(records + record, mask=mask).to(tl.float32))
            held = tl.load(records + record + HEAD_SIZE, mask=mask)
            high = tl.maximum(high, held.to(tl.float32))
        count = 1
        more = (token + 1 < tokens) & (offset + 1 < ENTRY)
        more = more & (tl.load(slot_mapping + token + 1, mask=more, other=-2) == slot + 1)
        while more:
            other = tl.load(key + (token + count) * key_stride + read, mask=mask).to(tl.float32)
            low = tl.minimum(low, other)
            high = tl.maximum(high, other)
            count += 1
            more = (token + count < tokens) & (offset + count < ENTRY)
            following = tl.load(slot_mapping + token + count, mask=more, other=-2)
            more = more & (following == slot + count)
        tl.store(records + record, low.to(records.dtype.element_ty), mask=mask)
        tl.store(records + record + HEAD_SIZE, high.to(records.dtype.element_ty), mask=mask)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    indexes: Sequence[IndexRecords],
    *,
    drafted: bool = False,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.write_kv`.

    One launch for the cache and an index that grows, one for every other index.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature, or there is
            no kernel for an index.
    """
    page, width = cache.shape[2:]
    head_size, tokens = width // 2, len(slot_mapping)
    check_units("cache", cache, key.dtype)
    check_heads("key", key, head_size, key.dtype)
    check_heads("value", value, head_size, key.dtype)
    check_list("slot_mapping", slot_mapping, (tokens,), torch.int64)
    for store in indexes:
        check_store(store, cache)
    growing = [store for store in indexes if grows(store)]
    for number, grown in enumerate(growing or [None]):
        _launch(key, value, slot_mapping, cache, grown, page, writes=number == 0, drafted=drafted)
    for store in indexes:
        if tokens and store.index is not None and not grows(store):
            build_entries(slot_mapping, store)


def update_index(key: torch.Tensor, slot_mapping: torch.Tensor, store: IndexRecords) -> None:
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.update_index`.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature, or the index
            does not grow.
    """
    if not grows(store):
        raise ValueError("an index that does not grow is built of the keys in the cache")
    check_store(store)
    check_heads("key", key, store.head_size, store.dtype)
    check_list("slot_mapping", slot_mapping, (len(slot_mapping),), torch.int64)
    of_index = elements(store)  # stands in for a cache that is neither read nor written
    _launch(key, key, slot_mapping, of_index, store, store.page_size, writes=False, drafted=False)


def _launch(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    grown: IndexRecords | None,
    page: int,
    *,
    writes: bool,
    drafted: bool,
) -> None:
    """Write tokens to pages, if this ``writes``, and take their keys into an index that grows."""
    tokens, (kv_heads, head_size) = len(slot_mapping), key.shape[1:]
    if tokens == 0:
        return
    heads = min(triton.next_power_of_2(kv_heads), MAX_HEADS)
    _write_kernel[(tokens, triton.cdiv(kv_heads, heads))](
        key,
        value,
        slot_mapping,
        cache,
        cache if grown is None else elements(grown),
        key.stride(0),
        value.stride(0),
        kv_heads,
        tokens,
        HEAD_SIZE=head_size,
        PAGE=page,
        ENTRY=page if grown is None else grown.entry_tokens,
        HEADS=heads,
        DIMS=triton.next_power_of_2(head_size),
        WRITES=writes,
        GROWS=grown is not None,
        DRAFTED=drafted,
        enable_fp_fusion=True,
    )
