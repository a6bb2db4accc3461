"""Low-rank factors in C++: built otherwise than by the specification, scored alike."""

from dataclasses import replace

import pytest
import torch

from tests.spec import ops as reference
from tests.support.covering import covering
from tests.support.kernel_checks import (
    DTYPES,
    PAGE,
    assert_same_plan,
    assert_selects_each_once,
    copy_of,
    keys_in,
    make_chooser,
    make_rows,
    take_in,
)
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.retrieval.index import unpack
from vllm_kvretrieval.retrieval.index.low_rank import LowRank, channels_of, scales_of, tokens_of
from vllm_kvretrieval.retrieval.pooling import Pooling

pytestmark = pytest.mark.threads


def keys_of(store, entries):
    """The keys of all KV heads, [n, tokens, head_size]."""
    return reference.keys_of_entries(entries, store).transpose(1, 2).flatten(0, 1)


def approximated(store, records):
    """The keys that records stand for, [n, tokens, head_size]."""
    fields = store.index.fields(store.head_size, store.entry_tokens)
    record = unpack(fields, records.flatten(0, 1), store.dtype)
    mean_scale = record["mean_scale"].float()
    mean = record["mean"].float() * mean_scale
    scales = scales_of(record["scales"]) * mean_scale
    rank = scales.shape[1]
    directions = channels_of(record["directions"], rank, store.head_size)
    coefficients = tokens_of(record["coefficients"], rank)
    parts = torch.einsum("nr,nrt,nrd->ntd", scales, coefficients, directions)
    return mean[:, None] + parts


@covering(
    kv_heads__group__head_size__page_size__parts__rank=[
        (3, 3, 64, 32, 1, 0),
        (2, 7, 64, 32, 2, 4),
        (1, 4, 256, 32, 1, 0),
        (2, 4, 128, 64, 1, 16),
        (1, 11, 80, 16, 1, 1),
        (2, 1, 96, 128, 1, 8),
        (1, 5, 64, 256, 1, 0),
        (1, 3, 80, 16, 1, 4),
        (1, 2, 48, 32, 1, 15),
    ],
    pooling=[Pooling.MEAN_SOFTMAX, Pooling.MAX],
    dtype=DTYPES,
)
def test_plan_equals_reference(dtype, pooling, kv_heads, group, head_size, page_size, parts, rank):
    """On the same records: a context of more entries than one task scores, and one beside it."""
    torch.manual_seed(rank)
    options = {"parts": parts, "page_size": page_size, "index": LowRank(rank), "pooling": pooling}
    chooser = make_chooser(160, 2, kv_heads, group, head_size, dtype, **options)
    query = torch.randn(2, kv_heads * group, head_size).to(dtype)
    rows = make_rows([150 * page_size - 3, 12 * page_size], chooser, (1, 1, 8), fresh=1)
    assert_same_plan(chooser, copy_of(chooser), query, rows)


@pytest.mark.parametrize("height", [300, 400, 500, 700, 1000, 1500, 2000])
def test_tokens_far_above_the_mean(height):
    """Logits of hundreds: one unit of what lies along the directions is more than a factor of 2."""
    for seed in range(10):
        torch.manual_seed(seed)
        chooser = make_chooser(12, 1, 1, 1, 64, torch.float32, index=LowRank(4))
        query = torch.randn(1, 1, 64)
        rise = height * query[0, 0] / query.square().sum() / chooser.scale
        keys = keys_in(chooser.store)
        keys.mul_(0.01)
        keys[3, 0, :, 0] += (1 + 0.02 * seed) * rise
        keys[5, 0, :, 0] += 0.8 * rise
        take_in(chooser.store, torch.arange(12))
        rows = make_rows([12 * PAGE], chooser, (1, 1, 1), fresh=1)
        rows.block_table = torch.arange(12, dtype=torch.int32)[None]
        assert_same_plan(chooser, copy_of(chooser), query, rows)
        assert chooser.selection.chosen[0, 0, 0] == 3


@pytest.mark.parametrize("decay", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(("head_size", "rank"), [(64, 12), (64, 4), (128, 10)])
def test_keys_are_approximated_nearly_as_well_as_can_be(isa, head_size, rank, decay):
    """Keys whose singular values are alike, and keys whose are not."""
    torch.manual_seed(1)
    store = make_chooser(40, 1, 2, 1, head_size, torch.float32, index=LowRank(rank)).store
    keys = keys_in(store)
    width = torch.exp(-decay * torch.arange(head_size))
    rotation = torch.linalg.qr(torch.randn(head_size, head_size)).Q
    noise = torch.randn(40, 2, PAGE, head_size) * width @ rotation
    keys.copy_((noise + 3 * torch.randn(40, 2, 1, head_size)).transpose(2, 3))
    cpu.index_pages(torch.arange(40).int(), torch.full((40,), PAGE).int(), store)
    entries = torch.arange(40)
    true = keys_of(store, entries)
    specified = reference.build(reference.keys_of_entries(entries, store), store)
    ours, best = (
        (approximated(store, records) - true).norm() for records in (store.records, specified)
    )
    assert ours < 1.06 * best
    spread = (true - true.mean(1, keepdim=True)).norm()
    assert ours < 0.9 * spread


@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_records_are_built_when_the_last_token_is_written(isa, layout):
    torch.manual_seed(2)
    index = LowRank()
    made = make_chooser(6, 1, 2, 1, 64, torch.bfloat16, parts=2, index=index).store
    written = replace(made, records=torch.zeros_like(made.records), layout=layout, handle=None)
    loaded = replace(written, records=torch.zeros_like(made.records), handle=None)
    slots = torch.tensor([*range(2 * PAGE - 12, 2 * PAGE), *range(3 * PAGE, 3 * PAGE + 15)])
    cpu.update_index(torch.randn(len(slots), 2, 64).to(torch.bfloat16), slots, written)
    cpu.index_pages(torch.tensor([1, 3]).int(), torch.tensor([PAGE, 15]).int(), loaded)
    assert written.records[[0, 1, 4, 5, 6, 7]].eq(0).all(), "no entry is complete there"
    assert written.records[2].eq(0).all(), "its last token was written before"
    assert written.records[3].any()
    assert written.records[3].equal(loaded.records[3])


def test_keys_without_differences_and_keys_that_are_no_numbers(isa):
    """Equal keys give their mean. Keys that are NaN make wrong scores only for their own page."""
    torch.manual_seed(3)
    chooser = make_chooser(64, 1, 1, 2, 64, torch.float32, index=LowRank())
    keys = keys_in(chooser.store)
    keys[7] = 0
    keys[8] = keys[8, :, :, :1]
    keys[9, 0, 5, 3] = float("nan")
    keys[10, 0, 5, 3] = float("inf")
    keys[11] *= 1e30
    cpu.index_pages(torch.arange(64).int(), torch.full((64,), PAGE).int(), chooser.store)
    near = approximated(chooser.store, chooser.store.records[7:9])
    step = keys[8].abs().max() / 127
    assert near[0].eq(0).all()
    assert (near[1] - keys[8, 0].T).abs().max() <= step
    for value in (1.0, float("nan"), float("inf"), 1e30, 0.0):
        query = torch.randn(1, 2, 64)
        query[0, 1, 7] *= value
        assert_selects_each_once(query, chooser)


def test_entries_too_small_for_it_are_refused():
    with pytest.raises(ValueError, match="entries of 8 tokens are too small"):
        make_chooser(4, 1, 1, 1, 64, torch.float32, parts=4, index=LowRank())
