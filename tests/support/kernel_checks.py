"""Layers, rows and comparisons for tests of the compiled ops."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tests.spec import ops as reference
from tests.support.isas import visited
from vllm_kvretrieval.kernels import (
    Chooser,
    Contexts,
    DecodeRows,
    IndexRecords,
    Mode,
    Selection,
    cpu,
)
from vllm_kvretrieval.retrieval.index import Field, Index, make_index, pack, unpack
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.pooling import Pooling

PAGE = 32


MIN_MAX = make_index("min_max")


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


KERNELS = (
    "min_max",
    "mean",
    "mean_std",
    "bounding",
    "representative",
    "one_bit",
    "landmark",
    "exact",
)
"""Indexes with kernels; low_rank, whose records kernels build otherwise, is in test_low_rank.py."""


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
    means=False,
    layout="vec",
    **options,
):
    """Over random keys, taken into the index; those of a page have something in common."""
    keys_and_values = torch.randn(pages, kv_heads, 2, head_size, page_size)
    keys_and_values[:, :, 0] += torch.randn(pages, kv_heads, head_size, 1)
    shape = (pages, kv_heads, page_size, 2 * head_size)
    store = IndexRecords.empty(
        index,
        pages=pages,
        kv_heads=kv_heads,
        head_size=head_size,
        page_size=page_size,
        entry_tokens=int(page_size / parts),
        dtype=dtype,
        cache=keys_and_values.view(shape).to(dtype),
        means=means,
        layout=layout,
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


def assert_selects_each_once(query, chooser):
    """Five pages between sink and window of a context of 64 pages, whatever their scores are."""
    rows = make_rows([64 * PAGE], chooser, (1, 1, 5), fresh=1)
    rows.block_table = torch.arange(64, dtype=torch.int32)[None]
    cpu.plan_decode(query, rows, chooser)
    selected = rows.lists[0, 1:6]
    assert torch.equal(selected, selected.unique())
    assert selected.min() > 0
    assert selected.max() < 63


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
        numbers={"threshold": tau},
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
    fields["spared"] = rows.spared.clone()
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
