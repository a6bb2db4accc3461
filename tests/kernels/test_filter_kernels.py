"""Selecting tokens at a filter layer, and listing them, against plain torch per instruction set."""

from dataclasses import replace

import pytest
import torch

from tests.spec import ops as reference
from tests.support.covering import covering
from tests.support.isas import visited
from tests.support.kernel_checks import DTYPES, specified
from vllm_kvretrieval.kernels import (
    Contexts,
    ContextSelector,
    DecodeRows,
    IndexRecords,
    Mode,
    cpu,
)
from vllm_kvretrieval.retrieval.index.exact import Exact

pytestmark = pytest.mark.threads

GROUPS = [(3, 3, 64, 32), (2, 7, 64, 32), (1, 4, 256, 16), (2, 1, 96, 64), (1, 11, 80, 128)]
GROUPS += [(2, 3, 64, 256)]


def make_selector(kv_heads, group, head_size, page_size, dtype, layout, seats=6):
    cache = torch.randn(40, kv_heads, page_size, 2 * head_size).to(dtype)
    store = IndexRecords.empty(
        Exact(),
        pages=len(cache),
        kv_heads=kv_heads,
        head_size=head_size,
        page_size=page_size,
        dtype=dtype,
        cache=cache,
        layout=layout,
    )
    chosen = torch.full((seats, 700), -1, dtype=torch.int32)
    return ContextSelector(store, chosen, group, head_size**-0.5)


