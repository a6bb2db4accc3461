"""The page index made from vLLM's KV cache, against the one that is kept as keys are written."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from tests.spec import ops as reference
from tests.support.covering import covering
from tests.support.isas import visited
from tests.support.kernel_checks import (
    DTYPES,
    KERNELS,
    MIN_MAX,
    OutsideMean,
    assert_same_records,
    fresh_records,
    make_chooser,
    specified,
)
from vllm_kvretrieval.kernels import IndexRecords, cpu
from vllm_kvretrieval.retrieval.index import make_index

pytestmark = pytest.mark.threads

current_platform.import_kernels()
PAGES, HEADS, LISTED = 12, 2, 9
SHAPES = [  # layout, head size, page size, tokens of an entry
    ("vec", 64, 32, 32),
    ("vec", 128, 32, 8),
    ("vec", 256, 64, 32),
    ("vec", 64, 128, 128),
    ("vec", 80, 256, 256),
    ("vec16", 80, 32, 16),
    ("vec16", 64, 16, 16),
    ("vec16", 80, 16, 8),
    ("amx", 64, 32, 32),
    ("amx", 128, 64, 8),
    ("amx", 256, 32, 16),
    ("amx", 64, 256, 64),
]


def cache_of(dtype, layout, head_size, page_size, lengths):
    """Keys, the slots they have, and vLLM's KV cache with them in it and noise elsewhere."""
    pages = torch.randperm(PAGES)[:LISTED]
    slots = [
        p * page_size + t for p, n in zip(pages.tolist(), lengths, strict=True) for t in range(n)
    ]
    fused = torch.randn(len(slots), HEADS + 2, head_size)
    fused[fused.abs() < 0.7] *= 0  # zeros of either sign: the later one counts
    key = fused.to(dtype)[:, 1 : 1 + HEADS]
    kv_cache = torch.randn(PAGES, HEADS, page_size, 2 * head_size).to(dtype) * 9
    keys, values = kv_cache.view(PAGES, HEADS, 2 * page_size, head_size).chunk(2, dim=2)
    slot_mapping = torch.tensor(slots)
    try:
        ops.cpu_attn_reshape_and_cache(key, key, keys, values, slot_mapping, layout)
    except RuntimeError as error:  # vLLM's kernels for AVX2 do without
        if layout != "amx" or "Unsupported CPU attention configuration" not in str(error):
            raise
        write_amx(key, slot_mapping, kv_cache)
    return key, slot_mapping, kv_cache, pages.int()


