"""Indexes of other packages, which the compiled ops call."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from tests.spec import ops as reference
from tests.support.covering import covering
from tests.support.isas import visited
from tests.support.kernel_checks import (
    DTYPES,
    PADDING,
    PAGE,
    TWINS,
    OutsideMean,
    assert_same_plan,
    assert_same_records,
    chunks_of,
    clone_rows,
    copy_of,
    keys_in,
    make_chooser,
    make_rows,
    put_keys,
    specified,
    take_in,
)
from vllm_kvretrieval.extend import Rule
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.retrieval.index import make_index
from vllm_kvretrieval.retrieval.pooling import Pooling

pytestmark = pytest.mark.threads


@covering(
    name__rerank=[("mean", 0), ("mean", 3), ("exact", 0)],
    pooling=Pooling,
    parts=[1, 4],
    dtype=DTYPES,
    far=[False, True],
)
def test_an_index_of_another_package(name, rerank, pooling, parts, dtype, far):
    """It has no kernels, and gives the same results as an equal index that has kernels."""
    torch.manual_seed(7)
    options = {"pooling": pooling, "parts": parts, "rerank": rerank}
    native = make_chooser(40, 2, 2, 3, 64, dtype, index=make_index(name), **options)
    query = torch.randn(2, 6, 64).to(dtype)
    rows = make_rows([37 * PAGE - 3, 22 * PAGE], native, (1, 2, 5), fresh=1)
    keys = keys_in(native.store)
    if far:
        for row, pages in enumerate(rows.block_table):
            wanted = query[row].view(2, 3, 64).sum(1, dtype=torch.float32)
            keys[pages[0]] = (wanted * 60)[..., None].to(dtype)
    take_in(native.store, torch.arange(40))
    outside = make_chooser(40, 2, 2, 3, 64, dtype, index=TWINS[name], **options)
    keys_in(outside.store).copy_(keys)
    take_in(outside.store, torch.arange(40))
    outside.selection = copy_of(native).selection
    specified, begun = copy_of(outside), clone_rows(rows)
    assert_same_plan(outside, specified, query, rows)
    for _ in visited():
        ours, chooser = clone_rows(begun), copy_of(native)
        cpu.plan_decode(query, ours, chooser)
        assert torch.equal(rows.lists, ours.lists)
        assert torch.equal(outside.selection.chosen, chooser.selection.chosen)


def test_records_of_an_index_of_another_package():
    """Records are made as keys are written and from pages of any length, and equal the
    specification."""
    torch.manual_seed(8)
    expected = make_chooser(20, 1, 2, 1, 64, torch.bfloat16, parts=2, index=OutsideMean()).store
    written, loaded = (
        replace(expected, records=expected.records.clone(), handle=None) for _ in range(2)
    )
    native = make_chooser(20, 1, 2, 1, 64, torch.bfloat16, parts=2, index=make_index("mean")).store
    native.cache.copy_(expected.cache)
    take_in(native, torch.arange(20))
    for key, slots in chunks_of(20, 2, 64, torch.bfloat16, rounds=6):
        for store in (expected, native):
            put_keys(store, key[: len(slots)], slots)
        padded = torch.cat([slots, PADDING])
        specified(reference.update_index, key, padded, expected)
        cpu.update_index(key, padded, written)
        cpu.update_index(key, padded, native)
        assert torch.equal(written.records, expected.records)
        assert_same_records(
            replace(native, index=make_index("mean")),
            replace(native, records=written.records[..., 3:].contiguous()),
        )
    lengths = torch.randint(1, PAGE + 1, (20,)).int()
    before = loaded.records.clone()
    pages = torch.randperm(20).int()
    cpu.index_pages(pages, lengths, loaded)
    specified(reference.index_pages, pages, lengths, replace(expected, records=before))
    assert torch.equal(loaded.records, before)
    nothing = torch.empty(0).int()
    cpu.index_pages(nothing, nothing, loaded)
    cpu.update_index(key, PADDING, loaded)
    assert torch.equal(loaded.records, before)


@dataclass(frozen=True)
class Lowest(Rule):
    """The pages with the lowest keys, whatever the query is, but those of the step before."""

    name: ClassVar[str] = "lowest"

    def select(self, query, record, state):
        assert query.shape == (3, 64)
        rated = record["keys"].amin((1, 2))
        if state.pages is not None:
            rated[state.pages] += 100
        between = rated[state.first : state.last]
        return between.topk(state.count, largest=False).indices.to(torch.int32) + state.first


@pytest.mark.parametrize("pooling", Pooling, ids=lambda pooling: pooling.name)
def test_a_rule(pooling):
    """Its pages are selected by any pooling, as many as each KV head wants."""
    torch.manual_seed(9)
    chooser = make_chooser(40, 2, 2, 3, 64, torch.bfloat16, index=Lowest(), pooling=pooling)
    chooser.selection.counts = torch.tensor([[3, 7], [1, 40]], dtype=torch.int32)
    query = torch.randn(2, 6, 64).bfloat16()
    rows = make_rows([37 * PAGE - 3, 22 * PAGE], chooser, (1, 2, 5), tau=1.0, fresh=1)
    assert_same_plan(chooser, copy_of(chooser), query, rows)
    first = chooser.selection.chosen.clone()
    rows.fresh.zero_()
    again = assert_same_plan(chooser, copy_of(chooser), query, rows)
    pages = [37, 22]
    for row, seat in enumerate(rows.seats.tolist()):
        for head, count in enumerate(chooser.selection.counts[seat].tolist()):
            count = min(count, pages[row] - 3)
            chosen = chooser.selection.chosen[seat, head, :count]
            former = first[seat, head, :count]
            assert again.lengths[2 * row + head] == (count + 3) * PAGE - 3 * (row == 0)
            common = len(set(chosen.tolist()) & set(former.tolist()))
            assert common == max(0, 2 * count - (pages[row] - 3))
