"""What is not selected, added up by the means of its values: a further part of the softmax."""

import math
from dataclasses import replace

import pytest
import torch

from tests.spec import ops as reference
from tests.support.covering import covering
from tests.support.isas import visited
from tests.support.kernel_checks import DTYPES, clone_rows, copy_of, make_chooser, make_rows
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import Contexts, DecodeRows, Remainder, TokenLists, cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.index import IndexKind, make_index
from vllm_kvretrieval.retrieval.index.base import pack_means, unpack_means
from vllm_kvretrieval.retrieval.index.low_rank import LowRank

pytestmark = pytest.mark.threads

KV_HEADS, GROUP = 2, 3
LENS = (90 * 16 - 5, 160 * 16, 40 * 16 + 1)


def setting(index, parts, dtype, head_size=64, page=16, layout="vec", gate=0.01):
    """A chooser with means, queries, and rows of contexts of several lengths."""
    chooser = make_chooser(
        180, len(LENS), KV_HEADS, GROUP, head_size, dtype, index=make_index(index), parts=parts,
        page_size=page, remainder=gate, means=True, layout=layout,
    )  # fmt: skip
    rows = make_rows(list(LENS), chooser, (1, 2, 5), tau=1.0)
    return chooser, torch.randn(len(LENS), KV_HEADS * GROUP, head_size).to(dtype), rows


def planned(ops, query, rows, chooser):
    remainder = Remainder.empty(query)
    remainder.values.fill_(math.nan)
    ops.plan_decode(query, rows, chooser, remainder)
    return remainder


