"""Selection by scores of any size: the compiled op against its specification."""

from dataclasses import replace

import pytest
import torch

from tests.spec import ops as reference
from tests.support.covering import covering
from tests.support.isas import visited
from tests.support.kernel_checks import (
    KERNELS,
    PAGE,
    RECORDED,
    TWINS,
    Given,
    assert_same_plan,
    assert_selects_each_once,
    clone_rows,
    copy_of,
    fields_of,
    keys_in,
    make_chooser,
    make_rows,
    specified,
)
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.retrieval.index import make_index
from vllm_kvretrieval.retrieval.pooling import Pooling

pytestmark = pytest.mark.threads


@pytest.mark.parametrize("positive", [0, 3, 5, 9])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("pooling", [Pooling.MAX, Pooling.SUM])
def test_scores_below_zero(isa, pooling, parts, positive):
    """Raw scores are in their order on both sides of zero; what is no number comes last."""
    torch.manual_seed(positive)
    index = make_index("mean")
    chooser = make_chooser(
        40, 1, 2, 2, 64, torch.float32, parts=parts, index=index, pooling=pooling
    )
    record, write = fields_of(chooser.store)
    mean = -(torch.rand_like(record["mean"]) + 1) * 10.0 ** torch.randint(
        -3, 4, (len(record["mean"]), 1)
    )
    above, void = torch.randperm(36)[: positive + 4].add(2).split([positive, 4])
    by_page = mean.view(40, parts, 2, 64)
    by_page[above] *= -1
    by_page[void[:2], 0] = by_page[void[2:], -1] = torch.nan  # of one entry
    write(mean=mean)
    query = torch.eye(64)[:2].repeat(2, 1)[None] + 0.25  # of either head
    for select in (5, 35):
        rows = make_rows([40 * PAGE], chooser, (1, 2, select), fresh=1)
        rows.block_table = torch.arange(40).int()[None]
        assert_same_plan(chooser, copy_of(chooser), query, rows)
        numbers = chooser.selection.chosen[0, :, :select, None] != void
        assert numbers.all(-1).sum(-1).tolist() == [min(select, 33)] * 2
        if select == 5:
            most = torch.isin(chooser.selection.chosen[0, :, :5], above).sum(-1)
            assert most.tolist() == [min(positive, 5)] * 2


@pytest.mark.parametrize("pooling", Pooling)
def test_signs_of_zeros(isa, pooling):
    """A negative zero is no less than a positive one, infinities are more or less than all."""
    chooser = make_chooser(40, 1, 1, 2, 64, torch.float32, index=Given(), pooling=pooling)
    _, write = fields_of(chooser.store)
    score = torch.where(torch.arange(40) % 2 == 0, -0.0, 0.0)[:, None]
    write(score=score)
    rows = make_rows([40 * PAGE], chooser, (1, 1, 5), fresh=1)
    rows.block_table = torch.arange(40).int()[None]
    assert_same_plan(chooser, copy_of(chooser), torch.randn(1, 2, 64), rows)
    assert chooser.selection.chosen[0, 0, :5].tolist() == [1, 2, 3, 4, 5]
    score[20], score[3] = 1e30, -torch.inf
    write(score=score)
    cpu.plan_decode(torch.randn(1, 2, 64), rows, chooser)
    assert chooser.selection.chosen[0, 0, :5].tolist() == [1, 2, 4, 5, 20]


def test_extreme_values_and_ties(isa):
    """Equal scores go to the earlier page; huge scores overflow nothing."""
    torch.manual_seed(2)
    chooser = make_chooser(64, 1, 1, 2, 64, torch.float32)
    chooser.store.records.zero_()  # all pages tie
    rows = make_rows([64 * PAGE], chooser, (1, 1, 5), fresh=1)
    rows.block_table = torch.arange(64, dtype=torch.int32)[None]
    cpu.plan_decode(torch.randn(1, 2, 64), rows, chooser)
    assert rows.lists[0, :7].tolist() == [0, 1, 2, 3, 4, 5, 63]

    record, write = fields_of(chooser.store)
    bounds = torch.full_like(record["minimum"], 3e4)
    bounds[40:45] = 6e4
    write(minimum=bounds, maximum=bounds)
    rows = clone_rows(rows)
    cpu.plan_decode(torch.full((1, 2, 64), 100.0), rows, chooser)
    assert rows.lists[0, :7].tolist() == [0, 40, 41, 42, 43, 44, 63]


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("index", RECORDED)
def test_equal_records_have_equal_scores(isa, index, group):
    """So the earlier ones are selected, however many entries there are."""
    torch.manual_seed(group)
    chooser = make_chooser(16, 1, 1, group, 64, torch.float32, index=make_index(index))
    chooser.store.records[:] = chooser.store.records[:1].clone()
    for pages in (9, 10, 11, 12) * 5:
        rows = make_rows([pages * PAGE], chooser, (1, 1, 3), fresh=1)
        rows.block_table = torch.arange(pages, dtype=torch.int32)[None]
        cpu.plan_decode(torch.randn(1, group, 64), rows, chooser)
        assert rows.lists[0, :5].tolist() == [0, 1, 2, 3, pages - 1]


