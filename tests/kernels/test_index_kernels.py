"""Page indexes: the compiled ops against their specification, per instruction set."""

from dataclasses import replace

import pytest
import torch

from tests.spec import ops as reference
from tests.support.covering import covering
from tests.support.isas import visited
from tests.support.kernel_checks import (
    DTYPES,
    PADDING,
    PAGE,
    RECORDED,
    assert_same_records,
    chunks_of,
    fresh_records,
    make_chooser,
    put_keys,
    specified,
)
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.retrieval.index import make_index

pytestmark = pytest.mark.threads


@covering(index=RECORDED, head_size__parts=[(64, 1), (80, 2), (256, 4)], dtype=DTYPES)
def test_index_equals_reference(index, dtype, head_size, parts):
    torch.manual_seed(0)
    pages, rounds = (40, 12) if index == "min_max" else (16, 8)
    shape = pages, 1, 3, 1, head_size, dtype
    expected = make_chooser(*shape, parts=parts, index=make_index(index)).store
    before = expected.records.clone()
    indexes = {name: fresh_records(expected) for name in visited()}
    for key, slots in chunks_of(pages, 3, head_size, dtype, rounds):
        put_keys(expected, key[: len(slots)], slots)
        padded = torch.cat([slots, PADDING])
        specified(reference.update_index, key, padded, expected)
        for name in visited():
            cpu.update_index(key, padded, indexes[name])
            assert_same_records(indexes[name], expected)
    assert not torch.equal(before, expected.records)


@pytest.mark.parametrize("index", RECORDED)
def test_index_of_a_long_prefill(index):
    """There are so many keys that threads share them."""
    torch.manual_seed(1)
    expected = make_chooser(80, 1, 3, 1, 64, torch.bfloat16, index=make_index(index)).store
    before = fresh_records(expected)
    key = torch.randn(70 * PAGE - 9, 3, 64).to(torch.bfloat16)
    slots = torch.randperm(80)[:70, None] * PAGE + torch.arange(PAGE)
    slots = slots.flatten()[: len(key)]
    put_keys(expected, key, slots)
    specified(reference.update_index, key, slots, expected)
    for _ in visited():
        actual = fresh_records(before)
        cpu.update_index(key, slots, actual)
        assert_same_records(actual, expected)


def test_growing_records_need_no_cache(isa):
    store = make_chooser(8, 1, 2, 1, 64, torch.float32).store
    key, slots = torch.randn(PAGE + 5, 2, 64), torch.arange(PAGE + 5)
    alone = replace(fresh_records(store), cache=None)
    for each in (store, alone):
        cpu.update_index(key, slots, each)
    assert torch.equal(store.records, alone.records)


def test_keys_are_read(isa):
    """Entries in any order; the cache's elements as they are."""
    torch.manual_seed(11)
    for dtype in DTYPES:
        store = make_chooser(30, 1, 3, 1, 80, dtype, parts=4, index=make_index("exact")).store
        for count in (0, 1, 110):
            entries = torch.randperm(120)[:count]
            keys = cpu.read_keys(entries, store)
            assert keys.shape == (count, 8, 3, 80)
            if count:
                assert torch.equal(keys, reference.keys_of_entries(entries, store))
    for wrong, message in (
        (torch.tensor([3, 120]), r"entries\[1\] is 120, the index has 120"),
        (torch.tensor([-1]), r"entries\[0\] is -1, the index"),
        (torch.tensor([1]).int(), r"entries must be torch\.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.read_keys(wrong, store)
    with pytest.raises(ValueError, match="no cache to read keys from"):
        cpu.read_keys(torch.tensor([0]), replace(store, cache=None, handle=None))
