"""KV heads that select different numbers of units: the compiled op against its specification."""

from dataclasses import replace

import pytest
import torch

from tests.support.kernel_checks import (
    PAGE,
    assert_same_plan,
    clone_rows,
    copy_of,
    make_chooser,
    make_rows,
)
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.retrieval.index import make_index

pytestmark = pytest.mark.threads


def uneven(chooser, most):
    """Counts of its own for each seat and KV head, as part of a wider table."""
    seats, heads = chooser.selection.chosen.shape[:2]
    table = torch.randint(most + 1, (seats, heads + 3), dtype=torch.int32)
    counts = table[:, 2 : 2 + heads]
    counts[:, 0] = most
    counts[0, 1] = 0
    return replace(chooser, selection=replace(chooser.selection, counts=counts), handle=None)


@pytest.mark.parametrize(
    ("index", "parts", "rerank", "tau"),
    [("min_max", 1, 0, 0.3), ("mean", 2, 3, 1.0), ("exact", 1, 0, 0.3)],
)
def test_kv_heads_select_as_many_as_each_is_given(index, parts, rerank, tau):
    """Over the steps of a context that grows from its budget on, with speculation or without."""
    torch.manual_seed(12)
    kind, most = make_index(index), 13
    chooser = make_chooser(
        60, 5, 3, 2, 64, torch.float32, most, parts=parts, index=kind, rerank=rerank
    )
    chooser = uneven(chooser, most)
    twin = copy_of(chooser)
    rows = make_rows([50 * PAGE] * 3, chooser, (1, 2, 4), tau=tau)
    rows.select[2] = 0
    query = torch.randn(3, 6, 64)
    saw_all = saw_kept = False
    for length in (*range(8 * PAGE + 1, 9 * PAGE + 9, 4), *range(16 * PAGE - 3, 16 * PAGE + 70, 8)):
        rows.seq_lens[:] = torch.tensor([length, length + 3 * PAGE, length])
        rows.fresh[:] = length == 8 * PAGE + 1
        rows.lists.fill_(-1)
        rows.corrected.zero_()
        query = query + torch.randn(query.shape)
        ours = assert_same_plan(chooser, twin, query, rows)
        for unit, length in enumerate(ours.lengths.tolist()):
            r, head = divmod(unit, 3)
            pages = -(-int(rows.seq_lens[r]) // PAGE)
            count = int(chooser.selection.counts[rows.seats[r], head]) if rows.select[r] else 0
            listed = ours.lists[unit][ours.lists[unit] >= 0]
            assert len(listed) == 3 + min(count, pages - 3)
            assert length == len(listed) * PAGE - (-int(rows.seq_lens[r]) % PAGE)
            saw_all |= 0 < pages - 3 <= count
        selecting = chooser.selection.counts[rows.seats[:2]] > 0
        saw_kept |= int(ours.corrected.sum()) < int(selecting.sum())
    assert saw_all
    assert saw_kept == (tau < 1)


def test_even_counts_are_no_counts(isa):
    """Bit by bit."""
    torch.manual_seed(13)
    chooser = make_chooser(60, 4, 3, 2, 64, torch.bfloat16, 9)
    twin = copy_of(chooser)
    counts = torch.full((4, 3), 7, dtype=torch.int32)
    twin = replace(twin, selection=replace(twin.selection, counts=counts))
    rows = make_rows([50 * PAGE, 20 * PAGE - 5], chooser, (1, 2, 7))
    for _ in range(3):
        query, others = torch.randn(2, 6, 64).to(torch.bfloat16), clone_rows(rows)
        cpu.plan_decode(query, rows, chooser)
        cpu.plan_decode(query, others, twin)
        for name in ("lists", "lengths", "corrected"):
            assert torch.equal(getattr(rows, name), getattr(others, name))
        assert torch.equal(chooser.selection.chosen, twin.selection.chosen)


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ([[7, 7, -1]], "row 0: a count of -1 to select"),
        ([[7, -(2**31), 7]], "row 0: a count of -2147483648 to select"),
        ([[10, 7, 7]], "row 0: the count to select is 10, 1 more than the 9 that the selection"),
        ([[7, 7, 2**31 - 1]], "row 0: the count to select is 17, 8 more than the 9"),
        ([[7, 7, 9]], "row 0: the pages to attend to are 12, 1 more than the 11 of lists"),
        ([[7, 7]], r"counts must be \(4, 3\), got \(4, 2\)"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts, why):
    chooser = make_chooser(40, 4, 3, 2, 64, torch.float32, most_selected=9)
    table = torch.tensor(counts).int().repeat(4, 1)
    kept = replace(chooser.selection, counts=table)
    rows = make_rows([20 * PAGE], chooser, (1, 2, 7), fresh=1)
    rows.lists = rows.lists[:, :11]
    for call in (
        lambda own: cpu.plan_decode(torch.randn(1, 6, 64), rows, own),
        lambda own: home_of(40, 3).prefetch(rows, own),
    ):
        with pytest.raises(ValueError, match=why):
            call(replace(chooser, selection=kept, handle=None))
    for wrong in (table.long(), table.T.contiguous().T):
        with pytest.raises(ValueError, match=r"counts must be .*int32 and contiguous|must be \(4"):
            cpu.plan_decode(
                torch.randn(1, 6, 64),
                rows,
                replace(chooser, selection=replace(kept, counts=wrong), handle=None),
            )
    assert rows.lists.eq(-1).all()


def home_of(pages, kv_heads):
    """A recall cache over memory that is never read."""
    units = torch.zeros(pages * kv_heads, 1, 2 * PAGE, 64)
    counts = torch.zeros(4, 3, dtype=torch.int64)
    return cpu.RecallCache(units, 8, kv_heads, counts, (-1, 0))