def write_amx(key, slot_mapping, kv_cache):
    """Write keys as the op does for this layout: the reverse of reference.keys_of."""
    _, _, page_size, width = kv_cache.shape
    size, per_word = width // 2, 4 // kv_cache.element_size()
    for page in slot_mapping.div(page_size, rounding_mode="floor").unique():
        keys = reference.keys_of(kv_cache[page], "amx").clone()
        own = slot_mapping // page_size == page
        keys[:, slot_mapping[own] % page_size] = key[own].transpose(0, 1)
        words = keys.view(HEADS, page_size // 16, 16, size // per_word, per_word).transpose(2, 3)
        kv_cache[page].view(HEADS, 2, -1)[:, 0] = words.reshape(HEADS, -1)


def store_of(index, dtype, head_size, page_size, entry_tokens, **options):
    """A store with arbitrary numbers in all records."""
    shape = {"pages": PAGES, "kv_heads": HEADS, "head_size": head_size, "page_size": page_size}
    store = IndexRecords.empty(index, dtype=dtype, entry_tokens=entry_tokens, **shape, **options)
    store.records.random_(60)  # below the bytes of what is not finite
    return store


@covering(index=KERNELS, layout__head_size__page_size__entry_tokens=SHAPES, dtype=DTYPES)
def test_index_is_that_of_writes(index, dtype, layout, head_size, page_size, entry_tokens):
    """And what is read for an index without kernels, or with no record, are the keys."""
    torch.manual_seed(0)
    lengths = [page_size] * 4 + torch.randint(1, page_size + 1, (LISTED - 4,)).tolist()
    key, slot_mapping, kv_cache, pages = cache_of(dtype, layout, head_size, page_size, lengths)
    options = {"cache": kv_cache, "layout": layout}
    shape = dtype, head_size, page_size, entry_tokens
    if index == "exact":
        store = store_of(make_index(index), *shape, **options)
        entry, offset = slot_mapping // entry_tokens, slot_mapping % entry_tokens
        for _ in visited():
            read = cpu.read_keys(torch.arange(len(store.records)), store)
            assert torch.equal(read[entry, offset], key.float())
        return
    before = store_of(make_index(index), *shape, **options)
    expected, arguments = fresh_records(before), (pages, torch.tensor(lengths).int())
    specified(reference.index_pages, *arguments, expected)
    touched = torch.zeros(PAGES, page_size // entry_tokens, dtype=torch.bool)
    for page, length in zip(pages.tolist(), lengths, strict=True):
        whole = -(-length // entry_tokens) if index == "min_max" else length // entry_tokens
        touched[page, :whole] = True
    touched = touched.flatten()
    for _ in visited():
        written, loaded = fresh_records(before), fresh_records(before)
        cpu.update_index(key, slot_mapping, written)
        cpu.index_pages(*arguments, loaded)
        assert torch.equal(written.records, loaded.records)
        assert_same_records(loaded, expected)
        assert torch.equal(loaded.records[~touched], before.records[~touched])
        differ = (loaded.records != before.records).any(-1)
        assert torch.equal(differ, touched[:, None].expand(-1, HEADS))


@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_index_of_another_package(layout):
    torch.manual_seed(1)
    lengths = [32] * 4 + torch.randint(1, 33, (LISTED - 4,)).tolist()
    key, slot_mapping, kv_cache, pages = cache_of(torch.bfloat16, layout, 64, 32, lengths)
    options = {"cache": kv_cache, "layout": layout}
    written = store_of(OutsideMean(), torch.bfloat16, 64, 32, 8, **options)
    loaded, expected = fresh_records(written), fresh_records(written)
    cpu.update_index(key, slot_mapping, written)
    cpu.index_pages(pages, torch.tensor(lengths).int(), loaded)
    specified(reference.index_pages, pages, torch.tensor(lengths).int(), expected)
    assert torch.equal(written.records, loaded.records)
    assert torch.equal(expected.records, loaded.records)


@pytest.mark.parametrize("layout", ["vec", "amx"])
@pytest.mark.parametrize("index", ["min_max", "mean", "one_bit"])
def test_many_pages(isa, index, layout):
    """There are so many that threads share them."""
    torch.manual_seed(2)
    expected = make_chooser(600, 1, 3, 1, 64, torch.bfloat16, index=make_index(index)).store
    expected = replace(expected, layout=layout, handle=None)
    store = fresh_records(expected)
    arguments = torch.randperm(600)[:500].int(), torch.full((500,), 32).int()
    before = store.records.clone()
    store.records.zero_()
    cpu.index_pages(*arguments, store)
    listed = torch.zeros(600, dtype=torch.bool)
    listed[arguments[0].long()] = True
    assert not store.records[~listed].any()
    entries = arguments[0].long()
    expected.records[entries] = reference.build(reference.keys_of_entries(entries, store), store)
    expected.records[~listed] = 0
    assert_same_records(store, expected)
    assert (layout == "vec") == torch.equal(store.records[listed], before[listed])
    unchanged = store.records.clone()
    cpu.index_pages(torch.empty(0).int(), torch.empty(0).int(), store)
    assert torch.equal(unchanged, store.records)


def test_what_does_not_fit_is_refused():
    kv_cache = torch.randn(PAGES, HEADS, 32, 128).to(torch.bfloat16)
    store = store_of(MIN_MAX, torch.bfloat16, 64, 32, 32, cache=kv_cache)
    before = store.records.clone()
    page, length = torch.tensor([3]).int(), torch.tensor([32]).int()
    fits = [page, length, store]
    for place, wrong, message in (
        (2, {"layout": "neon"}, "'neon' lays out keys is not known"),
        (2, {"cache": kv_cache.half()}, "cache must be torch.bfloat16"),
        (2, {"cache": kv_cache[:-1]}, r"\(12, 2, 32, 128\) and contiguous, got"),
        (
            2,
            {"cache": kv_cache.transpose(0, 1).contiguous().transpose(0, 1)},
            "and contiguous, got",
        ),
        (2, {"cache": None}, "has no cache to read keys from"),
        (0, page.long(), "pages must be torch.int32"),
        (1, length.long(), "lengths must be torch.int32"),
        (1, length.repeat(2), r"\(2,\) lengths for \(1,\) pages"),
        (0, page + 9, r"pages\[0\] is 12 with 32 tokens, the cache has 12 pages of 32"),
        (0, -page, r"pages\[0\] is -3 with"),
        (1, length + 1, "with 33 tokens"),
        (1, length - 32, "with 0 tokens"),
        (2, {"entry_tokens": 4, "records": store.records.repeat(8, 1, 1)}, "only 8 to 256"),
    ):
        for index in (MIN_MAX, make_index("one_bit"), OutsideMean()):
            fits[2] = store
            if index != MIN_MAX:
                fits[2] = store_of(index, torch.bfloat16, 64, 32, 32, cache=kv_cache)
            untouched = fits[2].records.clone()
            misfits: list[Any] = [*fits]
            if isinstance(wrong, dict):
                misfits[2] = replace(fits[2], handle=None, **wrong)
            else:
                misfits[place] = wrong
            with pytest.raises(ValueError, match=message):
                cpu.index_pages(*misfits)
            assert torch.equal(fits[2].records, untouched)
    assert torch.equal(store.records, before)