def decided_by_rounding(query, rows, chooser):
    """Of each query head: whether an entry's share is within 0.5 % of the gate."""
    store = chooser.store
    near = torch.zeros(query.shape[:2], dtype=torch.bool)
    for r, length in enumerate(LENS):
        pages = rows.block_table[r, : -(-length // store.page_size)].long()
        first = pages[:: store.spans] // store.spans * store.parts
        entries = (first[:, None] + torch.arange(store.parts)).flatten()
        entries = entries[: reference.entry_count(length, store)]
        for h, grouped in enumerate(query[r].float().view(KV_HEADS, GROUP, -1)):
            scores = reference.score_entries(store.index, grouped, entries, h, chooser)
            share = scores.double().softmax(1).mean(0)
            off = (share / chooser.remainder - 1).abs().min()
            near[r, h * GROUP : (h + 1) * GROUP] = off < 0.005
    return near


@covering(
    index__parts__page=[
        ("low_rank", 1, 16),
        ("low_rank", 2, 32),
        ("low_rank", 0.5, 16),
        ("exact", 1, 16),
    ],
    head_size=[64, 80],
    gate=[0.003, 0.02, 1.0],
    dtype=DTYPES,
)
def test_plan_equals_reference(index, parts, page, head_size, gate, dtype):
    torch.manual_seed(parts)
    chooser, query, rows = setting(index, parts, dtype, head_size, page, gate=gate)
    assert chooser.store.spans == max(1, 1 / parts)
    expected = planned(reference, query, clone_rows(rows), copy_of(chooser))
    some = expected.lse.isfinite()
    sure = ~decided_by_rounding(query, rows, chooser)
    assert (some & sure).any()
    assert sure.float().mean() >= 0.5
    for _ in visited():
        ours = planned(cpu, query, clone_rows(rows), chooser)
        near = (ours.lse - expected.lse).abs() < 0.02
        assert (near | (ours.lse == expected.lse))[sure].all()
        both = near & some & sure
        off = (ours.values - expected.values)[both].norm(dim=-1)
        assert (off < 0.03 * expected.values[both].norm(dim=-1) + 1e-3).all()


@pytest.mark.parametrize("sharper", [1.0, 4.0, 12.0])
def test_what_is_subtracted_leaves_no_more_than_rounding(sharper):
    """Also where nearly all of the attention is on what is selected: in parts of the whole."""
    torch.manual_seed(1)
    chooser, query, rows = setting("exact", 1, torch.float32, gate=1.0)
    query *= sharper
    expected = planned(reference, query, clone_rows(rows), copy_of(chooser))
    grouped = query.unflatten(1, (KV_HEADS, GROUP))
    whole = torch.empty(query.shape[:2])
    for r, n in enumerate(LENS):
        for h in range(KV_HEADS):
            pages = rows.block_table[r, : n // 16].long()
            scores = reference.score_entries(chooser.store.index, grouped[r, h], pages, h, chooser)
            whole[r].view(KV_HEADS, GROUP)[h] = scores.logsumexp(1)
    for _ in visited():
        ours = planned(cpu, query, clone_rows(rows), chooser)
        part, wanted = ((r.lse - whole).double().exp()[..., None] for r in (ours, expected))
        off = (part * ours.values - wanted * expected.values).norm(dim=-1)
        assert off.max() < 2e-5


def test_a_remainder_has_at_most_a_part_of_what_is_attended_to():
    torch.manual_seed(2)
    chooser, query, rows = setting("exact", 1, torch.float32, gate=1.0)
    query *= torch.tensor([0.1, 2.0, 6.0]).repeat(KV_HEADS)[:, None]
    for ops, isa in [(reference, None), *((cpu, isa) for isa in visited())]:
        own = clone_rows(rows)
        found = planned(ops, query, own, copy_of(chooser))
        expected, uncapped = (plainly(chooser, query, own, most) for most in (0.4, math.inf))
        torch.testing.assert_close(found.lse, expected.lse, atol=1e-3, rtol=0, msg=str(isa))
        capped = expected.lse < uncapped.lse
        assert 0 < capped.sum() < capped.numel()


@pytest.mark.parametrize("page", [16, 128, 256])
def test_threads_change_nothing(page):
    """Tasks are as long whatever their number is, so sums are the same to the last bit."""
    torch.manual_seed(2)
    chooser = make_chooser(
        160, 1, KV_HEADS, GROUP, 64, torch.bfloat16, index=LowRank(), page_size=page,
        remainder=0.01, means=True,
    )  # fmt: skip
    query = torch.randn(1, KV_HEADS * GROUP, 64).bfloat16()
    rows, threads = make_rows([160 * page], chooser, (1, 2, 5), tau=1.0), torch.get_num_threads()
    for _ in visited():
        together = planned(cpu, query, clone_rows(rows), chooser)
        assert together.lse.isfinite().all()
        try:
            torch.set_num_threads(1)
            alone = planned(cpu, query, clone_rows(rows), chooser)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(alone.lse, together.lse)
        assert torch.equal(alone.values, together.values)


@pytest.mark.parametrize("page", [32, 256])
@pytest.mark.parametrize("layout", ["vec", "token_major", "amx"])
def test_means_are_of_the_values_of_complete_entries(layout, page):
    """As tokens are written, and as pages are loaded."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    chooser, _, _ = setting("low_rank", 2, dtype, page=page, layout=layout)
    store, entries = chooser.store, torch.arange(360)
    values = reference.values_of_entries(entries, store).transpose(1, 2).flatten(0, 1)
    expected = values.mean(1)
    limit = expected.abs().amax(1, keepdim=True) / 127 * 0.51 + 1e-6
    for _ in visited():
        store.records.zero_()
        full = torch.full((180,), page, dtype=torch.int32)
        cpu.index_pages(torch.arange(180).int(), full, store)
        found = unpack_means(store.records.flatten(0, 1), 1, 64)[:, 0]
        assert ((found - expected).abs() <= limit * 1.01).all()
        loaded = store.records.clone()
        store.records.zero_()
        key = torch.zeros(3, KV_HEADS, 64, dtype=dtype)
        slots = torch.tensor([page * 7 + page // 2 - 1, page * 10 - 2, -1])
        cpu.update_index(key, slots, store)
        assert torch.equal(store.records[14], loaded[14])
        assert not store.records[[15, 18, 19]].any(), "these are not complete"


def test_values_that_are_not_finite_have_no_mean():
    chooser, query, rows = setting("low_rank", 1, torch.float32)
    plain = planned(cpu, query, clone_rows(rows), chooser)
    store = chooser.store
    page = int(rows.block_table[0, 30])
    store.cache.view(180, KV_HEADS, 2, -1)[page, 0, 1, 5] = math.inf
    cpu.index_pages(torch.tensor([page]).int(), torch.tensor([16]).int(), store)
    means = unpack_means(store.records[page], 1, 64)[:, 0]
    assert means.isnan().all(1).tolist() == [True, False]
    for _ in visited():
        ours = planned(cpu, query, clone_rows(rows), chooser)
        expected = planned(reference, query, clone_rows(rows), copy_of(chooser))
        assert ours.values.isfinite().all()
        assert torch.allclose(ours.lse, expected.lse, atol=0.01)
        assert not torch.equal(ours.lse, plain.lse)


def test_nothing_is_left_where_everything_is_attended_to():
    chooser, query, rows = setting("low_rank", 1, torch.float32)
    rows = make_rows([20 * 16, 20 * 16 - 3, 700], chooser, (1, 2, 17), tau=1.0)
    rows.select[2] = 0
    for ops in (reference, cpu):
        found = planned(ops, query, clone_rows(rows), copy_of(chooser))
        assert (found.lse == -math.inf).all()


def plainly(chooser, query, rows, most=0.4):
    """By the formula: all complete pages that a head does not list, each with its mean.

    Together they have at most so much of what the listed ones have.
    """
    heads = query.unflatten(1, (KV_HEADS, GROUP))
    found = Remainder(torch.zeros(query.shape), torch.full(query.shape[:2], -math.inf))
    values, lse = (part.unflatten(1, (KV_HEADS, GROUP)) for part in found)
    for unit, length in enumerate(rows.lengths.tolist()):
        r, h = divmod(unit, KV_HEADS)
        pages = rows.block_table[r, : int(rows.seq_lens[r]) // 16].long()
        listed = rows.lists[unit, : -(-length // 16)] // KV_HEADS
        left = ~torch.isin(pages, listed)
        if not left.any():
            continue
        scores = reference.score_entries(chooser.store.index, heads[r, h], pages, h, chooser)
        reached = scores[:, ~left].logsumexp(1) + math.log(most)
        lse[r, h] = scores[:, left].logsumexp(1).minimum(reached)
        means = unpack_means(chooser.store.records[pages[left], h], 1, 64)[:, 0]
        values[r, h] = scores[:, left].softmax(1) @ means
    return found


@pytest.mark.parametrize("masses", [(1.0, 1.0, 1.0), (0.5, 0.2, 0.3), (0.2, 1.0, 0.6)])
def test_heads_of_uneven_counts_leave_what_they_do_not_list(masses):
    """Some select nothing, and some all that there is, of which a mass takes a part."""
    torch.manual_seed(5)
    chooser, query, rows = setting("exact", 1, torch.float32, gate=1.0)
    counts = torch.tensor([[0, 9], [64, 0], [38, 64]], dtype=torch.int32)  # of 87, 157 and 38 pages
    table = torch.empty_like(counts)
    table[rows.seats.long()] = counts
    chooser = replace(chooser, selection=replace(chooser.selection, counts=table), handle=None)
    rows.numbers["mass"][:] = torch.tensor(masses)
    rows.spared = torch.zeros(len(LENS), dtype=torch.int64)
    for ops, isa in [(reference, None), *((cpu, isa) for isa in visited())]:
        own = clone_rows(rows)
        found = planned(ops, query, own, copy_of(chooser))
        expected = plainly(chooser, query, own)
        lengths = own.lengths.view(len(LENS), KV_HEADS)
        assert lengths[0, 0] == 3 * 16 - 5, "sink and window"
        assert (lengths[2] < LENS[2]).all() == (masses[2] < 1)
        assert found.lse[:2].isfinite().all(), isa
        torch.testing.assert_close(found.lse, expected.lse, atol=1e-3, rtol=0)
        some = found.lse.isfinite()
        near = {"atol": 2e-3, "rtol": 0.0}
        torch.testing.assert_close(found.values[some], expected.values[some], **near)


@covering(dtype=DTYPES, rest=[-math.inf, 3.0, 60.0], sinks=[False, True])
def test_attention_with_a_further_part(dtype, rest, sinks):
    torch.manual_seed(2)
    chooser, query, rows = setting("low_rank", 1, dtype)
    cpu.plan_decode(query, rows, chooser)
    lists = TokenLists(rows.lists, rows.lengths, 16, KV_HEADS)
    units = chooser.store.cache.view(-1, 16, 128)
    part = Remainder(torch.randn(query.shape), torch.full(query.shape[:2], rest))
    part.lse[0, 1] = -math.inf
    logits = torch.randn(KV_HEADS * GROUP) if sinks else None
    found = []
    for ops, isa in [(reference, None), *((cpu, isa) for isa in visited())]:
        output, lse = torch.empty_like(query), torch.empty(query.shape[:2])
        ops.attend(query, lists, units, output, "vec", 0.125, lse=lse, sinks=logits, remainder=part)
        found.append((output.float(), lse, isa))
    expected = found[0]
    for output, lse, isa in found[1:]:
        assert torch.allclose(output, expected[0], atol=0.03, rtol=0.02), isa
        assert torch.allclose(lse, expected[1], atol=0.01), isa


def test_the_whole_is_nearer_to_full_attention():
    """Values of a page that are alike, of which selection alone knows the fewest."""
    torch.manual_seed(3)
    chooser, query, rows = setting("exact", 1, torch.float32, gate=1.0)
    store = chooser.store
    values = store.cache.view(180, KV_HEADS, 2, 16, 64)[:, :, 1]
    values.copy_(torch.randn(180, KV_HEADS, 1, 64) + 0.1 * torch.randn(values.shape))
    cpu.index_pages(torch.arange(180).int(), torch.full((180,), 16).int(), store)
    query *= 4.0
    units, outputs = store.cache.view(-1, 16, 128), []
    context = Contexts(rows.block_table, rows.seq_lens, rows.seats)
    whole = DecodeRows.whole(context, torch.empty(len(rows.lists), 160, dtype=torch.int32))
    for chosen, part in ((whole, None), (rows, None), (rows, Remainder.empty(query))):
        cpu.plan_decode(query, chosen, copy_of(chooser), part)
        lists = TokenLists(chosen.lists, chosen.lengths, 16, KV_HEADS)
        outputs.append(torch.empty_like(query))
        cpu.attend(query, lists, units, outputs[-1], "vec", 0.125, remainder=part)
    uncapped, capped = (plainly(chooser, query, rows, most).lse for most in (math.inf, 0.4))
    some = uncapped == capped
    assert some.any()
    full, alone, added = (output[some] for output in outputs)
    assert (added - full).norm() < 0.1 * (alone - full).norm()


def test_means_survive_packing():
    torch.manual_seed(4)
    values = torch.randn(50, 16, 64) + 5 * torch.randn(50, 1, 64)
    values[7, 3, 2] = math.nan
    found = unpack_means(pack_means(values[:, None]), 1, 64)[:, 0]
    expected = values.mean(1)
    assert found[7].isnan().all()
    rest = torch.arange(50) != 7
    step = expected[rest].abs().amax(1, keepdim=True) / 127
    assert ((found - expected)[rest].abs() <= 0.51 * step).all()


def test_methods_and_what_they_keep():
    config = RetrievalConfig.from_options("kvretrieval", {"page_size": 16, "remainder": 0.003})
    assert config.own.remainder == 0.003
    assert config.index_kinds == (IndexKind(LowRank(), 16, means=1),)
    assert config.index_bytes(4096, 64, torch.bfloat16) == 312 + 66, "9.2 % of a page of 16"
    plain = RetrievalConfig.from_options("kvretrieval", {})
    assert plain.index_kinds == (IndexKind(LowRank(), 32),)
    both = RetrievalConfig.from_options("kvretrieval", {"also": {"added": {"remainder": 0.001}}})
    assert both.index_kinds == (IndexKind(LowRank(), 32, means=1),), "they share their records"


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("kvretrieval", {"index": "min_max"}),
        ("kvretrieval", {"rerank": 2}),
        ("kvretrieval", {"pooling": "max"}),
        ("kvretrieval", {"schedule": "speculative"}),
        ("freekv", {}),
        ("fier", {}),
    ],
)
def test_what_cannot_be_added_up_is_refused(method, options):
    with pytest.raises(RetrievalConfigError, match=r"remainder=0\.01 cannot be added up with"):
        RetrievalConfig.from_options(method, {**options, "remainder": 0.01})


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, math.nan, "0.1", True])
def test_values_that_are_no_part(value):
    with pytest.raises(RetrievalConfigError, match="remainder"):
        RetrievalConfig.from_options("kvretrieval", {"remainder": value})
