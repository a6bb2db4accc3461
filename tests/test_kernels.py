"""The compiled ops against their plain-torch specification, per instruction set."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from vllm_kvretrieval.kernels import Chooser, DecodeRows, IndexStore, Selection, cpu, reference
from vllm_kvretrieval.retrieval.index import indexes, make_index, pack, unpack
from vllm_kvretrieval.retrieval.pooling import Pooling

PAGE = 32
MIN_MAX = make_index("min_max")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


INDEXES = [make_index(name) for name in indexes() if name != "min_max"]


def make_chooser(
    pages,
    seats,
    kv_heads,
    group,
    head_size,
    dtype,
    most_selected=64,
    parts=1,
    index=MIN_MAX,
    pooling=Pooling.MEAN_SOFTMAX,
    page_size=PAGE,
    **options,
):
    """Over random keys, taken into the index."""
    shape = (pages, kv_heads, page_size, 2 * head_size)
    store = IndexStore.empty(
        index,
        pages=pages,
        kv_heads=kv_heads,
        head_size=head_size,
        page_size=page_size,
        entry_tokens=page_size // parts,
        dtype=dtype,
        cache=torch.randn(shape).to(dtype),
    )
    selection = Selection.empty(
        seats=seats,
        kv_heads=kv_heads,
        group=group,
        head_size=head_size,
        most_selected=most_selected,
        dtype=dtype,
    )
    selection.query.normal_()
    full = torch.full((pages,), page_size, dtype=torch.int32)
    cpu.index_pages(torch.arange(pages, dtype=torch.int32), full, store)
    return Chooser(store, selection, pooling, head_size**-0.5, **options)


def copy_of(chooser):
    """The same with records and selection of its own."""
    store = replace(chooser.store, records=chooser.store.records.clone(), handle=None)
    selection = Selection(chooser.selection.query.clone(), chooser.selection.pages.clone())
    return replace(chooser, store=store, selection=selection, handle=None)


def fields_of(store):
    """The records' fields, [entries, kv_heads, ...] each, and what they are written back with."""
    fields = store.index.fields(store.head_size, store.entry_tokens)
    record = unpack(fields, store.records.flatten(0, 1), store.dtype)

    def write(**changed):
        packed = pack(fields, {**record, **changed}, store.dtype)
        store.records.copy_(packed.view_as(store.records))

    return record, write


def make_rows(lens, chooser, budget, *, tau=0.5, fresh=0, exact=()):
    """Rows over random pages; ``budget`` is (sink, window, select) in pages."""
    count, store = len(lens), chooser.store
    pages = store.pages
    width = -(-max(lens) // store.page_size)
    seats = len(chooser.selection.query)
    as_int = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    sink, window, select = budget
    return DecodeRows(
        block_table=torch.stack([torch.randperm(pages)[:width] for _ in lens]).int(),
        seq_lens=as_int(lens),
        seats=torch.randperm(seats)[:count].int(),
        sink_pages=as_int([sink] * count),
        window_pages=as_int([window] * count),
        select_pages=as_int([-1 if r in exact else select for r in range(count)]),
        threshold=torch.full((count,), tau),
        fresh=torch.full((count,), fresh, dtype=torch.uint8),
        corrected=torch.zeros(seats, dtype=torch.int64),
        page_table=torch.full((count * store.kv_heads, width), -1, dtype=torch.int32),
    )


def clone_rows(rows):
    fields = dict(vars(rows), handle=None)
    fields["corrected"] = rows.corrected.clone()
    fields["page_table"] = rows.page_table.clone()
    return DecodeRows(**fields)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "parts"), [(64, 1), (80, 2), (256, 4)])
