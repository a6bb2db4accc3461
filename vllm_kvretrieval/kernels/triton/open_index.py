"""Records of the entries of pages that are not encoded yet, or are in this step."""

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import DeviceRows
from vllm_kvretrieval.kernels.encoded import EncodedUnits
from vllm_kvretrieval.kernels.triton.encoded import SHARING, WARPS, check_written
from vllm_kvretrieval.kernels.triton.index import (
    KINDS,
    build_record,
    check_store,
    constants_of,
    elements,
    spread_of,
)
from vllm_kvretrieval.kernels.types import IndexRecords

LARGE = 128 * 128
"""Numbers of a page's keys in a head from which on a program needs more registers."""


@triton.jit(do_not_specialize=["spread"])
def _index_open_kernel(
    key,
    opened,
    seats,
    query_start,
    seq_lens,
    slot_mapping,
    block_table,
    records,
    spread,
    key_stride,
    table_stride,
    kv_heads,
    KIND: tl.constexpr,
    RECORD: tl.constexpr,  # elements
    RANK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    ENTRY: tl.constexpr,
    DIMS: tl.constexpr,
):
    PARTS: tl.constexpr = PAGE // ENTRY
    row = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    seat = tl.load(seats + row)
    first = tl.load(query_start + row)
    tokens = tl.load(query_start + row + 1) - first
    if (seat < 0) | (tokens <= 0):
        return
    if tl.load(slot_mapping + first) < 0:
        return
    after = tl.load(seq_lens + row)
    before = after - tokens
    table = block_table + row.to(tl.int64) * table_stride
    for entry in tl.range(before // ENTRY + tl.program_id(1), after // ENTRY, tl.num_programs(1)):
        position = entry * ENTRY + tl.arange(0, ENTRY)
        page = entry // PARTS
        place = (seat.to(tl.int64) * RING + page % RING) * kv_heads + head
        old = opened + (place * PAGE + position % PAGE) * (2 * HEAD_SIZE)
        new = key + (first + position - before).to(tl.int64) * key_stride + head * HEAD_SIZE
        keys = tl.where(position < before, old, new)[:, None]
        number = tl.load(table + page).to(tl.int64) * PARTS + entry % PARTS
        to = records + (number * kv_heads + head) * RECORD
        build_record(keys, to, spread, KIND, RANK, HEAD_SIZE, ENTRY, DIMS)


def index_open(
    key: torch.Tensor, rows: DeviceRows, store: EncodedUnits, index: IndexRecords
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.index_open`.

    One program per (row, KV head) where each row has a token; else ``SHARING``.

    Raises:
        ValueError: A tensor's dtype or shape is not that of the signature, or there is no kernel
            for the index.
    """
    _, ring, kv_heads, page, head_size = check_written(key, key, rows, store)
    check_store(index, kinds=KINDS)
    if (index.kv_heads, index.page_size, index.head_size) != (kv_heads, page, head_size):
        raise ValueError("the index is of pages of another shape")
    if len(rows) == 0 or not index.records.shape[2]:
        return
    _index_open_kernel[(len(rows) * kv_heads, 1 if len(key) == len(rows) else SHARING)](
        key,
        store.open,
        rows.seats,
        rows.query_start,
        rows.seq_lens,
        rows.slot_mapping,
        rows.block_table,
        elements(index),
        spread_of(index),
        key.stride(0),
        rows.block_table.stride(0),
        kv_heads,
        RING=ring,
        **constants_of(index),
        num_warps=WARPS if page * head_size < LARGE else 2 * WARPS,
        enable_fp_fusion=True,
    )