def make_rows(lens, selector, sink=20, window=30, select=100, kv_heads=None):
    """Requests whose pages are anywhere; one of them selects nothing."""
    store, count = selector.store, len(lens)
    width = -(-max(lens) // store.page_size)
    table = torch.stack([torch.randperm(store.pages)[:width] for _ in lens]).int()
    heads = kv_heads or store.kv_heads
    seats = torch.randperm(len(selector.chosen))[:count].int()
    return DecodeRows.selecting(
        Contexts(table, torch.tensor(lens, dtype=torch.int32), seats),
        torch.full((count * heads, sink + window + select + 2), -1, dtype=torch.int32),
        lengths=torch.full((count * heads,), -1, dtype=torch.int32),
        sink=sink,
        window=window,
        select=select,
        fresh=False,
        corrected=torch.zeros(len(selector.chosen), dtype=torch.int64),
        per_token=True,
    )


def make_rows_like(rows, kv_heads):
    """The same rows, with lists for another number of KV heads."""
    lists = torch.full((len(rows) * kv_heads, rows.lists.shape[1]), -1, dtype=torch.int32)
    return replace(rows, lists=lists, lengths=torch.full((len(lists),), -1).int(), handle=None)


def make_queries(rows, selector, count, dtype):
    """A query as in a model: a strided view of the output of the fused projection."""
    heads = selector.store.kv_heads * selector.group
    size = selector.store.head_size
    return 3 * torch.randn(len(rows) * count + 1, heads + 2, size).to(dtype)[:, :heads]


def scores_of(query, weights, rows, selector, row):
    queries = query[: weights.numel()].unflatten(0, weights.shape)[row]
    length = int(rows.seq_lens[row])
    ratings = reference.context_ratings(queries, rows.block_table[row], length, selector)
    return reference.context_scores(ratings, weights[row])


def assert_selects_the_best(query, weights, rows, selector, tolerance=1e-4):
    """Rising, distinct, and only tokens that score as much as the specification's least, nearly."""
    expected = replace(selector, chosen=selector.chosen.clone().fill_(-1), handle=None)
    specified(reference.select_context, query, weights, rows, expected)
    for _ in visited():
        selector.chosen.fill_(-1)
        cpu.select_context(query, weights, rows, selector)
        _assert_nearly_as_good(query, weights, rows, selector, expected, tolerance)


def _assert_nearly_as_good(query, weights, rows, selector, expected, tolerance):
    differing = 0
    for row in range(len(rows)):
        select, seat = int(rows.select[row]), int(rows.seats[row])
        ours, best = selector.chosen[seat, :select].long(), expected.chosen[seat, :select].long()
        assert (ours.diff() > 0).all()
        scores = scores_of(query, weights, rows, selector, row)
        sink, end = int(rows.sink[row]), len(scores) - int(rows.window[row])
        assert not select or sink <= ours[0] <= ours[-1] < end
        wrong = ours[~torch.isin(ours, best)]
        margin = tolerance * (1 if weights.shape[1] == 1 else float(scores[sink:end].max()))
        assert (scores[wrong] >= scores[best].min() - margin).all() if len(wrong) else True
        differing += len(wrong)
        assert (selector.chosen[seat, select:] == -1).all()
    assert differing <= 2, "rounding makes a tie now and then, not so many"


def weights_of(rows, count):
    weights = 2.0 ** torch.arange(1 - count, 1).repeat(rows, 1)
    if rows > 1 and count > 1:
        weights[1, : count - 2] = 0  # a request that has just begun
    return weights


@covering(queries=[1, 5], dtype=DTYPES, kv_heads__group__head_size__page_size=GROUPS)
def test_selection_equals_reference(dtype, kv_heads, group, head_size, page_size, queries):
    torch.manual_seed(head_size + queries)
    layouts = ["vec", "token_major"] + ["amx"] * (dtype is torch.bfloat16)
    for layout in layouts:
        selector = make_selector(kv_heads, group, head_size, page_size, dtype, layout)
        rows = make_rows([152, 600, 151, 577], selector)
        rows.select[3] = 0
        query = make_queries(rows, selector, queries, dtype)
        weights = weights_of(len(rows), queries)
        assert_selects_the_best(query, weights, rows, selector)


@covering(
    queries=[1, 5], dtype=DTYPES, softcap__with_sinks=[(4.0, False), (0.0, True), (9.0, True)]
)
def test_soft_capping_and_sinks(dtype, queries, softcap, with_sinks):
    """Both change which heads have much attention to give, and so the order of tokens."""
    torch.manual_seed(queries)
    plain = make_selector(2, 3, 64, 32, dtype, "vec")
    sinks = torch.linspace(-20, 40, 6) if with_sinks else None
    selector = replace(plain, softcap=softcap, sinks=sinks)
    rows = make_rows([152, 600, 151, 577], selector)
    query, weights = make_queries(rows, selector, queries, dtype), weights_of(len(rows), queries)
    assert_selects_the_best(query, weights, rows, selector)
    found = selector.chosen.clone()
    cpu.select_context(query, weights, rows, replace(plain, chosen=selector.chosen))
    assert not found.equal(selector.chosen)
    wrong = replace(selector, sinks=torch.zeros(5), handle=None)
    with pytest.raises(ValueError, match=r"sinks must be float32 \[6\], got"):
        cpu.select_context(query, weights, rows, wrong)


@pytest.mark.parametrize("page_size", [48, 512])
def test_pages_that_do_not_fill_tasks_are_refused(page_size):
    selector = make_selector(1, 1, 64, page_size, torch.float32, "vec")
    rows = make_rows([600], selector)
    query, weights = make_queries(rows, selector, 1, torch.float32), weights_of(1, 1)
    with pytest.raises(ValueError, match="in pages of 16 to 256, powers of two"):
        cpu.select_context(query, weights, rows, selector)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_workers_select_together(isa, dtype, queries):
    assert_workers_agree(cpu, dtype, queries)


@pytest.mark.parametrize("queries", [1, 5])
def test_workers_select_together_by_the_reference(queries):
    assert_workers_agree(reference, torch.float32, queries)


def assert_workers_agree(ops, dtype, queries):
    """Workers that each know their heads, and the highest of the others, select as one with all
    heads."""
    torch.manual_seed(queries)
    every = make_selector(4, 3, 64, 32, dtype, "token_major")
    rows = make_rows([152, 600, 151, 577], every)
    rows.select[3] = 0
    query, weights = make_queries(rows, every, queries, dtype), weights_of(len(rows), queries)
    ops.select_context(query, weights, rows, every)
    parts = []
    for kv_heads in (slice(0, 3), slice(3, 4)):
        store = every.store
        cache, records = (t[:, kv_heads].contiguous() for t in (store.cache, store.records))
        part = replace(store, cache=cache, records=records, handle=None)
        heads = slice(3 * kv_heads.start, 3 * kv_heads.stop)
        chosen = torch.full_like(every.chosen, -1)
        parts.append((query[:, heads], ContextSelector(part, chosen, 3, every.scale)))

    known: list[torch.Tensor] = []
    for own, selector in parts:
        ops.select_context(own, weights, rows, selector, known.append)
    highest = torch.maximum(*(ratings.clone() for ratings in known))
    for own, selector in parts:
        assert not selector.chosen.equal(every.chosen)
        ops.select_context(own, weights, rows, selector, lambda ratings: ratings.copy_(highest))
        assert selector.chosen.equal(every.chosen)


def test_heads_count_alike(isa):
    """A token is taken for one head's attention alone, however little the others give it."""
    selector = make_selector(2, 2, 64, 32, torch.float32, "token_major")
    rows = make_rows([640], selector, select=1)
    keys = selector.store.cache[..., :64]
    keys.zero_()
    query = torch.zeros(1, 4, 64)
    query[0, 1, 5] = 80.0
    position = 333
    page = int(rows.block_table[0, position // 32])
    keys[page, 0, position % 32, 5] = 1.0
    cpu.select_context(query, torch.ones(1, 1), rows, selector)
    assert selector.chosen[int(rows.seats[0]), 0] == position
    assert_selects_the_best(query, torch.ones(1, 1), rows, selector)


@pytest.mark.parametrize("infinite", ["queries", "key"])
@pytest.mark.parametrize("queries", [1, 3])
def test_heads_whose_attention_is_no_number_leave_the_others(isa, queries, infinite):
    """Whichever it is."""
    selector = make_selector(4, 1, 64, 32, torch.float32, "token_major")
    rows = make_rows([640], selector, select=3)
    clean = selector.store.cache
    clean.zero_()
    wanted = [100, 200, 300, 400]
    pages = rows.block_table[0]
    for head, position in enumerate(wanted):
        clean[pages[position // 32], head, position % 32, head] = 1.0
    weights, seat = weights_of(1, queries), int(rows.seats[0])
    for head in range(4):
        cache, query = clean.clone(), 80 * torch.eye(4, 64).repeat(queries, 1, 1)
        if infinite == "queries":
            query[:, head, 0] = torch.inf
        else:
            cache[pages[333 // 32], head, 333 % 32, head] = torch.inf
        other = replace(selector, store=replace(selector.store, cache=cache, handle=None))
        other.handle = None
        expected = [position for position in wanted if position != wanted[head]]
        for ops in (cpu, reference):
            ops.select_context(query, weights, rows, other)
            assert other.chosen[seat, :3].tolist() == expected, ops.__name__


def test_far_scores_keep_their_order(isa):
    """Shares that no float holds: a head whose attention is elsewhere still ranks the rest."""
    torch.manual_seed(0)
    selector = make_selector(1, 2, 64, 32, torch.float32, "vec")
    rows = make_rows([1000], selector, sink=32, window=32)
    query = 500 * torch.randn(1, 2, 64)
    # Logarithms of thousands: their rounding is, too.
    assert_selects_the_best(query, torch.ones(1, 1), rows, selector, tolerance=2e-2)
    assert len(set(selector.chosen[int(rows.seats[0]), :100].tolist())) == 100


def test_what_lies_behind_a_context_is_not_read(isa):
    """The rest of the last page may hold anything."""
    torch.manual_seed(1)
    selector = make_selector(2, 2, 64, 32, torch.float32, "token_major")
    rows = make_rows([300], selector)
    cache = selector.store.cache
    cache[rows.block_table[0, 9].long(), :, 300 % 32 :] = torch.nan
    assert_selects_the_best(
        make_queries(rows, selector, 4, torch.float32), torch.ones(1, 4), rows, selector
    )


def test_no_numbers_select_something(isa):
    selector = make_selector(2, 2, 64, 32, torch.float32, "token_major")
    rows = make_rows([300], selector)
    query = torch.full((1, 4, 64), torch.nan)
    cpu.select_context(query, torch.ones(1, 1), rows, selector)
    assert selector.chosen[int(rows.seats[0]), :100].tolist() == list(range(20, 120))


@pytest.mark.parametrize("token", [0, 7, 100, 299])
def test_a_key_that_is_no_number_silences_its_head(isa, token):
    """The head's attention is to no numbers then; the other head selects."""
    torch.manual_seed(token)
    selector = make_selector(2, 1, 64, 32, torch.float32, "token_major")
    rows = make_rows([300], selector)
    page = rows.block_table[0, token // 32].long()
    selector.store.cache[page, 1, token % 32, 5] = torch.nan
    query = make_queries(rows, selector, 1, torch.float32)
    assert_selects_the_best(query, torch.ones(1, 1), rows, selector)
    query[0, 1] = 0  # which would select others
    both = selector.chosen.clone()
    cpu.select_context(query, torch.ones(1, 1), rows, selector)
    assert torch.equal(selector.chosen, both)


def test_many_rows(isa):
    torch.manual_seed(2)
    selector = make_selector(2, 2, 32, 32, torch.float32, "vec", seats=70)
    rows = make_rows(torch.randint(160, 1200, (65,)).tolist(), selector)
    query = make_queries(rows, selector, 2, torch.float32)
    assert_selects_the_best(query, weights_of(65, 2), rows, selector)


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_lists_equal_reference(kv_heads):
    """Those that follow may have other numbers of heads."""
    torch.manual_seed(3)
    selector = make_selector(2, 2, 64, 32, torch.float32, "vec")
    rows = make_rows([300, 161, 900], selector, kv_heads=kv_heads)
    rows.select[1] = 0
    query = make_queries(rows, selector, 1, torch.float32)
    cpu.select_context(query, torch.ones(3, 1), make_rows_like(rows, 2), selector)
    cpu.list_context(rows, selector, kv_heads)
    listed, lengths = rows.lists.clone(), kv_heads * [150] + kv_heads * [50] + kv_heads * [150]
    assert rows.lengths.tolist() == lengths
    rows.lists.fill_(-1)
    rows.lengths.fill_(-1)
    reference.list_context(rows, selector, kv_heads)
    assert torch.equal(listed, rows.lists)
    assert rows.lengths.tolist() == lengths
    assert (listed >= 0).sum() == kv_heads * (150 + 50 + 150)
    assert len(set(listed[0][listed[0] >= 0].tolist())) == 150


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda rows: setattr(rows, "per_token", False), "the rows count pages"),
        (lambda rows: rows.seats.fill_(6), "seat 6 is outside"),
        (lambda rows: rows.seats.fill_(-1), "seat -1 is outside"),
        (lambda rows: rows.select.fill_(152), "the tokens to attend to are 202, 50 more"),
        (
            lambda rows: rows.select.fill_(251),
            "sink, window and selection are 301, 1 more",
        ),
        (lambda rows: rows.select.fill_(-1), "-1 tokens to select"),
        (lambda rows: rows.mode.fill_(Mode.GIVEN), "row 0: does not select"),
        (lambda rows: rows.mode.fill_(3), "row 0: mode 3 is none"),
        (lambda rows: rows.sink.fill_(-1), "cannot be"),
        (lambda rows: rows.window.fill_(2**31 - 1), "sink, window and selection"),
        (lambda rows: rows.seq_lens.fill_(0), "cannot be"),
        (lambda rows: rows.seq_lens.fill_(321), "pages of block_table|of block_table"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, why):
    selector = make_selector(2, 2, 64, 32, torch.float32, "vec")
    rows = make_rows([300], selector)
    change(rows)
    with pytest.raises(ValueError, match=why):
        cpu.select_context(torch.zeros(1, 4, 64), torch.ones(1, 1), rows, selector)
    with pytest.raises(ValueError, match=why):
        cpu.list_context(rows, selector, 2)
    assert (selector.chosen == -1).all()
    assert (rows.lists == -1).all()


def test_what_else_does_not_fit_is_refused():
    selector = make_selector(2, 2, 64, 32, torch.float32, "vec")
    rows, query = make_rows([300], selector), torch.zeros(1, 4, 64)
    for wrong, weights, why in (
        (query[:, :3], torch.ones(1, 1), "query must be"),
        (query.half(), torch.ones(1, 1), "query must be"),
        (query, torch.ones(1, 2), "query must be"),
        (query, torch.zeros(1, 1), "latest query has no weight"),
        (query, torch.full((1, 1), torch.nan), "latest query has no weight"),
        (query, torch.ones(2, 1), "weights must be"),
        (query, torch.ones(1, 1).double(), "weights must be"),
    ):
        with pytest.raises(ValueError, match=why):
            cpu.select_context(wrong, weights, rows, selector)
    with pytest.raises(ValueError, match="lists has 2 rows"):
        cpu.list_context(rows, selector, 3)
    rows.lists = rows.lists[:, :149]
    rows.handle = None
    with pytest.raises(ValueError, match="tokens to attend to are 150, 1 more"):
        cpu.list_context(rows, selector, 2)
    selector.chosen = selector.chosen.long()
    selector.handle = None
    with pytest.raises(ValueError, match="chosen must be int32"):
        cpu.list_context(rows, selector, 2)
    for change in ({"layout": "neon"}, {"cache": None}):
        other = make_selector(2, 2, 64, 32, torch.float32, "vec")
        for name, value in change.items():
            setattr(other.store, name, value)
        with pytest.raises(ValueError, match="a filter reads keys"):
            cpu.select_context(query, torch.ones(1, 1), rows, other)