def test_index_equals_reference(isa, dtype, head_size, parts):
    torch.manual_seed(0)
    kv_heads, pages = 3, 40
    expected = make_state(pages, 1, kv_heads, 1, head_size, dtype, parts=parts)
    actual = copy_of(expected)
    written = torch.zeros(pages, dtype=torch.int64)
    for _ in range(12):
        slots: list[int] = []
        for page in torch.randperm(pages)[:20].tolist():
            start = int(written[page]) % PAGE
            end = int(torch.randint(start + 1, PAGE + 1, ()))
            slots += range(page * PAGE + start, page * PAGE + end)
            written[page] = end
        slots += [-1] * 3  # padding
        # As in a model: keys are strided views of the fused projection's output.
        fused = torch.randn(len(slots) + 5, kv_heads + 2, head_size).to(dtype)
        key = fused[:, 1 : 1 + kv_heads]
        slot_mapping = torch.tensor(slots)
        reference.update_index(key, slot_mapping, expected)
        cpu.update_index(key, slot_mapping, actual)
        assert torch.equal(expected.index, actual.index)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_size", "parts"),
    [(3, 3, 64, 1), (2, 7, 64, 2), (1, 4, 256, 1), (8, 4, 128, 4), (1, 11, 80, 1), (3, 3, 64, 4)],
)
def test_plan_equals_reference(isa, dtype, kv_heads, group, head_size, parts):
    torch.manual_seed(1)
    state = make_state(300, 6, kv_heads, group, head_size, dtype, parts=parts)
    expected, actual = copy_of(state), copy_of(state)
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
        rows = make_rows(lens, state, budget, tau=0.6, fresh=step == 0, exact=(4,))
        rows.slots = torch.arange(len(lens), dtype=torch.int32)
        ours = clone_rows(rows)
        reference.plan_decode(query, rows, expected)
        cpu.plan_decode(query, ours, actual)
        assert torch.equal(rows.page_table, ours.page_table)
        assert torch.equal(rows.corrected, ours.corrected)
        assert torch.equal(expected.prev_query, actual.prev_query)
        assert torch.equal(expected.prev_selection, actual.prev_selection)
        previous = query
        corrections += int(ours.corrected.sum()) if step else 0
    assert 0 < corrections < 5 * 4 * kv_heads, "both speculation and correction are exercised"


def test_extreme_values_and_ties(isa):
    """Equal scores go to the earlier page; huge scores overflow nothing."""
    torch.manual_seed(2)
    state = make_state(64, 1, 1, 2, 64, torch.float32)
    state.index.zero_()  # all pages tie
    rows = make_rows([64 * PAGE], state, (1, 1, 5), fresh=1)
    rows.block_table = torch.arange(64, dtype=torch.int32)[None]
    cpu.plan_decode(torch.randn(1, 2, 64), rows, state)
    assert rows.page_table[0, :7].tolist() == [0, 1, 2, 3, 4, 5, 63]

    state.index.fill_(3e4)
    state.index[40:45] = 6e4
    rows = clone_rows(rows)
    cpu.plan_decode(torch.full((1, 2, 64), 100.0), rows, state)
    assert rows.page_table[0, :7].tolist() == [0, 40, 41, 42, 43, 44, 63]


