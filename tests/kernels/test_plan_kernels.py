"""Selection: the compiled op against its specification, per instruction set."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.support.covering import covering
from tests.support.kernel_checks import (
    DTYPES,
    KERNELS,
    PAGE,
    RECORDED,
    assert_same_plan,
    clone_rows,
    copy_of,
    keys_in,
    make_chooser,
    make_rows,
    take_in,
)
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.retrieval.index import make_index
from vllm_kvretrieval.retrieval.pooling import Pooling

pytestmark = pytest.mark.threads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_size", "parts"),
    [(3, 3, 64, 1), (2, 7, 64, 2), (1, 4, 256, 1), (8, 4, 128, 4), (1, 11, 80, 1), (3, 3, 64, 4)],
)
def test_plan_equals_reference(dtype, kv_heads, group, head_size, parts):
    torch.manual_seed(1)
    chooser = make_chooser(300, 6, kv_heads, group, head_size, dtype, parts=parts)
    expected, actual = copy_of(chooser), copy_of(chooser)
    previous = torch.empty(0)
    budget = (2, 3, 7)
    lens = [13 * PAGE, 9000, 4097, 13 * PAGE - 5, 500]
    corrections = 0
    for step in range(6):
        # As in a model: queries are strided views of the fused projection's output.
        fused = torch.randn(len(lens) + 1, kv_heads * group + 2, head_size).to(dtype)
        query = fused[:, 2:]
        if step % 2:  # turn some heads a little, others a lot
            turn = torch.rand(len(lens) + 1, kv_heads, 1).repeat_interleave(group, 1) * 3
            query.mul_(turn).add_(previous)
        rows = make_rows(lens, chooser, budget, tau=0.6, fresh=step == 0, exact=(4,))
        rows.seats = torch.arange(len(lens), dtype=torch.int32)
        ours = assert_same_plan(actual, expected, query, rows)
        previous = query
        corrections += int(ours.corrected.sum()) if step else 0
    assert 0 < corrections < 5 * 4 * kv_heads, "both speculation and correction are exercised"


@covering(index=KERNELS, pooling=Pooling, parts=[1, 4], dtype=DTYPES)
def test_every_index_and_pooling(index, pooling, parts, dtype):
    torch.manual_seed(2)
    kind = make_index(index)
    chooser = make_chooser(45, 3, 2, 3, 64, dtype, parts=parts, index=kind, pooling=pooling)
    expected, actual = copy_of(chooser), copy_of(chooser)
    for fresh in (True, False):
        query = torch.randn(3, 6, 64).to(dtype)
        rows = make_rows([41 * PAGE - 5, 23 * PAGE + 9, 9 * PAGE], chooser, (2, 2, 5), fresh=fresh)
        rows.seats = torch.arange(3).int()
        assert_same_plan(actual, expected, query, rows)


@covering(
    index=KERNELS,
    kv_heads__group__head_size__page_size__parts=[
        (1, 11, 80, 16, 2),
        (3, 1, 256, 32, 1),
        (2, 6, 128, 128, 1),
        (1, 3, 64, 256, 1),
        (2, 2, 64, 96, 1),
    ],
    dtype=DTYPES,
)
def test_every_index_and_shape(index, kv_heads, group, head_size, page_size, parts, dtype):
    """A context of more entries than one task scores, and one beside it."""
    torch.manual_seed(3)
    shape = 160, 2, kv_heads, group, head_size, dtype
    kind = make_index(index)
    chooser = make_chooser(*shape, parts=parts, index=kind, page_size=page_size)
    query = torch.randn(2, kv_heads * group, head_size).to(dtype)
    rows = make_rows([150 * page_size - 3, 12 * page_size], chooser, (1, 1, 8), fresh=1)
    assert_same_plan(chooser, copy_of(chooser), query, rows)


@pytest.mark.parametrize("spread", [0, 0.25, 3])
def test_spread(spread):
    torch.manual_seed(4)
    index = make_index({"mean_std": {"spread": spread}})
    chooser = make_chooser(40, 1, 2, 3, 64, torch.bfloat16, parts=2, index=index)
    keys_in(chooser.store).mul_(torch.rand(40, 1, 1, 1) * 2)  # else all are as far apart
    take_in(chooser.store, torch.arange(40))
    rows = make_rows([40 * PAGE], chooser, (1, 1, 6), fresh=1)
    query = torch.randn(1, 6, 64).to(torch.bfloat16)
    assert_same_plan(chooser, copy_of(chooser), query, rows)


@covering(
    index=RECORDED,
    pooling=Pooling,
    parts=[1, 4],
    dtype=[torch.bfloat16, torch.float32],
    far=[False, True],
)
def test_rerank_equals_reference(index, pooling, parts, dtype, far):
    """They are equal even if a page of the sink has all of the mass."""
    torch.manual_seed(5)
    options = {"index": make_index(index), "pooling": pooling, "parts": parts}
    chooser = make_chooser(40, 2, 2, 3, 64, dtype, rerank=3, **options)
    query = torch.randn(2, 6, 64).to(dtype)
    rows = make_rows([37 * PAGE - 3, 22 * PAGE], chooser, (1, 2, 5), fresh=1)
    if far:
        for row, pages in enumerate(rows.block_table):
            wanted = query[row].view(2, 3, 64).sum(1, dtype=torch.float32)
            keys_in(chooser.store)[pages[0]] = (wanted * 60)[..., None].to(dtype)
        take_in(chooser.store, torch.arange(40))
    assert_same_plan(chooser, copy_of(chooser), query, rows)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("index", RECORDED)
def test_rerank_of_all_pages_is_exact(isa, index, pooling, parts):
    """Shares are those of the index, so several heads are weighted otherwise; one is not."""
    torch.manual_seed(6)
    group = 3 if pooling.raw else 1
    shape = 60, 2, 2, group, 64, torch.bfloat16
    chooser = make_chooser(*shape, parts=parts, index=make_index(index), pooling=pooling)
    rows = make_rows([60 * PAGE - 3, 38 * PAGE], chooser, (1, 2, 5), fresh=1)
    query = torch.randn(2, 2 * group, 64).to(torch.bfloat16)
    lists = {}
    for rerank in (0, 12):
        ours = clone_rows(rows)
        cpu.plan_decode(query, ours, replace(copy_of(chooser), rerank=rerank))
        lists[rerank] = ours.lists
    exact = replace(chooser.store, index=make_index("exact"), handle=None)
    exact.records = chooser.store.records[..., :0].contiguous()
    cpu.plan_decode(query, rows, replace(copy_of(chooser), store=exact))
    assert rows.lists.equal(lists[12])
    if index != "one_bit":
        assert not rows.lists.equal(lists[0])


@pytest.mark.parametrize(
    ("tau", "always"), [(1.0, True), (2.0, True), (-1.0, False), (-3.0, False)]
)
def test_threshold_limits(isa, tau, always):
    """tau >= 1 corrects every head even at the same query, tau <= -1 none even at its opposite."""
    torch.manual_seed(3)
    chooser = make_chooser(100, 1, 2, 2, 64, torch.bfloat16)
    query = torch.randn(1, 4, 64).to(torch.bfloat16)
    chooser.selection.query[0] = query[0] if always else -query[0]
    rows = make_rows([100 * PAGE], chooser, (1, 1, 4), tau=tau)
    cpu.plan_decode(query, rows, chooser)
    assert int(rows.corrected.sum()) == (2 if always else 0)


@pytest.mark.parametrize("index", ["min_max", "one_bit"])
def test_many_rows_share_bounded_scratch(index):
    """More (row, head) units than fit in one wave of scoring."""
    torch.manual_seed(4)
    chooser = make_chooser(400, 40, 4, 2, 64, torch.bfloat16, index=make_index(index))
    lens = torch.randint(20 * PAGE, 400 * PAGE, (40,)).tolist()
    rows = make_rows(lens, chooser, (1, 2, 9), fresh=1)
    query = torch.randn(40, 8, 64).to(torch.bfloat16)
    assert_same_plan(chooser, copy_of(chooser), query, rows)


@pytest.mark.parametrize(("index", "rerank"), [("min_max", 0), ("one_bit", 4), ("exact", 0)])
def test_two_engines_plan_at_the_same_time(isa, index, rerank):
    """Engines in one process, stepped from a thread each."""

    def plans(pages):
        kind = make_index(index)
        chooser = make_chooser(pages, 4, 2, 4, 64, torch.float32, index=kind, rerank=rerank)
        rows = make_rows([pages * PAGE] * 4, chooser, (1, 2, 9), fresh=1)
        query = torch.randn(4, 8, 64)
        expected = clone_rows(rows)
        cpu.plan_decode(query, expected, copy_of(chooser))
        for _ in range(200 if index == "min_max" else 10):
            cpu.plan_decode(query, rows, chooser)
            yield rows.lists.equal(expected.lists)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(all, [plans(300), plans(330)]))


def test_methods_share_a_selection(isa):
    """Two indexes over one layer, each for its own requests, beside one that selects nothing."""
    torch.manual_seed(10)
    first = make_chooser(60, 6, 2, 2, 64, torch.float32)
    indexes = [first.store]
    for index in (make_index("mean"), None):
        indexes.append(replace(first.store, index=index, records=torch.empty(0), handle=None))
        size = 0 if index is None else index.record_bytes(64, PAGE, torch.float32)
        indexes[-1].records = torch.zeros(60, 2, size, dtype=torch.uint8)
        take_in(indexes[-1], torch.arange(60))
    selection, twin = first.selection, copy_of(first).selection
    for store, seats in zip(indexes, ([4, 0], [1, 5], [3, 2]), strict=True):
        budget = (1, 2, 0) if store.index is None else (1, 2, 5)
        rows = make_rows([60 * PAGE, 40 * PAGE], first, budget, fresh=1)
        rows.seats = torch.tensor(seats).int()
        actual, expected = (
            replace(first, store=store, selection=each, handle=None) for each in (selection, twin)
        )
        ours = assert_same_plan(actual, expected, torch.randn(2, 4, 64), rows)
        if store.index is None:
            assert torch.equal((ours.lists >= 0).sum(1), torch.full((4,), 3))


def test_as_many_pages_as_are_attended_to(isa):
    """The least context that a budget may be used on: all of it is attended to."""
    torch.manual_seed(6)
    for index in KERNELS:
        kind = make_index(index)
        chooser = make_chooser(40, 1, 2, 2, 64, torch.float32, most_selected=7, index=kind)
        rows = make_rows([10 * PAGE - 3], chooser, (1, 2, 7), fresh=1)
        cpu.plan_decode(torch.randn(1, 4, 64), rows, chooser)
        heads = torch.arange(2)[:, None]
        assert rows.lists.equal((rows.block_table * 2 + heads).int())
