"""Records of page indexes, built from the keys in the cache."""

from collections.abc import Collection

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import RECORD_ALIGNMENT
from vllm_kvretrieval.kernels.triton.checks import check_list, check_units
from vllm_kvretrieval.kernels.triton.entries import entry_to_build, keys_of_entry
from vllm_kvretrieval.kernels.triton.low_rank import build_low_rank
from vllm_kvretrieval.kernels.triton.one_bit import build_bits
from vllm_kvretrieval.kernels.types import IndexRecords
from vllm_kvretrieval.retrieval.index.base import Index
from vllm_kvretrieval.retrieval.index.bounding import Bounding
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.landmark import Landmark
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean import Mean
from vllm_kvretrieval.retrieval.index.mean_std import MeanStd
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.index.one_bit import OneBit
from vllm_kvretrieval.retrieval.index.representative import KEPT, Representative

KINDS: dict[type[Index], int] = {
    MinMax: 0,
    Mean: 1,
    MeanStd: 2,
    LowRank: 3,
    Bounding: 4,
    Representative: 5,
    Exact: 6,
    Landmark: 7,
}
"""Indexes by which pages are scored; their numbers in kernels. Tokens are scored by ``OneBit``."""

MIN_MAX = tl.constexpr(KINDS[MinMax])
MEAN = tl.constexpr(KINDS[Mean])
MEAN_STD = tl.constexpr(KINDS[MeanStd])
LOW_RANK = tl.constexpr(KINDS[LowRank])
BOUNDING = tl.constexpr(KINDS[Bounding])
REPRESENTATIVE = tl.constexpr(KINDS[Representative])
EXACT = tl.constexpr(KINDS[Exact])
LANDMARK = tl.constexpr(KINDS[Landmark])
_KEPT = tl.constexpr(KEPT)


