"""Outliers: some selected pages are those that the means of their keys tell least of."""

from dataclasses import replace

import pytest
import torch

from tests.support.covering import covering
from tests.support.isas import visited
from tests.support.kernel_checks import (
    DTYPES,
    assert_same_plan,
    clone_rows,
    copy_of,
    fields_of,
    keys_in,
    make_chooser,
    make_rows,
    take_in,
)
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.index import make_index
from vllm_kvretrieval.retrieval.pooling import Pooling

pytestmark = pytest.mark.threads

KV_HEADS, GROUP, PAGE = 2, 3, 32
SINK, WINDOW, SELECT = 1, 2, 20
LENS = [90 * PAGE - 5, 60 * PAGE, 40 * PAGE + 1]


def setting(dtype=torch.float32, parts=1, sharp=1.0, lens=LENS, **options):
    """A chooser over keys some of which are unlike the others, queries and rows."""
    chooser = make_chooser(
        120, len(lens), KV_HEADS, GROUP, 64, dtype,
        **{"index": make_index("landmark"), "parts": parts, "outliers": 0.25, **options},
    )  # fmt: skip
    keys = keys_in(chooser.store)
    keys += (3 * torch.randn(120, KV_HEADS, 64, 1)).to(dtype)
    for page in range(0, 120, 3):
        keys[page, page % KV_HEADS, :, page % PAGE] *= -(page % 7) / 3
    take_in(chooser.store, torch.arange(120))
    rows = make_rows(lens, chooser, (SINK, WINDOW, SELECT), tau=1.0)
    return chooser, (sharp * torch.randn(len(lens), KV_HEADS * GROUP, 64)).to(dtype), rows


def chosen(rows, row, head):
    """Positions of the pages that a KV head attends to between sink and window."""
    pages = rows.block_table[row, : -(-int(rows.seq_lens[row]) // PAGE)].tolist()
    attended = SINK + int(rows.select[row]) + WINDOW
    listed = rows.lists[row * KV_HEADS + head, :attended] // KV_HEADS
    places = [pages.index(page) for page in listed.tolist()]
    return places[SINK:-WINDOW]


def least_cosines(chooser, pages, head, parts):
    """float [pages]; the lowest cosine of a key with the mean of its entry."""
    keys = keys_in(chooser.store)[pages, head].float().unflatten(2, (parts, -1))
    return torch.cosine_similarity(keys, keys.mean(3, keepdim=True), dim=1).amin((1, 2))


@covering(
    parts=[1, 2, 4],
    pooling=Pooling,
    dtype=DTYPES,
    outliers=[0.0, 0.05, 0.25, 0.99],
    sharp=[0.3, 2.0, 60.0],
)
def test_equals_reference(parts, pooling, dtype, outliers, sharp):
    """Also where the scores of most pages underflow."""
    torch.manual_seed(parts)
    chooser, query, rows = setting(dtype, parts, sharp, pooling=pooling, outliers=outliers)
    assert_same_plan(chooser, copy_of(chooser), query, rows)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("sharp", [1.0, 60.0])
def test_outliers_come_first(parts, sharp):
    """Those of all pages between sink and window; the best of the other pages fill the rest."""
    torch.manual_seed(parts)
    chooser, query, rows = setting(parts=parts, sharp=sharp)
    count, plain = int(0.25 * SELECT), replace(chooser, outliers=0.0, handle=None)
    for _ in visited():
        ours, without = clone_rows(rows), clone_rows(rows)
        cpu.plan_decode(query, ours, chooser)
        cpu.plan_decode(query, without, plain)
        for r, length in enumerate(LENS):
            pages = rows.block_table[r, SINK : -(-length // PAGE) - WINDOW].long()
            for head in range(KV_HEADS):
                cosines = least_cosines(chooser, pages, head, parts)
                outliers = {SINK + j for j in cosines.argsort()[:count].tolist()}
                selected = set(chosen(ours, r, head))
                assert outliers < selected
                assert len(selected) == SELECT
                best = set(chosen(without, r, head))
                assert not outliers <= best, "scores alone do not find them all"
                assert selected - outliers <= best - outliers


def test_rows_do_not_depend_on_their_company():
    torch.manual_seed(3)
    chooser, query, rows = setting()
    cpu.plan_decode(query, rows, chooser)
    for r, length in enumerate(LENS):
        alone = make_rows([length], chooser, (SINK, WINDOW, SELECT), tau=1.0)
        alone.block_table = rows.block_table[r : r + 1]
        cpu.plan_decode(query[r : r + 1], alone, chooser)
        for head in range(KV_HEADS):
            assert chosen(alone, 0, head) == chosen(rows, r, head)


@pytest.mark.parametrize("pooling", Pooling)
def test_equal_and_missing_cosines(isa, pooling):
    """Of equal ones the earlier page is an outlier, and a cosine that is no number is highest."""
    torch.manual_seed(4)
    chooser, query, rows = setting(lens=[60 * PAGE], pooling=pooling)
    rows.block_table = torch.arange(60, dtype=torch.int32)[None]
    record, write = fields_of(chooser.store)
    cosines = torch.full_like(record["least_cosine"], 0.5).view(120, KV_HEADS)
    cosines[10:14], cosines[30:34], cosines[40] = torch.nan, -0.5, -1
    # By their scores, all these come last.
    means = record["mean"].view(120, KV_HEADS, 64)
    means[:] = query[0, 0] * 10
    means[30:41] = -query[0, 0] * 10
    query[:] = query[0, :1]
    write(least_cosine=cosines.view(-1, 1), mean=means.view(-1, 64))
    cpu.plan_decode(query, rows, chooser)
    for head in range(KV_HEADS):
        expected = [*range(1, 16), 30, 31, 32, 33, 40]
        assert chosen(rows, 0, head) == expected


@pytest.mark.parametrize(("select", "count"), [(1, 0), (2, 1), (6, 1), (12, 1), (13, 2)])
def test_one_of_a_few_pages_is_an_outlier(select, count):
    """A share of them that rounds down to none is one page, but of a single page."""
    torch.manual_seed(5)
    chooser, query, rows = setting(lens=[60 * PAGE], outliers=0.158)
    rows.block_table = torch.arange(60, dtype=torch.int32)[None]
    rows.select[:] = select
    record, write = fields_of(chooser.store)
    cosines = torch.full_like(record["least_cosine"], 0.5).view(120, KV_HEADS)
    cosines[40:43] = torch.tensor([-0.9, -1, -0.8])[:, None]
    means = record["mean"].view(120, KV_HEADS, 64)
    means[:] = query[0, 0] * 10
    means[40:43] *= -1  # their scores come last
    query[:] = query[0, :1]
    write(least_cosine=cosines.view(-1, 1), mean=means.view(-1, 64))
    ours = assert_same_plan(chooser, copy_of(chooser), query, rows)
    for head in range(KV_HEADS):
        expected = {*range(1, 1 + select - count), *[41, 40][:count]}
        assert set(chosen(ours, 0, head)) == expected


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"outliers": -0.1}, "outliers=-0.1 must be a share below 1"),
        ({"outliers": 1.0}, "outliers=1.0 must be a share below 1"),
        ({"outliers": float("nan")}, "outliers=nan must be a share below 1"),
        ({"index": make_index("mean")}, "of an index that tells them"),
        ({"index": None, "outliers": 0.1}, "of an index that tells them"),
        ({"rerank": 2}, "without candidates"),
    ],
)
def test_refused_choosers(change, why):
    index = change.pop("index", make_index("landmark"))
    chooser, query, rows = setting()
    store = replace(chooser.store, index=index, handle=None)
    width = index.record_bytes(64, PAGE, torch.float32) if index else 0
    store.records = store.records[..., :width].contiguous()
    wrong = replace(chooser, store=store, handle=None, **change)
    with pytest.raises(ValueError, match=why):
        cpu.plan_decode(query, rows, wrong)


