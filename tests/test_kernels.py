"""The compiled ops against their plain-torch specification, per instruction set."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from tests.covering import covering
from tests.isas import visited
from vllm_kvretrieval.kernels import (
    Chooser,
    Contexts,
    DecodeRows,
    IndexStore,
    Mode,
    Selection,
    cpu,
    reference,
)
from vllm_kvretrieval.retrieval.index import Field, Index, make_index, pack, unpack
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.pooling import Pooling

pytestmark = pytest.mark.cores

PAGE = 32
MIN_MAX = make_index("min_max")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNELS = ("min_max", "mean", "mean_std", "bounding", "representative", "one_bit", "exact")
"""Indexes with kernels; low_rank, whose records kernels build otherwise, is in test_low_rank.py."""
"""The indexes that there are kernels for."""
RECORDED = [name for name in KERNELS if name != "exact"]


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
    """Over random keys, taken into the index; those of a page have something in common."""
    keys_and_values = torch.randn(pages, kv_heads, 2, head_size, page_size)
    keys_and_values[:, :, 0] += torch.randn(pages, kv_heads, head_size, 1)
    shape = (pages, kv_heads, page_size, 2 * head_size)
    store = IndexStore.empty(
        index,
        pages=pages,
        kv_heads=kv_heads,
        head_size=head_size,
        page_size=page_size,
        entry_tokens=page_size // parts,
        dtype=dtype,
        cache=keys_and_values.view(shape).to(dtype),
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
    """A copy with records and selection of its own."""
    store, kept = fresh_records(chooser.store), chooser.selection
    selection = replace(kept, query=kept.query.clone(), chosen=kept.chosen.clone())
    return replace(chooser, store=store, selection=selection, handle=None)


def fresh_records(store):
    """A copy with records of its own."""
    return replace(store, records=store.records.clone(), handle=None)


def fields_of(store):
    """The records' fields, [entries * kv_heads, ...] each, and what they are written back with."""
    fields = store.index.fields(store.head_size, store.entry_tokens)
    record = unpack(fields, store.records.flatten(0, 1), store.dtype)

    def write(**changed):
        packed = pack(fields, {**record, **changed}, store.dtype)
        store.records.copy_(packed.view_as(store.records))

    return record, write


