"""Rows with draft tokens: each query as a row of its own, and no trace of what is rejected."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.test_attend import TOLERANCE, cache_of, token_lists
from tests.kernels.test_token_recall import HEADS, MOST_PAGES, PAGE, REQUESTS, WIDTH, Home
from tests.kernels.test_token_recall import rows_of as recalled_rows
from tests.spec import ops as reference
from tests.support.kernel_checks import (
    DTYPES,
    KERNELS,
    clone_rows,
    copy_of,
    fresh_records,
    make_chooser,
    make_rows,
    put_keys,
    specified,
)
from vllm_kvretrieval.attention.cpu.drafts import DraftedRecords
from vllm_kvretrieval.engine.requests import RequestTable
from vllm_kvretrieval.kernels import Remainder, TokenLists, cpu
from vllm_kvretrieval.retrieval.index import make_index

pytestmark = pytest.mark.threads


def starts_of(*queries):
    return torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int()


def apart(lists, starts):
    """The same lists, with a row for each query."""
    row = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
    unseen = starts[1:].repeat_interleave(starts.diff()) - 1 - torch.arange(len(row))
    of_row = lists.lengths.view(-1, lists.kv_heads)[row] - unseen[:, None]
    entries = lists.entries.unflatten(0, (-1, lists.kv_heads))[row].flatten(0, 1)
    return replace(lists, entries=entries, lengths=of_row.flatten().int(), starts=None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "kv_heads", "group", "head_size", "page_size", "run", "lengths"),
    [
        ("token_major", 3, 3, 64, 32, 1, (9, 700, 31, 32, 33, 640)),
        ("token_major", 2, 7, 64, 32, 32, (1000, 90, 1024, 12)),
        ("vec", 3, 3, 64, 32, 32, (256, 700, 31, 257, 263, 8100)),
        ("vec16", 1, 4, 256, 16, 16, (300, 129)),
        ("vec", 2, 8, 128, 64, 64, (2000, 64, 100, 1024)),
        ("amx", 2, 1, 96, 64, 64, (77, 513, 260, 11)),
    ],
)
def test_a_query_is_a_row_of_its_own(
    isa, dtype, layout, kv_heads, group, head_size, page_size, run, lengths
):
    """To the last bit, beside other rows, a remainder and sinks."""
    if layout == "amx" and dtype == torch.float32:
        pytest.skip("no layout for it")
    torch.manual_seed(len(lengths))
    cache = cache_of(9000 // page_size, kv_heads, page_size, head_size, dtype)
    counts = (5, 9)[: len(lengths) // kv_heads]
    lists = replace(token_lists(lengths, cache, run), starts=starts_of(*counts))
    queries, heads = sum(counts), kv_heads * group
    query = torch.randn(queries, heads + 2, head_size).to(dtype)[:, :heads]
    remainder = Remainder(torch.randn(queries, heads, head_size), torch.randn(queries, heads))
    remainder.lse[1] = float("-inf")
    sinks = torch.linspace(-4, 4, heads)
    found = []
    for of in (lists, apart(lists, lists.starts)):
        output, lse = torch.zeros_like(query), torch.zeros(queries, heads)
        known = query, of, cache, output, layout, 0.3, lse, None, 20.0, sinks, remainder
        cpu.attend(*known)
        found += [output, lse]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    expected, sums = torch.zeros_like(query), torch.zeros(queries, heads)
    known = query, lists, cache, expected, layout, 0.3, sums, None, 20.0, sinks, remainder
    specified(reference.attend, *known)
    torch.testing.assert_close(found[0], expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(found[1], sums, atol=2e-4, rtol=1e-5)


def test_long_lists_are_equal_to_rounding(isa):
    """Stretches of longer lists depend on their lengths."""
    torch.manual_seed(0)
    cache = cache_of(700, 1, 32, 64, torch.float32)
    lists = replace(token_lists((20_003,), cache, 32), starts=starts_of(6))
    query = torch.randn(6, 3, 64)
    found = [torch.empty_like(query) for _ in range(2)]
    for of, output in zip((lists, apart(lists, lists.starts)), found, strict=True):
        cpu.attend(query, of, cache, output, "vec", 0.3)
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("layout", "run"), [("token_major", 1), ("vec", 32)])
def test_infinite_values_of_drafts_reach_no_query_before(isa, layout, run):
    """The draft is wrong, and a query that does not see it is right."""
    torch.manual_seed(1)
    cache = cache_of(60, 1, 32, 64, torch.float32)
    lists = replace(token_lists((301,), cache, run), starts=starts_of(4))
    clean, query = torch.empty(4, 3, 64), torch.randn(4, 3, 64)
    cpu.attend(query, lists, cache, clean, layout, 0.3)
    last = int(lists.entries[0, -(-301 // run) - 1]) * run + 300 % run
    if layout == "token_major":
        cache.view(-1, 128)[last, 64:] = float("inf")
    else:
        cache.view(-1, 2, 64, 32)[last // 32, 1].view(32, 64)[last % 32] = float("inf")
    output = torch.empty_like(query)
    cpu.attend(query, lists, cache, output, layout, 0.3)
    assert torch.equal(output[:3], clean[:3])
    assert not output[3].isfinite().any()


def test_all_heads_share_a_list(isa):
    """As rows over whole contexts do."""
    torch.manual_seed(2)
    cache = cache_of(60, 2, 32, 64, torch.float32)
    table = torch.randperm(60)[:20].int()[None]
    lengths, starts = torch.tensor([600, 600], dtype=torch.int32), starts_of(3)
    lists = TokenLists(table, lengths, 32, 2, per_head=False, starts=starts)
    query, output = torch.randn(3, 4, 64), torch.empty(3, 4, 64)
    cpu.attend(query, lists, cache, output, "vec", 0.3)
    for i in range(3):
        single, alone = replace(lists, lengths=lengths - 2 + i, starts=None), torch.empty(1, 4, 64)
        cpu.attend(query[i : i + 1], single, cache, alone, "vec", 0.3)
        assert torch.equal(output[i], alone[0])


def test_queries_that_do_not_fit_are_refused():
    cache = cache_of(20, 1, 32, 64, torch.float32)
    lists, query = token_lists((300, 3), cache, 32), torch.zeros(9, 3, 64)
    for starts, message in (
        ([0, 4], "starts has 2 entries, 2 rows need 3"),
        ([1, 4, 5], "the first query is 1, not 0"),
        ([0, 4, 4], "row 1: 0 queries"),
        ([0, -1, 1], "row 0: -1 queries"),
        ([0, 4, 10], r"query must be .*10"),
        ([0, 1, 6], r"lengths\[1\] is 3, a list holds from 5"),
    ):
        of = replace(lists, starts=torch.tensor(starts, dtype=torch.int32))
        with pytest.raises(ValueError, match=message):
            cpu.attend(query, of, cache, torch.zeros_like(query), "vec", 0.3)
    of = replace(lists, starts=starts_of(2, 1))
    weights, output = torch.zeros(2, 3, 400), torch.zeros_like(query)
    with pytest.raises(ValueError, match="row 0: 2 queries; weights are of single ones"):
        cpu.attend(query, of, cache, output, "vec", 0.3, weights=weights)
    chooser = make_chooser(30, 3, 1, 3, 64, torch.float32)
    for drafts, window, message in ((40, 1, "its window of 1 pages lacks"), (650, 2, "650 draft")):
        rows = make_rows([640], chooser, (1, window, 3))
        rows.starts = starts_of(1 + drafts)
        with pytest.raises(ValueError, match=f"row 0: .*{message}"):
            cpu.plan_decode(torch.zeros(1, 3, 64), rows, chooser)


@pytest.mark.parametrize("index", KERNELS)
@pytest.mark.parametrize("drafts", [1, 7, 40])
def test_drafts_change_no_selection(index, drafts):
    """A row with drafts selects as without them, and its window has them, too."""
    torch.manual_seed(drafts)
    chooser = make_chooser(60, 3, 2, 3, 64, torch.bfloat16, index=make_index(index))
    budget, lens = (2, 2, 5), [41 * 32 - 5, 23 * 32, 9 * 32 + 1]
    alone = make_rows(lens, chooser, budget, fresh=1)
    size, query = 32, torch.randn(3, 6, 64).bfloat16()
    rows = clone_rows(alone)
    pages = [-(-length // size) for length in lens]
    ends = [-(-(length + drafts) // size) for length in lens]
    rows.block_table = torch.stack([torch.randperm(60)[: max(ends)] for _ in lens]).int()
    rows.block_table[:, : alone.block_table.shape[1]] = alone.block_table[:, : max(ends)]
    rows.seq_lens = alone.seq_lens + drafts
    more = torch.tensor(ends) - torch.tensor(pages)
    rows.window = (alone.window + more).int()
    rows.starts = starts_of(*[1 + drafts] * 3)
    rows.lists = torch.full((6, 60), -1, dtype=torch.int32)
    first, second = copy_of(chooser), copy_of(chooser)
    cpu.plan_decode(query, alone, first)
    cpu.plan_decode(query, rows, second)
    assert torch.equal(first.selection.chosen, second.selection.chosen)
    assert torch.equal(first.selection.query, second.selection.query)
    for unit, (ours, theirs) in enumerate(zip(alone.lists, rows.lists, strict=True)):
        row, head = divmod(unit, 2)
        new = rows.block_table[row, pages[row] : ends[row]] * 2 + head
        assert theirs[theirs >= 0].tolist() == [*ours[ours >= 0].tolist(), *new.tolist()]
        assert rows.lengths[unit] == alone.lengths[unit] + drafts


@pytest.mark.parametrize("shared", [False, True], ids=["per head", "shared"])
def test_rejected_tokens_leave_recalled_ones(shared):
    """Tokens in slots are those of home after other ones have taken the places of drafts."""
    home, counts = Home(3 if shared else 1), torch.zeros(REQUESTS, 3, dtype=torch.int64)
    memories = [torch.zeros(REQUESTS, HEADS, 64, WIDTH).to(torch.bfloat16) for _ in home.layers]
    recall = cpu.TokenRecall(home.layers, memories, counts, shared)
    random = torch.Generator().manual_seed(3)
    table, length = torch.randperm(40, generator=random)[:MOST_PAGES].tolist(), 5 * PAGE
    stale, misses = 0, 0
    for step in range(60):
        drafts = int(torch.randint(0, 7, (), generator=random))
        for position in range(length, length + 1 + drafts):
            for layer in home.layers:
                new = torch.randn(HEADS, WIDTH, generator=random)
                layer[table[position // PAGE], :, position % PAGE] = new.to(layer.dtype)
        lens = [length + 1 + drafts]
        rows = recalled_rows([table], lens, [0], [step == 0], random, shared)
        rows.starts = starts_of(1 + drafts)
        found, named = TokenLists.empty(rows, 1, HEADS), rows.lists[rows.lists >= 0].long()
        found.entries.fill_(-1)
        before = int(counts[:, 1].sum())
        recall.recall(rows, found)
        for layer in range(len(home.layers)):
            recall.wait(layer)
        misses += int(counts[:, 1].sum()) > before
        for ours, layer in zip(memories, home.layers, strict=True):
            there = ours.flatten(0, 2)[found.entries[rows.lists >= 0].long()]
            assert there.equal(layer.flatten(0, 2)[named])
        accepted = int(torch.randint(0, drafts + 1, (), generator=random))
        stale += accepted < drafts
        length += 1 + accepted
    assert stale > 20
    assert misses > 20


def test_records_that_grow_hold_no_rejected_keys():
    """Before layers select, they hold the keys that are certain; full pages those of the text.

    Against records of the same keys written one by one, over random drafts behind a prompt.
    """
    torch.manual_seed(0)
    random, size, pages, prompt = np.random.default_rng(0), 32, 24, 37
    chooser = make_chooser(pages, 1, 2, 3, 64, torch.bfloat16, parts=2)
    drafted, alone = chooser.store, fresh_records(chooser.store)
    requests: Any = SimpleNamespace(
        seats=np.arange(1),
        ends=np.array([prompt], dtype=np.int32),
        per_seat=lambda: np.zeros(1, dtype=np.int32),
    )
    requests.certain = partial(RequestTable.certain, requests)
    records, table = DraftedRecords(requests, size), torch.randperm(pages).int()[None]
    text = torch.randn(pages * size, 2, 64).bfloat16()

    def write(store, begin, keys):
        positions = torch.arange(begin, begin + len(keys))
        slots = table[0].long()[positions // size] * size + positions % size
        if store is drafted:
            put_keys(store, keys, slots)
        cpu.update_index(keys, slots, store)

    def assert_same(tokens):
        entries = (table[0].long()[:, None] * 2 + torch.arange(2)).flatten()[: -(-tokens // 16)]
        assert torch.equal(drafted.records[entries], alone.records[entries])

    length, rejected = 0, 0
    while length < len(text) - 40:
        reads = length < prompt
        certain = min(length + 20, prompt) if reads else length + 1
        drafts = 0 if reads else int(random.integers(0, 8))
        accepted = int(random.integers(0, drafts + 1))
        rejected += accepted < drafts
        wrong = 3 * torch.randn(drafts - accepted, 2, 64).bfloat16()
        write(drafted, length, torch.cat([text[length : certain + accepted], wrong]))
        write(alone, length, text[length:certain])
        lens, before = (np.array([n], dtype=np.int32) for n in (certain + drafts, length))
        plan = records.plan(lens, before, table)
        if plan is not None:
            cpu.index_pages(plan.selecting.ids, plan.selecting.lengths, drafted)
        assert_same(certain)
        if plan is not None and plan.written is not None:
            cpu.index_pages(plan.written.ids, plan.written.lengths, drafted)
        write(alone, certain, text[certain : certain + accepted])
        length = certain + accepted
        assert_same(length // size * size)
    assert rejected > 40