@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("gap", [0, 66, 80, 88, 120, 400])
def test_a_page_far_above_the_others(isa, gap, parts, group):
    """Softmax leaves nothing of the others; they keep their order, whatever the group does."""
    torch.manual_seed(gap)
    pages, head_size = 203, 64
    state = make_state(pages, 1, 2, group, head_size, torch.float32, max_selected=9, parts=parts)
    state = replace(state, scale=1.0)
    entries = pages * parts - parts // 2  # the last page is not full
    bounds = 5 * torch.randn(pages * parts, 2, head_size)
    bounds[0] = bounds.max() + gap
    bounds[parts * 60, :, :1] = bounds.max() - 3  # one that the first query head wants as much
    # Minimum and maximum are equal and query head g reads channel g: the bounds are exact.
    state.index.copy_(bounds[:, :, None].expand_as(state.index))
    query = torch.eye(head_size)[:group].repeat(2, 1)[None]
    rows = make_rows([entries * PAGE // parts], state, (1, 2, 9), fresh=1)
    rows.block_table = torch.arange(pages, dtype=torch.int32)[None]
    expected, ours = copy_of(state), clone_rows(rows)
    reference.plan_decode(query, rows, expected)
    cpu.plan_decode(query, ours, state)
    assert rows.page_table.equal(ours.page_table)
    if group == parts == 1:
        best = bounds[1:-2, :, 0].topk(9, dim=0).indices.sort(dim=0).values + 1
        assert state.prev_selection[0].T.equal(best.int())


def test_queries_that_are_no_numbers_select_pages(isa):
    """Some pages of the context, each once."""
    for value in (float("nan"), float("inf")):
        state = make_state(64, 1, 1, 2, 64, torch.float32)
        rows = make_rows([64 * PAGE], state, (1, 1, 5), fresh=1)
        rows.block_table = torch.arange(64, dtype=torch.int32)[None]
        query = torch.randn(1, 2, 64)
        query[0, 1, 7] = value
        cpu.plan_decode(query, rows, state)
        selected = rows.page_table[0, 1:6]
        assert torch.equal(selected, selected.unique())
        assert selected.min() > 0
        assert selected.max() < 63


@pytest.mark.parametrize(
    ("tau", "always"), [(1.0, True), (2.0, True), (-1.0, False), (-3.0, False)]
)
def test_threshold_limits(isa, tau, always):
    """tau >= 1 corrects every head even at the same query, tau <= -1 none even at its opposite."""
    torch.manual_seed(3)
    state = make_state(100, 1, 2, 2, 64, torch.bfloat16)
    query = torch.randn(1, 4, 64).to(torch.bfloat16)
    state.prev_query[0] = query[0] if always else -query[0]
    rows = make_rows([100 * PAGE], state, (1, 1, 4), tau=tau)
    cpu.plan_decode(query, rows, state)
    assert int(rows.corrected.sum()) == (2 if always else 0)


def test_many_rows_share_bounded_scratch(isa):
    """More (row, head) units than fit in one wave of scoring."""
    torch.manual_seed(4)
    state = make_state(400, 40, 4, 2, 64, torch.bfloat16)
    lens = torch.randint(20 * PAGE, 400 * PAGE, (40,)).tolist()
    rows = make_rows(lens, state, (1, 2, 9), fresh=1)
    expected, ours = copy_of(state), clone_rows(rows)
    query = torch.randn(40, 8, 64).to(torch.bfloat16)
    reference.plan_decode(query, rows, expected)
    cpu.plan_decode(query, ours, state)
    assert torch.equal(rows.page_table, ours.page_table)
    assert torch.equal(expected.prev_selection, state.prev_selection)


def test_two_engines_plan_at_the_same_time(isa):
    """Engines in one process, stepped from a thread each."""

    def plans(pages):
        state = make_state(pages, 4, 2, 4, 64, torch.float32)
        rows = make_rows([pages * PAGE] * 4, state, (1, 2, 9), fresh=1)
        query = torch.randn(4, 8, 64)
        expected = clone_rows(rows)
        cpu.plan_decode(query, expected, copy_of(state))
        for _ in range(200):
            cpu.plan_decode(query, rows, state)
            yield rows.page_table.equal(expected.page_table)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(all, [plans(300), plans(330)]))


def test_wrong_tensors_are_refused():
    state = make_state(20, 1, 1, 1, 64, torch.bfloat16)
    query = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    rows = make_rows([20 * PAGE], state, (1, 1, 2))
    rows.threshold = rows.threshold.double()
    with pytest.raises(ValueError, match="threshold must be torch"):
        cpu.plan_decode(query, rows, state)
    rows = make_rows([20 * PAGE], state, (1, 1, 2))
    rows.window_pages = rows.window_pages[:0]
    with pytest.raises(ValueError, match="window_pages has 0 rows, seq_lens 1"):
        cpu.plan_decode(query, rows, state)
    rows = make_rows([20 * PAGE], state, (1, 1, 2))
    for name in ("index", "prev_query", "prev_selection"):
        wrong = copy_of(state)
        setattr(wrong, name, torch.cat([getattr(wrong, name)] * 2, dim=-1)[..., ::2])
        with pytest.raises(ValueError, match=f"{name} must be torch.* and contiguous"):
            cpu.plan_decode(query, rows, wrong)
    wrong = copy_of(state)
    wrong.prev_selection = wrong.prev_selection.repeat(2, 1, 1)
    with pytest.raises(ValueError, match=r"prev_selection must be torch.int32 \(1, 1, 64\)"):
        cpu.plan_decode(query, rows, wrong)
    wrong = replace(copy_of(state), summary_size=12)
    with pytest.raises(ValueError, match="12 tokens are no power of two in a page of 32"):
        cpu.plan_decode(query, rows, wrong)


def fields(**values):
    return lambda rows, state: {
        name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()
    }


MISFITS = {
    "select_pages": (
        fields(select_pages=[7, 10]),
        "row 1: select_pages is 10, 1 more than the 9 that prev_selection holds",
    ),
    "slot": (fields(slots=[0, 4]), "row 1: slot 4 is outside the state's 4"),
    "negative slot": (fields(slots=[-1, 0]), "row 0: slot -1 is outside the state's 4"),
    "corrected": (
        lambda rows, state: {"slots": torch.tensor([1, 3]).int(), "corrected": rows.corrected[:3]},
        "row 1: slot 3 is outside the 3 of corrected",
    ),
    "negative sink": (fields(sink_pages=[-1, 1]), "row 0: .* -1 pages of sink and 2 of window"),
    "negative window": (fields(window_pages=[2, -2]), "row 1: .* 1 pages of sink and -2 of window"),
    "no context": (fields(seq_lens=[0, 500]), "row 0: a context of 0 tokens"),
    "context": (
        fields(seq_lens=[640, 11 * PAGE], sink_pages=[1, 3]),
        "row 1: sink, window and selection are 12, 1 more than the 11 pages of the context",
    ),
    "block_table": (
        lambda rows, state: {"block_table": rows.block_table[:, :18]},
        "row 0: the context's pages are 20, 2 more than the 18 of block_table",
    ),
    "page_table": (
        lambda rows, state: {"page_table": rows.page_table[:, :9]},
        "row 0: the pages to attend to are 10, 1 more than the 9 of page_table",
    ),
    "exact in page_table": (
        lambda rows, state: {
            "select_pages": torch.tensor([7, -1]).int(),
            "seq_lens": torch.tensor([640, 449]).int(),
            "page_table": rows.page_table[:, :14],
        },
        "row 1: the pages to attend to are 15, 1 more than the 14 of page_table",
    ),
    "rows of page_table": (
        lambda rows, state: {"page_table": rows.page_table[:5]},
        "page_table has 5 rows, 2 requests of 3 KV heads need 6",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_rows_that_do_not_fit_are_refused(name):
    """Before anything is written."""
    torch.manual_seed(5)
    state = make_state(40, 4, 3, 2, 64, torch.bfloat16, max_selected=9)
    query = torch.randn(2, 6, 64).to(torch.bfloat16)
    fit = make_rows([20 * PAGE, 20 * PAGE - 40], state, (1, 2, 7), fresh=1)
    change, message = MISFITS[name]
    rows, before = replace(fit, **change(fit, state)), copy_of(state)
    with pytest.raises(ValueError, match=message):
        cpu.plan_decode(query, rows, state)
    assert rows.page_table.eq(-1).all()
    assert not rows.corrected.any()
    assert state.prev_query.equal(before.prev_query)
    assert state.prev_selection.equal(before.prev_selection)
    cpu.plan_decode(query, fit, state)


def test_as_many_pages_as_are_attended_to(isa):
    """The least context that a budget may be used on: all of it is attended to."""
    torch.manual_seed(6)
    state = make_state(40, 1, 2, 2, 64, torch.float32, max_selected=7)
    rows = make_rows([10 * PAGE - 3], state, (1, 2, 7), fresh=1)
    cpu.plan_decode(torch.randn(1, 4, 64), rows, state)
    heads = torch.arange(2)[:, None]
    assert rows.page_table.equal((rows.block_table * 2 + heads).int())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda query: query.to(torch.float16),
        lambda query: query[:1],
        lambda query: query[:, :3],
        lambda query: query[..., :48],
        lambda query: query.flatten(1),
        lambda query: query.transpose(0, 1).contiguous().transpose(0, 1),
        lambda query: torch.cat([query, query], dim=-1)[..., ::2],
    ],
)
def test_queries_and_keys_that_do_not_fit_are_refused(wrong):
    state = make_state(40, 2, 4, 1, 64, torch.bfloat16)
    rows = make_rows([20 * PAGE, 20 * PAGE], state, (1, 1, 2), fresh=1)
    vectors = torch.randn(2, 4, 64).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"query must be \[>= 2, 4, 64\] in torch.bfloat16"):
        cpu.plan_decode(wrong(vectors), rows, state)
    with pytest.raises(ValueError, match=r"key must be \[>= 2, 4, 64\] in torch.bfloat16"):
        cpu.update_index(wrong(vectors), torch.tensor([0, 1]), state)
    cpu.plan_decode(vectors, rows, state)
    cpu.update_index(vectors, torch.tensor([0, 1]), state)


@pytest.mark.parametrize("parts", [1, 4])
def test_slots_outside_the_index_are_refused(isa, parts):
    state = make_state(40, 1, 2, 1, 64, torch.float32, parts=parts)
    before = state.index.clone()
    key = torch.randn(4, 2, 64)
    slot_mapping = torch.tensor([-1, 40 * PAGE - 2, 40 * PAGE - 1, 40 * PAGE])
    with pytest.raises(ValueError, match=r"slot_mapping\[3\] is 1280, the cache has 1280 tokens"):
        cpu.update_index(key, slot_mapping, state)
    assert state.index.equal(before)
    cpu.update_index(key, slot_mapping[:3], state)
    for wrong in (slot_mapping.int(), torch.arange(8)[::2]):
        with pytest.raises(ValueError, match=r"slot_mapping must be torch\.int64 and contiguous"):
            cpu.update_index(key, wrong, state)
