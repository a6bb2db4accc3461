"""The compiled ops against their plain-torch specification, per instruction set."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vllm_kvretrieval.kernels import DecodeRows, LayerState, cpu, reference

PAGE = 32
ISAS = ("avx512_bf16", "avx512", "avx2", "portable")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=ISAS)
def isa(request):
    best = cpu.isa()
    try:
        cpu.use_isa(request.param)
    except ValueError:
        pytest.skip(f"this machine does not run {request.param}")
    yield request.param
    cpu.use_isa(best)


def make_state(pages, slots, kv_heads, group, head_size, dtype, max_selected=64, parts=1):
    state = LayerState.empty(
        pages=pages,
        slots=slots,
        kv_heads=kv_heads,
        group=group,
        head_size=head_size,
        max_selected=max_selected,
        page_size=PAGE,
        summary_size=PAGE // parts,
        scale=head_size**-0.5,
        dtype=dtype,
    )
    for tensor in (state.index, state.prev_query):
        tensor.normal_()
    state.index.copy_(state.index.sort(dim=2).values)  # minimum before maximum
    return state


def copy_of(state):
    return LayerState(
        state.index.clone(),
        state.prev_query.clone(),
        state.prev_selection.clone(),
        state.page_size,
        state.summary_size,
        state.scale,
    )


def make_rows(lens, state, budget, *, tau=0.5, fresh=0, exact=()):
    """Rows over random pages; ``budget`` is (sink, window, select) in pages."""
    count = len(lens)
    pages = state.pages
    width = -(-max(lens) // state.page_size)
    slots = state.prev_query.shape[0]
    as_int = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    sink, window, select = budget
    return DecodeRows(
        block_table=torch.stack([torch.randperm(pages)[:width] for _ in lens]).int(),
        seq_lens=as_int(lens),
        slots=torch.randperm(slots)[:count].int(),
        sink_pages=as_int([sink] * count),
        window_pages=as_int([window] * count),
        select_pages=as_int([-1 if r in exact else select for r in range(count)]),
        threshold=torch.full((count,), tau),
        fresh=torch.full((count,), fresh, dtype=torch.uint8),
        corrected=torch.zeros(slots, dtype=torch.int64),
        page_table=torch.full((count * state.kv_heads, width), -1, dtype=torch.int32),
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
    rows = make_rows([20 * PAGE], state, (1, 1, 2))
    rows.threshold = rows.threshold.double()
    with pytest.raises(ValueError, match="threshold must be torch"):
        cpu.plan_decode(torch.zeros(1, 1, 64, dtype=torch.bfloat16), rows, state)