@triton.jit
def _record(
    k,
    to,
    mask,
    spread,
    KIND: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Write the record of an entry with the keys ``k``, float32 [ENTRY, DIMS]."""
    dims = tl.arange(0, DIMS)
    kind = to.dtype.element_ty
    mean = tl.sum(k, 0) / ENTRY
    rest = k - mean[None, :]
    if KIND == REPRESENTATIVE:
        distance = tl.sum(rest * rest, 1)
        token = tl.arange(0, ENTRY)
        mean = tl.zeros([DIMS], tl.float32)
        for _ in tl.static_range(min(_KEPT, ENTRY)):
            farthest = token == tl.argmax(distance, 0)
            mean += tl.sum(tl.where(farthest[:, None], k, 0.0), 0)
            distance = tl.where(farthest, -1.0, distance)
        mean /= min(_KEPT, ENTRY)
    tl.store(to + dims, mean.to(kind), mask=mask)
    if KIND == MEAN_STD:
        std = spread * tl.sqrt(tl.sum(rest * rest, 0) / ENTRY)
        tl.store(to + HEAD_SIZE + dims, std.to(kind), mask=mask)
    elif KIND == BOUNDING:
        radius = tl.sqrt(tl.max(tl.sum(rest * rest, 1), 0))
        tl.store((to + HEAD_SIZE).to(tl.pointer_type(tl.float32), bitcast=True), radius)
    elif KIND == LANDMARK:
        norms = tl.sqrt(tl.sum(k * k, 1)) * tl.sqrt(tl.sum(mean * mean, 0))
        cosines = tl.where(norms == 0, 0.0, tl.sum(k * mean[None, :], 1) / norms)
        least = tl.minimum(tl.min(cosines, 0), 1.0)
        unknown = tl.max((cosines != cosines).to(tl.int32), 0)  # one suffices
        least = tl.where(unknown != 0, float("nan"), least)
        tl.store((to + HEAD_SIZE).to(tl.pointer_type(tl.float32), bitcast=True), least)


@triton.jit
def build_record(
    keys,
    to,
    spread,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Build the record of an entry.

    Args:
        keys: Pointers [ENTRY, 1] to the keys of its tokens.
        to: Where the record goes.
        spread, KIND, RANK: Of the index; see :func:`spread_of` and :func:`constants_of`.
    """
    if KIND == LOW_RANK:
        HALF: tl.constexpr = HEAD_SIZE // 2
        dims = tl.arange(0, DIMS // 2)
        mask = (dims < HALF)[None, :]
        low = tl.load(keys + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        high = tl.load(keys + HALF + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        build_low_rank(low, high, to, RANK, HEAD_SIZE, ENTRY, DIMS // 2)
    else:
        dims = tl.arange(0, DIMS)
        mask = dims < HEAD_SIZE
        k = tl.load(keys + dims[None, :], mask=mask[None, :], other=0.0).to(tl.float32)
        if KIND == MIN_MAX:
            kind = to.dtype.element_ty
            tl.store(to + dims, tl.min(k, 0).to(kind), mask=mask)
            tl.store(to + HEAD_SIZE + dims, tl.max(k, 0).to(kind), mask=mask)
        else:
            _record(k, to, mask, spread, KIND, HEAD_SIZE, ENTRY, DIMS)


@triton.jit(do_not_specialize=["spread"])
def _build_kernel(
    entries,
    cache,
    records,
    spread,
    kv_heads,
    KIND: tl.constexpr,
    RECORD: tl.constexpr,  # elements
    FROM_SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    DIMS: tl.constexpr,
):
    head = tl.program_id(1)
    entry = entry_to_build(entries, FROM_SLOTS, ENTRY)
    if entry < 0:
        return
    keys = keys_of_entry(cache, entry, head, kv_heads, HEAD_SIZE, PAGE, ENTRY)[:, None]
    to = records + (entry * kv_heads + head) * RECORD
    build_record(keys, to, spread, KIND, RANK, HEAD_SIZE, ENTRY, DIMS)


def grows(store: IndexRecords) -> bool:
    """Whether records cover unfinished entries."""
    return store.index is not None and store.index.grows


def elements(store: IndexRecords) -> torch.Tensor:
    """What the kernels read to score: records, of the cache's dtype or bytes, or the cache."""
    if isinstance(store.index, Exact):
        assert store.cache is not None
        return store.cache
    return store.records if isinstance(store.index, LowRank) else store.records.view(store.dtype)


def check_store(
    store: IndexRecords,
    cache: torch.Tensor | None = None,
    kinds: Collection[type[Index]] = (*KINDS, OneBit),
) -> None:
    """Refuse a store that the kernels cannot serve.

    Args:
        store: It.
        cache: What it has to be over; None: its own, which an index that grows may lack.
        kinds: Indexes that are served; by default all that are built.

    Raises:
        ValueError: Says what is wrong.
    """
    if store.index is None:
        return
    if type(store.index) not in kinds:
        known = ", ".join(kind.name for kind in kinds)
        raise ValueError(f"there is no kernel for index={store.index.name}; use one of {known}")
    page, size, held = store.page_size, store.head_size, store.cache
    pages, kv_heads = store.pages, store.kv_heads
    if held is not None and (cache is None or held.data_ptr() == cache.data_ptr()):
        check_units("the index's cache", held, store.dtype)
        pages, kv_heads, page, width = held.shape
        size = width // 2
    elif cache is not None or store.index.reads_keys:
        raise ValueError("the index is not over the cache that is written")
    sizes = size, store.entry_tokens, store.dtype, RECORD_ALIGNMENT
    shape = pages * store.parts, kv_heads, store.index.record_bytes(*sizes)
    check_list("the index's records", store.records, shape, torch.uint8)
    if page != store.page_size or store.layout != "token_major":
        raise ValueError(f"the index is for pages of {store.page_size} tokens, laid out as rows")


def build_entries(slot_mapping: torch.Tensor, store: IndexRecords) -> None:
    """Build the records of entries whose last tokens have just been written, if it has records."""
    if store.records.shape[2]:
        _build(slot_mapping, True, store)


def index_pages(pages: torch.Tensor, store: IndexRecords) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.index_pages`.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature, or there is
            no kernel for the index.
    """
    check_list("pages", pages, (len(pages),), torch.int32)
    check_store(store)
    if not store.records.shape[2] or len(pages) == 0:
        return
    if store.cache is None:
        raise ValueError("the index has no cache with the keys of pages")
    parts = torch.arange(store.parts, device=pages.device)
    _build((pages[:, None] * store.parts + parts).flatten(), False, store)


def _build(entries: torch.Tensor, from_slots: bool, store: IndexRecords) -> None:
    index, cache, records = store.index, store.cache, elements(store)
    if isinstance(index, OneBit):
        build_bits(entries, from_slots, store)
        return
    assert index is not None
    assert cache is not None
    _build_kernel[(len(entries), store.kv_heads)](
        entries,
        cache,
        records,
        spread_of(store),
        store.kv_heads,
        FROM_SLOTS=from_slots,
        **constants_of(store),
        num_warps=4,
        enable_fp_fusion=True,
    )


def constants_of(store: IndexRecords) -> dict[str, int]:
    """Constants of kernels that build records of a store."""
    index, size = store.index, store.head_size
    assert index is not None
    rank = index.directions(size, store.entry_tokens) if isinstance(index, LowRank) else 0
    return {
        "KIND": KINDS[type(index)],
        "RECORD": store.records.shape[2] // elements(store).element_size(),
        "RANK": rank,
        "HEAD_SIZE": size,
        "PAGE": store.page_size,
        "ENTRY": store.entry_tokens,
        "DIMS": triton.next_power_of_2(size),
    }


def spread_of(store: IndexRecords) -> float:
    """The weight of deviations in records of means and deviations."""
    return store.index.spread if isinstance(store.index, MeanStd) else 0.0
