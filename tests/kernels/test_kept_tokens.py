"""The ops of methods that drop tokens, against plain torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.test_attend import cache_of, token_lists
from tests.spec import ops as reference
from vllm_kvretrieval.kernels import (
    Chooser,
    Contexts,
    DecodeRows,
    IndexRecords,
    KeptTokens,
    Mode,
    Selection,
    cpu,
)
from vllm_kvretrieval.retrieval.keeping import Keeping
from vllm_kvretrieval.retrieval.pooling import Pooling

pytestmark = pytest.mark.threads
SEATS, HEADS, GROUP, MOST = 5, 3, 2, 40
LENGTH = 300


def rows_of(lens, seats, window=1, width=64):
    contexts = Contexts(
        torch.stack([torch.randperm(64, dtype=torch.int32)[:20] for _ in lens]),
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(seats, dtype=torch.int32),
    )
    return DecodeRows.given(
        contexts,
        torch.full((len(lens) * HEADS, width), -1, dtype=torch.int32),
        lengths=torch.zeros(len(lens) * HEADS, dtype=torch.int32),
        sink=0,
        window=window,
        fresh=False,
        per_token=True,
    )


# ---------------------------------------------------------------------------- weights of attention


@pytest.mark.parametrize(
    ("layout", "run"), [("rows", 1), ("rows", 32), ("vec", 32), ("vec", 16), ("amx", 32)]
)
def test_weights(isa, layout, run):
    """They add up to 1, of lists of any length; what lies behind them stays as it is."""
    torch.manual_seed(run)
    dtype = torch.bfloat16 if layout == "amx" else torch.float32
    cache = cache_of(60, HEADS, 32, 64, dtype)
    lengths = (1, 700, 31, 32, 33, 640)
    lists = token_lists(lengths, cache, run)
    query = torch.randn(2, HEADS * GROUP, 64).to(dtype)
    expected, actual = (torch.full((2, HEADS * GROUP, 710), -1.0) for _ in range(2))
    out, plain = torch.empty_like(query), torch.empty_like(query)
    reference.attend(query, lists, cache, out, layout, 0.3, weights=expected)
    cpu.attend(query, lists, cache, out, layout, 0.3, weights=actual)
    cpu.attend(query, lists, cache, plain, layout, 0.3)
    assert torch.equal(out, plain)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    for unit, length in enumerate(lengths):
        heads = actual[unit // HEADS].unflatten(0, (HEADS, GROUP))[unit % HEADS]
        torch.testing.assert_close(heads[:, :length].sum(-1), torch.ones(GROUP))
        assert heads[:, length:].eq(-1).all()


def test_weights_that_do_not_fit():
    cache = cache_of(60, HEADS, 32, 64, torch.float32)
    lists = token_lists((5, 9, 7), cache, 1)
    query = torch.randn(1, HEADS * GROUP, 64)
    out = torch.empty_like(query)
    with pytest.raises(ValueError, match=r"lengths\[1\] is 9, weights hold 8"):
        cpu.attend(query, lists, cache, out, "rows", 0.3, weights=torch.empty(1, HEADS * GROUP, 8))
    with pytest.raises(ValueError, match="weights must be"):
        cpu.attend(query, lists, cache, out, "rows", 0.3, weights=torch.empty(2, HEADS * GROUP, 9))
    wrong = torch.empty(1, HEADS * GROUP, 9, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"weights must be torch.float32"):
        cpu.attend(query, lists, cache, out, "rows", 0.3, weights=wrong)


# ------------------------------------------------------------------------------- what has been kept


def chooser_of(counts):
    selection = Selection.empty(
        seats=SEATS, kv_heads=HEADS, group=GROUP, head_size=64, most_selected=MOST,
        dtype=torch.float32, counts=counts,
    )  # fmt: skip
    selection.query.fill_(7)
    store = IndexRecords.empty(
        None, pages=64, kv_heads=HEADS, head_size=64, page_size=32, dtype=torch.float32
    )
    return Chooser(store, selection, Pooling.SUM, 0.1)


def kept_rows(window):
    torch.manual_seed(window)
    counts = torch.randint(1, MOST + 1, (SEATS, HEADS), dtype=torch.int32)
    counts[1, 2] = 0
    chooser = chooser_of(counts)
    for seat in range(SEATS):
        for head in range(HEADS):
            chosen = torch.randperm(LENGTH)[:MOST].sort().values
            chooser.selection.chosen[seat, head] = chosen
    return rows_of((400, 333, 310), (3, 1, 4), window), chooser


@pytest.mark.parametrize("window", [1, 10])
def test_lists_of_what_has_been_kept(isa, window):
    """The op scores, compares and remembers nothing."""
    listed = []
    for ops in (reference, cpu):
        rows, chooser = kept_rows(window)
        before = chooser.selection.chosen.clone()
        ops.plan_decode(torch.randn(3, HEADS * GROUP, 64), rows, chooser)
        assert torch.equal(chooser.selection.chosen, before)
        assert chooser.selection.query.eq(7).all()
        assert not len(rows.corrected)
        listed.append((rows.lists, rows.lengths))
    for actual, expected in zip(*listed, strict=True):
        assert torch.equal(actual, expected)
    _, chooser = kept_rows(window)
    counts = chooser.selection.counts
    assert counts is not None
    expected = counts[[3, 1, 4]].flatten() + window
    assert torch.equal(listed[0][1], expected)


@pytest.mark.parametrize("per_token", [False, True])
def test_heads_that_leave_nothing_out(isa, per_token):
    """They attend to whole contexts, and the selection has no room for it."""
    counts = torch.full((SEATS, HEADS), 1 << 20, dtype=torch.int32)
    counts[:, 1] = 0
    window = 3
    for ops in (reference, cpu):
        rows, chooser = rows_of((400, 333, 65), (3, 1, 4), window, 512), chooser_of(counts)
        rows.per_token = per_token
        rows.sink[:] = 1
        if not per_token:
            rows.sink[2] = rows.window[2] = 0
            rows.mode[2] = Mode.WHOLE
        ops.plan_decode(torch.randn(3, HEADS * GROUP, 64), rows, chooser)
        for unit, listed in enumerate(rows.lists):
            row, head = divmod(unit, HEADS)
            units = int(rows.seq_lens[row]) if per_token else -(-int(rows.seq_lens[row]) // 32)
            positions = list(range(units))
            if head == 1 and rows.mode[row] == Mode.GIVEN:
                positions = [0, *positions[-window:]]
            page, offset = torch.tensor(positions), torch.zeros(len(positions), dtype=torch.int64)
            if per_token:
                page, offset = page // 32, page % 32
            numbers = rows.block_table[row, page].long() * HEADS + head
            expected = numbers * 32 + offset if per_token else numbers
            assert listed[listed >= 0].tolist() == expected.tolist()
            tokens = len(positions) * (1 if per_token else 32)
            tokens -= 0 if per_token else units * 32 - int(rows.seq_lens[row])
            assert rows.lengths[unit] == tokens
    counts[3, 0] = 50
    rows = replace(rows, per_token=True, handle=None)
    with pytest.raises(ValueError, match="the count to select is 50, 10 more than the 40 that the"):
        cpu.plan_decode(torch.randn(3, HEADS * GROUP, 64), rows, chooser)


@pytest.mark.parametrize("position", [-1, 310])
def test_what_is_not_in_the_context_is_refused(position):
    rows, chooser = kept_rows(1)
    chooser.selection.chosen[4, 0, 0] = position
    with pytest.raises(ValueError, match=f"row 2: the selection holds {position}, outside"):
        cpu.plan_decode(torch.randn(3, HEADS * GROUP, 64), rows, chooser)
    assert rows.lengths.eq(0).all()


# ---------------------------------------------------------------------------------- what is dropped

RULES = {
    "sum": Keeping(recent_share=0.5),
    "latest": Keeping(rating="latest", sink=2),
    "recent": Keeping(recent=9, recent_share=0.1),
    "all spared": Keeping(recent=100),
    "stamp": Keeping(rating="stamp", page=16, recent=16),
    "pages": Keeping(page=8, sink=8),
    "position": Keeping(rating="position", recent_share=0.5, sink=1),
}


def state(rule, budget):
    """State of seats that keep as many tokens as they may, fewer, and none; heads differ."""
    counts = torch.full((SEATS, HEADS), budget - 1, dtype=torch.int32)
    counts[2], counts[0, 1] = budget - 3, budget - 2
    if rule.page == 1:
        counts[4] = 0
    budgets = torch.full_like(counts, budget)
    chosen = torch.zeros(SEATS, HEADS, MOST, dtype=torch.int32)
    for seat in range(SEATS):
        for head in range(HEADS):
            count = int(counts[seat, head])
            whole = torch.randperm(LENGTH // rule.page)[: -(-count // rule.page)].sort().values
            tokens = (whole[:, None] * rule.page + torch.arange(rule.page)).flatten()
            chosen[seat, head, :count] = tokens[:count]
    ratings = torch.rand(SEATS, HEADS, MOST)
    if rule.rating in ("stamp", "position"):
        ratings = torch.randint(0, 300, ratings.shape).float()
    return KeptTokens(chosen, ratings, counts, budgets)


def copy(kept):
    return KeptTokens(kept.chosen.clone(), kept.ratings.clone(), kept.counts, kept.budgets)


@pytest.mark.parametrize("sets", [1, HEADS])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_drops_the_least(rule, sets):
    torch.manual_seed(sets)
    for budget in (MOST, 20):
        kept = state(rule, budget)
        weights = torch.rand(4, sets, GROUP, MOST + 1) ** 12
        rows = rows_of((LENGTH + 1, LENGTH + 9, 301, 310), (0, 1, 2, 4))
        ours, expected = copy(kept), copy(kept)
        cpu.drop_tokens(weights, rows, ours, rule)
        reference.drop_tokens(weights, rows, expected, rule)
        for seat in (0, 1, 2, 4):
            for head in range(HEADS):
                added = int(kept.counts[seat, head]) + 1
                left = added - rule.page if added >= budget else added
                here = (seat, head, slice(max(left, 0)))
                assert torch.equal(ours.chosen[here], expected.chosen[here])
                torch.testing.assert_close(ours.ratings[here], expected.ratings[here])
                assert (ours.chosen[here].diff() > 0).all()
        assert torch.equal(ours.chosen[3], kept.chosen[3])


def test_stamps_leave_a_token_that_never_leaves():
    """A page of a prompt, though steps attend to it. The page goes that no step attends to."""
    rule = RULES["stamp"]
    for ops in (reference, cpu):
        counts = torch.full((SEATS, HEADS), 63, dtype=torch.int32)
        chosen = torch.arange(64, dtype=torch.int32).repeat(SEATS, HEADS, 1)
        ratings = torch.zeros(chosen.shape)
        ratings[..., :16] = float("inf")
        kept = KeptTokens(chosen, ratings, counts, torch.full_like(counts, 64))
        weights = torch.zeros(1, HEADS, GROUP, 65)
        weights[..., :32] = 1
        ops.drop_tokens(weights, rows_of((64,), (2,)), kept, rule)
        assert kept.ratings[2, :, :16].isinf().all()
        assert kept.chosen[2, 0, :48].tolist() == [*range(32), *range(48, 64)]
        assert kept.ratings[2, 0, 16:48].tolist() == [63.0] * 16 + [0.0] * 16


SINK = range(4)


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        (Keeping(sink=4, recent=100), [*SINK, *range(193, 200)], [*SINK, *range(194, 201)]),
        (Keeping(sink=4, recent_share=0.9), [*SINK, *range(193, 200)], [*SINK, *range(194, 201)]),
        (Keeping(sink=11, recent=9), [*range(11)], [*range(11)]),
        (Keeping(sink=64, recent=9), [*range(11)], [*range(11)]),
        (Keeping(sink=300, recent=9), [*range(11)], [*range(11)]),
        (Keeping(sink=4, recent=8, page=4), [*SINK, *range(192, 200)], [*SINK, *range(196, 201)]),
    ],
)  # fmt: skip
def test_a_budget_without_room_for_sink_and_recent_tokens(rule, before, after):
    """The sink stays, whatever its ratings, and as many recent tokens as fit."""
    for ops in (reference, cpu):
        budget = len(before) + 1
        counts = torch.full((SEATS, HEADS), len(before), dtype=torch.int32)
        chosen = torch.zeros(SEATS, HEADS, MOST, dtype=torch.int32)
        chosen[..., : len(before)] = torch.tensor(before)
        ratings = torch.rand(chosen.shape)
        ratings[..., :4] = 0
        kept = KeptTokens(chosen, ratings, counts, torch.full_like(counts, budget))
        weights = torch.rand(1, HEADS, GROUP, MOST + 1)
        ops.drop_tokens(weights, rows_of((201,), (2,)), kept, rule)
        assert chosen[2, :, : len(after)].tolist() == [after] * HEADS


def test_what_does_not_fit_is_refused():
    rule = RULES["sum"]
    kept, rows = state(rule, MOST), rows_of((301,), (0,))
    weights = torch.rand(1, HEADS, GROUP, MOST + 1)
    cases: list[tuple[str, Any, Any, Any]] = [
        ("is outside the", weights, rows_of((301,), (SEATS,)), kept),
        ("tokens kept of 39", weights, rows_of((39,), (0,)), kept),
        ("with weights of 39", torch.rand(1, HEADS, GROUP, 39), rows, kept),
        ("2 sets of weights for 3", torch.rand(1, 2, GROUP, MOST + 1), rows, kept),
        ("weights must be contiguous", weights.transpose(1, 2), rows, kept),
        ("weights must be torch.float32", weights.double(), rows, kept),
        ("a budget of 41", weights, rows, copy(kept)),
        ("ratings must be", weights, rows, copy(kept)),
    ]
    cases[6][3].budgets = kept.budgets + 1
    cases[7][3].ratings = kept.ratings[:, :, :-1]
    for message, given, of, what in cases:
        before = what.chosen.clone()
        with pytest.raises(ValueError, match=message):
            cpu.drop_tokens(given, of, what, rule)
        assert torch.equal(what.chosen, before)
