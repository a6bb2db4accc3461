"""Entries of an index that have the tokens of two pages, each of which has a score."""

import pytest
import torch

from tests.spec import ops as reference
from tests.support.covering import covering
from tests.support.isas import visited
from tests.support.kernel_checks import DTYPES, assert_same_plan, copy_of, make_chooser, make_rows
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.index import unpack
from vllm_kvretrieval.retrieval.index.base import unpack_means
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.pooling import Pooling

pytestmark = pytest.mark.threads

KV_HEADS, GROUP = 2, 3


@covering(
    kv_heads__group__head_size__page_size=[
        (3, 3, 64, 16),
        (1, 7, 128, 16),
        (2, 4, 80, 64),
        (1, 2, 64, 128),
    ],
    pooling=[Pooling.MEAN_SOFTMAX, Pooling.MAX],
    sharp=[1.0, 40.0],
    dtype=DTYPES,
)
def test_plan_equals_reference(dtype, sharp, pooling, kv_heads, group, head_size, page_size):
    """Contexts that end with an entry, and those whose last one or two pages have no record."""
    torch.manual_seed(group)
    chooser = make_chooser(
        300, 3, kv_heads, group, head_size, dtype, parts=0.5, page_size=page_size,
        index=LowRank(), pooling=pooling,
    )  # fmt: skip
    query = (sharp * torch.randn(3, kv_heads * group, head_size)).to(dtype)
    lens = [290 * page_size, 21 * page_size, 40 * page_size - 3]
    rows = make_rows(lens, chooser, (1, 2, 8), fresh=1)
    pages = torch.randperm(150)[:, None] * 2 + torch.arange(2)
    rows.block_table.copy_(pages.flatten()[: rows.block_table.shape[1]].int())
    assert_same_plan(chooser, copy_of(chooser), query, rows)


@pytest.mark.parametrize("layout", ["vec", "rows", "amx"])
@pytest.mark.parametrize("means", [False, True])
def test_entries_of_two_pages(means, layout):
    """Their records, as tokens are written and as pages are loaded, and the scores of each page."""
    torch.manual_seed(5)
    chooser = make_chooser(
        180, 3, KV_HEADS, GROUP, 64, torch.bfloat16, index=LowRank(), parts=0.5, page_size=16,
        means=means, layout=layout,
    )  # fmt: skip
    store, entries = chooser.store, torch.arange(90)
    assert (store.spans, store.pages, len(store.records)) == (2, 180, 90)
    keys = reference.keys_of_entries(entries, store)
    values = reference.values_of_entries(entries, store)
    specified = reference.build(keys, store, values if means else None)
    for half in range(2):
        page = reference.keys_of(store.cache[2 * 7 + half], layout).float().transpose(0, 1)
        assert torch.equal(keys[7, 16 * half : 16 * half + 16], page)
    fields = store.index.fields(64, 32)
    exact = torch.logsumexp(torch.einsum("d,nthd->nht", torch.ones(64) / 8, keys), -1)
    for _ in visited():
        store.records.zero_()
        full = torch.full((180,), 16, dtype=torch.int32)
        cpu.index_pages(torch.arange(180).int(), full, store)
        loaded = store.records.clone()
        record = unpack(fields, loaded.flatten(0, 1), store.dtype)
        pages = store.index.score_pages(torch.ones(1, 64), record, 1 / 8, 2)
        whole = store.index.score(torch.ones(1, 64), record, 1 / 8)
        assert torch.allclose(pages.logsumexp(-1), whole, atol=1e-3)
        off = (whole.view(90, KV_HEADS) - exact).abs()
        assert off.mean() < 0.3 * exact.std()
        if means:
            by_page = values.transpose(1, 2).flatten(0, 1).unflatten(1, (2, 16)).mean(2)
            step = by_page.abs().amax(2, keepdim=True) / 127
            for records in (loaded, specified):
                found = unpack_means(records.flatten(0, 1), 2, 64)
                assert ((found - by_page).abs() <= 0.52 * step).all()
        store.records.zero_()
        key = torch.zeros(3, KV_HEADS, 64, dtype=torch.bfloat16)
        slots = torch.tensor([16 * 15 + 15, 16 * 20 + 15, 16 * 33 + 14])
        cpu.update_index(key, slots, store)
        assert torch.equal(store.records[7], loaded[7])
        assert store.records.any(-1).any(-1).nonzero().flatten().tolist() == [7]


def test_a_window_holds_an_unfinished_entry():
    chooser = make_chooser(60, 1, 1, 1, 64, torch.float32, index=LowRank(), parts=0.5, page_size=16)
    rows = make_rows([800], chooser, (1, 1, 8))
    with pytest.raises(ValueError, match="a window that lacks pages of an unfinished entry"):
        cpu.plan_decode(torch.randn(1, 1, 64), rows, chooser)
    options = {"page_size": 16, "summary_size": 32, "window": 16}
    with pytest.raises(RetrievalConfigError, match="no room for an unfinished entry of 32 tokens"):
        RetrievalConfig.from_options("kvretrieval", options)


def test_what_an_engine_keeps():
    config = RetrievalConfig.from_options(
        "kvretrieval", {"page_size": 16, "summary_size": 32, "also": {"r": {"remainder": 0.01}}}
    )
    assert config.own.entry_pages == 2
    assert config.index_bytes(8192, 64, torch.bfloat16) == 654 + 2 * 66


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"summary_size": 64}, "summary_size=64 is not supported with page_size=16 and an index"),
        ({"summary_size": 32, "index": "mean"}, "summary_size=32 is not supported with page_size"),
        (
            {"summary_size": 32, "rerank": 2},
            "rerank=2 scores pages by their keys, and an entry has",
        ),
    ],
)
def test_refusals(options, message):
    with pytest.raises(RetrievalConfigError, match=message):
        RetrievalConfig.from_options("kvretrieval", {"page_size": 16} | options)