def test_refused_with_a_mass():
    chooser, query, rows = setting()
    rows.numbers["mass"][1] = 0.9
    rows.spared = torch.zeros(len(LENS), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"row 1: a mass of 0.9.* is reached by each step's own"):
        cpu.plan_decode(query, rows, chooser)


# ------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("shadowkv", {}, (0.158, 8, "max_softmax")),
        ("shadowkv", {"outliers": 0}, (0, 8, "max_softmax")),
        ("shadowkv", {"outliers": 0.3, "page_size": 32}, (0.3, 8, "max_softmax")),
        ("shadowkv", {"index": "landmark"}, (0.158, 8, "max_softmax")),
        ("shadowkv", {"index": {"landmark": {}}}, (0.158, 8, "max_softmax")),
        ("shadowkv", {"index": "mean"}, (0, 16, "max_softmax")),
        ("shadowkv", {"rerank": 2, "summary_size": 16}, (0, 16, "max_softmax")),
        ("freekv", {"index": "landmark"}, (0, 32, "mean_softmax")),
        ("freekv", {"index": "landmark", "outliers": 0.1}, (0.1, 32, "mean_softmax")),
        ("kvretrieval", {"outliers": 0}, (0, 32, "mean_softmax")),
    ],
    ids=str,
)
def test_methods_that_have_outliers(method, options, expected):
    own = RetrievalConfig.from_options(method, options).own
    assert (own.outliers, own.entry_tokens, own.pooling.name.lower()) == expected


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("kvretrieval", {"outliers": 0.1}, "outliers=0.1 cannot be told by index=low_rank; use"),
        ("fier", {"outliers": 0.1}, "outliers=0.1 cannot be told by index=one_bit; use index=land"),
        ("fier", {"index": "landmark", "outliers": 0.1}, "unit='token' selects single tokens, and"),
        ("shadowkv", {"rerank": 2, "outliers": 0.1}, "outliers=0.1 have no place among candidates"),
        ("shadowkv", {"outliers": 1}, "outliers=1 must be from 0 on and less than 1"),
        ("shadowkv", {"outliers": -0.5}, "outliers=-0.5 must be from 0 on and less than 1"),
        ("shadowkv", {"outliers": "many"}, "outliers='many' must be a number between"),
        (
            "shadowkv",
            {"pooling": "mean_softmax", "mass": 0.9},
            "mass=0.9 cannot be reached with shadowkv: .*no outliers",
        ),
        ("snapkv", {"outliers": 0.1}, "outliers=0.1 has no effect with snapkv, which keeps"),
        ("omnikv", {"outliers": 0.1}, "outliers=0.1 has no effect with omnikv, which selects by"),
        ("full", {"outliers": 0.1}, "outliers=0.1 has no effect with full"),
    ],
    ids=str,
)
def test_refused_options(method, options, why):
    with pytest.raises(RetrievalConfigError, match=f"kv_retrieval.{why}"):
        RetrievalConfig.from_options(method, options)