@pytest.mark.parametrize("pooling", [p for p in Pooling if not p.raw])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("gap", [0, 66, 80, 88, 120, 400])
def test_a_page_far_above_the_others(gap, parts, group, pooling):
    """Softmax leaves nothing of the others; they keep their order, whatever the group does."""
    torch.manual_seed(gap)
    pages, head_size = 203, 64
    shape = pages, 1, 2, group, head_size, torch.float32
    chooser = make_chooser(*shape, most_selected=9, parts=parts, pooling=pooling)
    chooser = replace(chooser, scale=1.0)
    entries = pages * parts - parts // 2  # the last page is not full
    bounds = 5 * torch.randn(pages * parts, 2, head_size)
    bounds[0] = bounds.max() + gap
    bounds[parts * 60, :, :1] = bounds.max() - 3  # one that the first query head wants as much
    # Minimum and maximum are equal and query head g reads channel g: the bounds are exact.
    _, write = fields_of(chooser.store)
    write(minimum=bounds.flatten(0, 1), maximum=bounds.flatten(0, 1))
    query = torch.eye(head_size)[:group].repeat(2, 1)[None]
    rows = make_rows([entries * PAGE // parts], chooser, (1, 2, 9), fresh=1)
    rows.block_table = torch.arange(pages, dtype=torch.int32)[None]
    expected, begun = copy_of(chooser), clone_rows(rows)
    specified(reference.plan_decode, query, rows, expected)
    for _ in visited():
        ours, actual = clone_rows(begun), copy_of(chooser)
        cpu.plan_decode(query, ours, actual)
        assert rows.lists.equal(ours.lists)
        if group == parts == 1:
            best = bounds[1:-2, :, 0].topk(9, dim=0).indices.sort(dim=0).values + 1
            assert actual.selection.chosen[0].T.equal(best.int())


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_key_that_is_no_number_makes_the_score_none(isa, parts):
    """Whichever key of an entry it is; the page comes last."""
    torch.manual_seed(parts)
    index, pooling = make_index("exact"), Pooling.MAX
    chooser = make_chooser(
        40, 1, 1, 1, 64, torch.float32, parts=parts, index=index, pooling=pooling
    )
    keys = torch.arange(PAGE)  # page n + 1 has the n-th
    keys_in(chooser.store)[1 + keys, 0, 5, keys] = torch.nan
    numbers = torch.arange(1 + PAGE, 39)
    rows = make_rows([40 * PAGE], chooser, (1, 1, len(numbers)), fresh=1)
    rows.block_table = torch.arange(40).int()[None]
    assert_same_plan(chooser, copy_of(chooser), torch.randn(1, 1, 64), rows)
    assert chooser.selection.chosen[0, 0, : len(numbers)].equal(numbers.int())


@covering(index=[*KERNELS, "outside_mean", "outside_exact"], pooling=Pooling, rerank=[0, 3])
def test_queries_that_are_no_numbers_select_pages(isa, index, pooling, rerank):
    torch.manual_seed(9)
    kind = next((twin for twin in TWINS.values() if twin.name == index), None) or make_index(index)
    options = {"index": kind, "pooling": pooling, "rerank": rerank}
    chooser = make_chooser(64, 1, 1, 2, 64, torch.float32, **options)
    for value in (float("nan"), float("inf"), float("-inf")):
        for heads in ([0], [1], [0, 1]):
            query = torch.randn(1, 2, 64)
            query[0, heads, 7] = value
            assert_selects_each_once(query, chooser)