def make_rows(lens, chooser, budget, *, tau=0.5, fresh=0, exact=(), per_token=False):
    """Rows over random pages; ``budget`` is (sink, window, select) in pages, or in tokens."""
    count, store = len(lens), chooser.store
    pages = store.pages
    width = -(-max(lens) // store.page_size)
    seats = len(chooser.selection.query)
    sink, window, select = budget
    contexts = Contexts(
        torch.stack([torch.randperm(pages)[:width] for _ in lens]).int(),
        torch.tensor(lens, dtype=torch.int32),
        torch.randperm(seats)[:count].int(),
    )
    units = width * (store.page_size if per_token else 1)
    rows = DecodeRows.selecting(
        contexts,
        torch.full((count * store.kv_heads, units), -1, dtype=torch.int32),
        lengths=torch.full((count * store.kv_heads,), -1, dtype=torch.int32),
        sink=sink,
        window=window,
        select=select,
        threshold=tau,
        fresh=fresh,
        corrected=torch.zeros(seats, dtype=torch.int64),
        per_token=per_token,
    )
    for row in exact:
        attend_to_all(rows, row)
    return rows


def attend_to_all(rows, row):
    """Let a row attend to its whole context."""
    rows.mode[row] = Mode.WHOLE
    rows.sink[row] = rows.window[row] = rows.select[row] = 0


def clone_rows(rows):
    fields = dict(vars(rows), handle=None)
    fields["corrected"] = rows.corrected.clone()
    fields["lists"] = rows.lists.clone()
    fields["lengths"] = rows.lengths.clone()
    return DecodeRows(**fields)


def specified(op, *arguments):
    """Run the specification by one thread: several threads are far slower on small tensors while
    other processes run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    op(*arguments)
    torch.set_num_threads(threads)


def put_keys(store, key, slot_mapping):
    """Into the cache as vLLM's attention lays it out, without AMX."""
    keys = keys_in(store)
    keys[slot_mapping // store.page_size, :, :, slot_mapping % store.page_size] = key


def keys_in(store):
    """[pages, kv_heads, head_size, page_size]; in the cache of a store."""
    shape = (store.pages, store.kv_heads, 2, store.head_size, store.page_size)
    return store.cache.view(shape)[:, :, 0]


def take_in(store, pages):
    """Bring the records of whole pages up to date."""
    cpu.index_pages(pages.int(), torch.full((len(pages),), store.page_size).int(), store)


def assert_same_records(actual, expected):
    """They hold the same values; where sums are rounded, to the last place."""
    (ours, _), (theirs, _) = fields_of(actual), fields_of(expected)
    for name, field in theirs.items():
        if expected.index.name in ("min_max", "one_bit"):
            assert torch.equal(ours[name], field)
            continue
        last_place = max(torch.finfo(field.dtype).eps, 1e-6)
        close = {"rtol": last_place, "atol": 2e-6}
        torch.testing.assert_close(ours[name].float(), field.float(), **close)
        if field.dtype != torch.float32:
            assert (ours[name] == field).float().mean() > 0.99, "only ties are rounded otherwise"


def assert_same_plan(actual, expected, query, rows):
    """Of the kernels, whose chooser comes first, and of the reference; returns the rows.

    Every instruction set that the test visits begins with the same state; the last one changes
    ``actual``. Of pages that are equally good, to rounding, the kernels may select another, since
    each instruction set sums in its own order.
    """
    before, begun = copy_of(actual).selection, clone_rows(rows)
    specified(reference.plan_decode, query, rows, expected)
    for _ in visited():
        actual.selection.query.copy_(before.query)
        actual.selection.chosen.copy_(before.chosen)
        ours = clone_rows(begun)
        cpu.plan_decode(query, ours, actual)
        _assert_same_plan(actual, expected, query, rows, ours)
    if not torch.equal(expected.selection.chosen, actual.selection.chosen):
        expected.selection.chosen.copy_(actual.selection.chosen)
    return ours


def _assert_same_plan(actual, expected, query, rows, ours):
    assert torch.equal(rows.corrected, ours.corrected)
    assert torch.equal(rows.lengths, ours.lengths)
    assert torch.equal(expected.selection.query, actual.selection.query)
    if not torch.equal(expected.selection.chosen, actual.selection.chosen):
        assert_near_ties(actual, expected, query, rows)
    else:
        assert torch.equal(rows.lists, ours.lists)


def assert_near_ties(actual, expected, query, rows):
    """Pages that one selection has and the other has not are as good as one another."""
    store = expected.store
    index = Exact() if expected.rerank else store.index
    for r, seat in enumerate(rows.seats.tolist()):
        select = int(rows.select[r])
        pages = rows.block_table[r].long()[:, None] * store.parts + torch.arange(store.parts)
        entries = pages.flatten()[: reference.entry_count(int(rows.seq_lens[r]), store)]
        for head in range(store.kv_heads if select > 0 else 0):
            ours, theirs = (
                set(chooser.selection.chosen[seat, head, :select].tolist())
                for chooser in (actual, expected)
            )
            if ours == theirs:
                continue
            grouped = query[r].float().view(store.kv_heads, expected.group, -1)[head]
            by_index, by = (
                reference.score_entries(
                    i, grouped, entries, head, expected, rows.per_token
                ).double()
                for i in (store.index, index)
            )
            parts = 1 if rows.per_token else store.parts
            pooled = expected.pooling.pool(by - expected.pooling.norms(by_index), parts)
            scores = pooled[[*(ours ^ theirs)]]
            # A step just between two multiples of its unit may become either.
            off = 1e-3 if store.index.name == "one_bit" else 1e-5
            assert scores.max() - scores.min() < off * scores.abs().max().clamp(min=1)


def chunks_of(page_count, kv_heads, head_size, dtype, rounds):
    """Keys and slots as a scheduler writes them: stretches of some pages, one after the other."""
    written = torch.zeros(page_count, dtype=torch.int64)
    for _ in range(rounds):
        slots: list[int] = []
        for page in torch.randperm(page_count)[: page_count // 2].tolist():
            start = int(written[page]) % PAGE
            end = int(torch.randint(start + 1, PAGE + 1, ()))
            slots += range(page * PAGE + start, page * PAGE + end)
            written[page] = end
        # As in a model: keys are strided views of the fused projection's output.
        fused = torch.randn(len(slots) + 5, kv_heads + 2, head_size).to(dtype)
        yield fused[:, 1 : 1 + kv_heads], torch.tensor(slots)


PADDING = torch.tensor([-1] * 3)


@covering(index=RECORDED, head_size__parts=[(64, 1), (80, 2), (256, 4)], dtype=DTYPES)
def test_index_equals_reference(index, dtype, head_size, parts):
    torch.manual_seed(0)
    pages, rounds = (40, 12) if index == "min_max" else (16, 8)
    shape = pages, 1, 3, 1, head_size, dtype
    expected = make_chooser(*shape, parts=parts, index=make_index(index)).store
    before = expected.records.clone()
    stores = {name: fresh_records(expected) for name in visited()}
    for key, slots in chunks_of(pages, 3, head_size, dtype, rounds):
        put_keys(expected, key[: len(slots)], slots)
        padded = torch.cat([slots, PADDING])
        specified(reference.update_index, key, padded, expected)
        for name in visited():
            cpu.update_index(key, padded, stores[name])
            assert_same_records(stores[name], expected)
    assert not torch.equal(before, expected.records)


@pytest.mark.parametrize("index", RECORDED)
def test_index_of_a_long_prefill(index):
    """There are so many keys that threads share them."""
    torch.manual_seed(1)
    expected = make_chooser(80, 1, 3, 1, 64, torch.bfloat16, index=make_index(index)).store
    before = fresh_records(expected)
    key = torch.randn(70 * PAGE - 9, 3, 64).to(torch.bfloat16)
    slots = torch.randperm(80)[:70, None] * PAGE + torch.arange(PAGE)
    slots = slots.flatten()[: len(key)]
    put_keys(expected, key, slots)
    specified(reference.update_index, key, slots, expected)
    for _ in visited():
        actual = fresh_records(before)
        cpu.update_index(key, slots, actual)
        assert_same_records(actual, expected)


def test_growing_records_need_no_cache(isa):
    store = make_chooser(8, 1, 2, 1, 64, torch.float32).store
    key, slots = torch.randn(PAGE + 5, 2, 64), torch.arange(PAGE + 5)
    alone = replace(fresh_records(store), cache=None)
    for each in (store, alone):
        cpu.update_index(key, slots, each)
    assert torch.equal(store.records, alone.records)


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


@dataclass(frozen=True)
class OutsideMean(Index):
    """Mean's twin, with something in front that puts its field out of line."""

    name: ClassVar[str] = "outside_mean"

    def fields(self, head_size, entry_tokens):
        return Field("first", torch.uint8, (3,)), Field("centre", None, (head_size,))

    def build(self, keys):
        return {"first": keys[:, 0, :3], "centre": keys.mean(1)}

    def score(self, query, record, scale):
        assert record["first"].dtype == torch.uint8
        return query @ record["centre"].float().T * scale


@dataclass(frozen=True)
class OutsideExact(Index):
    """Exact's twin."""

    name: ClassVar[str] = "outside_exact"
    reads_keys: ClassVar[bool] = True

    def fields(self, head_size, entry_tokens):
        return ()

    def build(self, keys):
        return {}

    def score(self, query, record, scale):
        return torch.einsum("gd,ntd->gnt", query * scale, record["keys"]).logsumexp(-1)


@dataclass(frozen=True)
class Given(Index):
    """Scores that a test has written down: the same for all heads."""

    name: ClassVar[str] = "given"

    def fields(self, head_size, entry_tokens):
        return (Field("score", torch.float32, (1,)),)

    def build(self, keys):
        return {"score": keys[:, 0, :1]}

    def score(self, query, record, scale):
        return record["score"].T.repeat(len(query), 1)


TWINS = {"mean": OutsideMean(), "exact": OutsideExact()}


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


@pytest.mark.parametrize("pooling", [Pooling.MEAN_SOFTMAX, Pooling.RELATIVE])
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


@covering(index=[*KERNELS, "outside_mean", "outside_exact"], pooling=Pooling, rerank=[0, 3])
def test_queries_that_are_no_numbers_select_pages(isa, index, pooling, rerank):
    """Some pages of the context, each once."""
    torch.manual_seed(9)
    kind = next((twin for twin in TWINS.values() if twin.name == index), None) or make_index(index)
    options = {"index": kind, "pooling": pooling, "rerank": rerank}
    chooser = make_chooser(64, 1, 1, 2, 64, torch.float32, **options)
    for value in (float("nan"), float("inf"), float("-inf")):
        for heads in ([0], [1], [0, 1]):
            rows = make_rows([64 * PAGE], chooser, (1, 1, 5), fresh=1)
            rows.block_table = torch.arange(64, dtype=torch.int32)[None]
            query = torch.randn(1, 2, 64)
            query[0, heads, 7] = value
            cpu.plan_decode(query, rows, chooser)
            selected = rows.lists[0, 1:6]
            assert torch.equal(selected, selected.unique())
            assert selected.min() > 0
            assert selected.max() < 63


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
    stores = [first.store]
    for index in (make_index("mean"), None):
        stores.append(replace(first.store, index=index, records=torch.empty(0), handle=None))
        size = 0 if index is None else index.record_bytes(64, PAGE, torch.float32)
        stores[-1].records = torch.zeros(60, 2, size, dtype=torch.uint8)
        take_in(stores[-1], torch.arange(60))
    selection, twin = first.selection, copy_of(first).selection
    for store, seats in zip(stores, ([4, 0], [1, 5], [3, 2]), strict=True):
        budget = (1, 2, 0) if store.index is None else (1, 2, 5)
        rows = make_rows([60 * PAGE, 40 * PAGE], first, budget, fresh=1)
        rows.seats = torch.tensor(seats).int()
        actual, expected = (
            replace(first, store=store, selection=each, handle=None) for each in (selection, twin)
        )
        ours = assert_same_plan(actual, expected, torch.randn(2, 4, 64), rows)
        if store.index is None:
            assert torch.equal((ours.lists >= 0).sum(1), torch.full((4,), 3))


def test_keys_are_read(isa):
    """Entries in any order; the cache's elements as they are."""
    torch.manual_seed(11)
    for dtype in DTYPES:
        store = make_chooser(30, 1, 3, 1, 80, dtype, parts=4, index=make_index("exact")).store
        for count in (0, 1, 110):
            entries = torch.randperm(120)[:count]
            keys = cpu.read_keys(entries, store)
            assert keys.shape == (count, 8, 3, 80)
            if count:
                assert torch.equal(keys, reference.keys_of_entries(entries, store))
    for wrong, message in (
        (torch.tensor([3, 120]), r"entries\[1\] is 120, the index has 120"),
        (torch.tensor([-1]), r"entries\[0\] is -1, the index"),
        (torch.tensor([1]).int(), r"entries must be torch\.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.read_keys(wrong, store)
    with pytest.raises(ValueError, match="no cache to read keys from"):
        cpu.read_keys(torch.tensor([0]), replace(store, cache=None, handle=None))


def test_wrong_tensors_are_refused():
    chooser = make_chooser(20, 1, 1, 1, 64, torch.bfloat16)
    query = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    rows = make_rows([20 * PAGE], chooser, (1, 1, 2))
    rows.threshold = rows.threshold.double()
    with pytest.raises(ValueError, match="threshold must be torch"):
        cpu.plan_decode(query, rows, chooser)
    rows = make_rows([20 * PAGE], chooser, (1, 1, 2))
    rows.window = rows.window[:0]
    with pytest.raises(ValueError, match="window has 0 rows, seq_lens 1"):
        cpu.plan_decode(query, rows, chooser)
    rows = make_rows([20 * PAGE], chooser, (1, 1, 2))
    for name in ("query", "chosen"):
        for change in (
            lambda tensor: torch.cat([tensor] * 2, dim=-1)[..., ::2],
            lambda tensor: tensor.double(),
            lambda tensor: tensor.repeat(2 if name == "chosen" else 1, 1, 1)[..., None],  # noqa: B023
        ):
            wrong = copy_of(chooser)
            setattr(wrong.selection, name, change(getattr(wrong.selection, name)))
            with pytest.raises(
                ValueError, match=f"the selection's {name} must be torch.* and contiguous"
            ):
                cpu.plan_decode(query, rows, wrong)
    wrong = copy_of(chooser)
    wrong.selection.chosen = wrong.selection.chosen.repeat(2, 1, 1)
    with pytest.raises(ValueError, match=r"chosen must be torch.int32 \(1, 1, 64\)"):
        cpu.plan_decode(query, rows, wrong)
    wrong = copy_of(chooser)
    wrong.selection.query = wrong.selection.query[..., :48].contiguous()
    with pytest.raises(ValueError, match=r"query must be torch.bfloat16 \(1, 1, 64\)"):
        cpu.plan_decode(query, rows, wrong)
    without = replace(chooser, store=replace(chooser.store, cache=None, handle=None), rerank=2)
    with pytest.raises(ValueError, match="scored by the keys in the cache, and there is none"):
        cpu.plan_decode(query, rows, replace(without, handle=None))


STORES: dict[str, tuple[Any, str]] = {
    "entries": ({"entry_tokens": 12}, "12 tokens are no power of two in a page of 32"),
    "thirds": (
        {"page_size": 48, "entry_tokens": 16},
        "16 tokens are no power of two in a page of 48",
    ),
    "head size": ({"head_size": 72}, "head size 72 is no multiple of 16"),
    "layout": ({"layout": "neon"}, r"'neon' lays out keys is not known, only \['vec', 'vec16'"),
    "no cache": ({"cache": None}, "mean_std reads the keys in the cache, and has none"),
    "dtype of the cache": (
        lambda store: {"cache": store.cache.half()},
        r"cache must be torch.bfloat16 \(20, 2, 32, 128\) and contiguous, got torch.float16",
    ),
    "pages of the cache": (
        lambda store: {"cache": store.cache[1:]},
        r"\(20, 2, 32, 128\) and contiguous, got torch.bfloat16 \(19, 2, 32, 128\)",
    ),
    "order of the cache": (
        lambda store: {"cache": store.cache.transpose(0, 1).contiguous().transpose(0, 1)},
        "and contiguous, got",
    ),
    "dtype of the records": (
        lambda store: {"records": store.records.char()},
        r"records must be torch.uint8 \(20, 2, 256\), got torch.int8",
    ),
    "size of the records": (
        lambda store: {"records": store.records[..., :-2].contiguous()},
        r"records must be torch.uint8 \(20, 2, 256\), got torch.uint8 \(20, 2, 254\)",
    ),
    "order of the records": (
        lambda store: {"records": store.records.transpose(0, 1).contiguous().transpose(0, 1)},
        r"records must be contiguous, their strides are",
    ),
    "another index": ({"index": MIN_MAX, "dtype": torch.float32, "cache": None}, "records must be"),
}


@pytest.mark.parametrize("name", STORES)
def test_wrong_stores_are_refused(name):
    """Every op refuses them, since each may be the first to see one."""
    index = make_index("mean_std")
    chooser = make_chooser(20, 1, 2, 1, 64, torch.bfloat16, index=index)
    change, message = STORES[name]
    changed = change(chooser.store) if callable(change) else change
    wrong = replace(chooser.store, handle=None, **changed)
    rows = make_rows([20 * PAGE], chooser, (1, 1, 2), fresh=1)
    one, full = torch.tensor([0]), torch.tensor([PAGE]).int()
    before = chooser.store.records.clone()
    calls = [
        lambda: cpu.update_index(torch.randn(1, 2, 64).bfloat16(), one, wrong),
        lambda: cpu.plan_decode(
            torch.randn(1, 2, 64).bfloat16(), rows, replace(chooser, store=wrong, handle=None)
        ),
    ]
    if wrong.cache is not None and "entry_tokens" not in changed:
        calls += [
            lambda: cpu.index_pages(one.int(), full, wrong),
            lambda: cpu.read_keys(one, wrong),
        ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert torch.equal(chooser.store.records, before)


def fields(**values):
    return lambda rows, chooser: {
        name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()
    }


MISFITS = {
    "select": (
        fields(select=[7, 10]),
        "row 1: select is 10, 1 more than the 9 that the selection holds",
    ),
    "negative select": (fields(select=[7, -1]), "row 1: -1 pages to select"),
    "no mode": (
        lambda rows, chooser: {"mode": torch.tensor([0, 3]).to(torch.uint8)},
        "row 1: mode 3 is none",
    ),
    "given without counts": (
        lambda rows, chooser: {"mode": torch.tensor([0, Mode.GIVEN]).to(torch.uint8)},
        "row 1: a selection is given without counts",
    ),
    "sink of a whole context": (
        lambda rows, chooser: {"mode": torch.tensor([0, Mode.WHOLE]).to(torch.uint8)},
        "row 1: attends to the whole context, which has no sink or window",
    ),
    "seat": (fields(seats=[0, 4]), "row 1: seat 4 is outside the state's 4"),
    "negative seat": (fields(seats=[-1, 0]), "row 0: seat -1 is outside the state's 4"),
    "corrected": (
        lambda rows, chooser: {
            "seats": torch.tensor([1, 3]).int(),
            "corrected": rows.corrected[:3],
        },
        "row 1: seat 3 is outside the 3 of corrected",
    ),
    "negative sink": (fields(sink=[-1, 1]), "row 0: .* -1 pages of sink and 2 of window"),
    "negative window": (fields(window=[2, -2]), "row 1: .* 1 pages of sink and -2 of window"),
    "no window": (
        fields(window=[2, 0]),
        "row 1: 7 pages are to be selected beside a window that lacks the tail page",
    ),
    "no context": (fields(seq_lens=[0, 500]), "row 0: a context of 0 tokens"),
    "context": (
        fields(seq_lens=[640, 11 * PAGE], sink=[1, 3]),
        "row 1: sink, window and selection are 12, 1 more than the 11 pages of the context",
    ),
    "block_table": (
        lambda rows, chooser: {"block_table": rows.block_table[:, :18]},
        "row 0: the context's pages are 20, 2 more than the 18 of block_table",
    ),
    "lists": (
        lambda rows, chooser: {"lists": rows.lists[:, :9]},
        "row 0: the pages to attend to are 10, 1 more than the 9 of lists",
    ),
    "exact in lists": (
        lambda rows, chooser: {
            "mode": torch.tensor([Mode.SELECT, Mode.WHOLE]).to(torch.uint8),
            "sink": torch.tensor([1, 0]).int(),
            "window": torch.tensor([2, 0]).int(),
            "seq_lens": torch.tensor([640, 449]).int(),
            "lists": rows.lists[:, :14],
        },
        "row 1: the pages to attend to are 15, 1 more than the 14 of lists",
    ),
    "rows of lists": (
        lambda rows, chooser: {"lists": rows.lists[:5]},
        "lists has 5 rows, 2 requests of 3 KV heads need 6",
    ),
}


@pytest.mark.parametrize("index", [MIN_MAX, make_index("exact"), OutsideMean()], ids=str)
@pytest.mark.parametrize("name", MISFITS)
def test_rows_that_do_not_fit_are_refused(name, index):
    """Before anything is written."""
    torch.manual_seed(5)
    chooser = make_chooser(40, 4, 3, 2, 64, torch.bfloat16, most_selected=9, index=index)
    query = torch.randn(2, 6, 64).to(torch.bfloat16)
    fit = make_rows([20 * PAGE, 20 * PAGE - 40], chooser, (1, 2, 7), fresh=1)
    change, message = MISFITS[name]
    rows, before = replace(fit, **change(fit, chooser)), copy_of(chooser)
    with pytest.raises(ValueError, match=message):
        cpu.plan_decode(query, rows, chooser)
    assert rows.lists.eq(-1).all()
    assert not rows.corrected.any()
    assert chooser.selection.query.equal(before.selection.query)
    assert chooser.selection.chosen.equal(before.selection.chosen)
    cpu.plan_decode(query, fit, chooser)


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


def test_selecting_by_no_index_is_refused():
    chooser = make_chooser(40, 4, 3, 2, 64, torch.bfloat16, index=None)
    query = torch.randn(2, 6, 64).to(torch.bfloat16)
    rows = make_rows([20 * PAGE] * 2, chooser, (1, 2, 7), fresh=1)
    rows.select[0] = 0
    with pytest.raises(ValueError, match="row 1: 7 pages are to be selected by no index"):
        cpu.plan_decode(query, rows, chooser)
    assert rows.lists.eq(-1).all()


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
@pytest.mark.parametrize("index", [MIN_MAX, make_index("mean"), OutsideMean()], ids=str)
def test_queries_and_keys_that_do_not_fit_are_refused(index, wrong):
    chooser = make_chooser(40, 2, 4, 1, 64, torch.bfloat16, index=index)
    store = chooser.store
    rows = make_rows([20 * PAGE, 20 * PAGE], chooser, (1, 1, 2), fresh=1)
    vectors = torch.randn(2, 4, 64).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"query must be \[>= 2, 4, 64\] in torch.bfloat16"):
        cpu.plan_decode(wrong(vectors), rows, chooser)
    with pytest.raises(ValueError, match=r"key must be \[>= 2, 4, 64\] in torch.bfloat16"):
        cpu.update_index(wrong(vectors), torch.tensor([0, 1]), store)
    cpu.plan_decode(vectors, rows, chooser)
    cpu.update_index(vectors, torch.tensor([0, 1]), store)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("index", [*KERNELS, "outside"])
def test_slots_outside_the_index_are_refused(isa, index, parts):
    kind = OutsideMean() if index == "outside" else make_index(index)
    store = make_chooser(40, 1, 2, 1, 64, torch.float32, parts=parts, index=kind).store
    before = store.records.clone()
    key = torch.randn(4, 2, 64)
    slot_mapping = torch.tensor([-1, 40 * PAGE - 2, 40 * PAGE - 1, 40 * PAGE])
    with pytest.raises(ValueError, match=r"slot_mapping\[3\] is 1280, the cache has 1280 tokens"):
        cpu.update_index(key, slot_mapping, store)
    assert store.records.equal(before)
    cpu.update_index(key, slot_mapping[:3], store)
    for wrong in (slot_mapping.int(), torch.arange(8)[::2]):
        with pytest.raises(ValueError, match=r"slot_mapping must be torch\.int64 and contiguous"):
            cpu.update_index(key, wrong, store)
