"""Checks of the ops of a decode step on a device against their specification.

The interpreter runs them on "cpu" (triton/test_device_kernels.py), a GPU on "cuda" (tests/gpu). The
specification always computes on the CPU.
"""

import operator
import random
from dataclasses import fields, replace
from typing import Any

import torch
import triton
import triton.language as tl

from tests.spec import device as reference
from tests.spec import ops as ops_reference
from tests.spec import slots as slot_ops
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import (
    COLUMNS,
    RECORD_ALIGNMENT,
    Column,
    DevicePlan,
    DeviceRequests,
    DeviceRows,
)
from vllm_kvretrieval.kernels.slots import DecodeWorkspace
from vllm_kvretrieval.kernels.triton.outliers import outlier_units
from vllm_kvretrieval.kernels.types import Chooser, IndexRecords, KeptTokens, Selection
from vllm_kvretrieval.retrieval.heads import EVERYTHING
from vllm_kvretrieval.retrieval.index import pack, unpack
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean import Mean
from vllm_kvretrieval.retrieval.index.one_bit import OneBit
from vllm_kvretrieval.retrieval.keeping import Keeping
from vllm_kvretrieval.retrieval.pooling import Pooling

TABLE = 40  # pages of a row's block table


def moved_rows(rows, move):
    """Rows whose tensors something has moved."""
    tensors = {f.name: getattr(rows, f.name) for f in fields(rows)}
    return replace(rows, **{n: move(t) for n, t in tensors.items() if torch.is_tensor(t)})


def bits(threshold):
    return torch.tensor(threshold, dtype=torch.float32).view(torch.int32)


class Layer:
    """One implementation, with all state of a layer."""

    def __init__(
        self, ops, device, methods, shape, *, pages, seats, rows, positions, table=TABLE,
        outliers=0.0, **options,
    ):  # fmt: skip
        self.ops, self.device, self.options = ops, device, options
        kv_heads, group, head_size, page, dtype = shape
        # What has not been written is poison: no numbers.
        nothing = {"fill_value": float("nan"), "dtype": dtype, "device": device}
        self.cache = torch.full((pages, kv_heads, page, 2 * head_size), **nothing)
        self.selection = Selection(
            torch.full((seats, kv_heads * group, head_size), 3.0, dtype=dtype, device=device),
            torch.zeros(seats, kv_heads, 9, dtype=torch.int32, device=device),
            corrected=torch.zeros(seats, kv_heads, dtype=torch.int32, device=device),
        )
        self.choosers = []
        for index, entry, pooling in methods:
            store = IndexRecords.empty(
                index, pages=pages, kv_heads=kv_heads, head_size=head_size, page_size=page,
                dtype=dtype, entry_tokens=entry, cache=self.cache, layout="token_major",
                alignment=RECORD_ALIGNMENT,
            )  # fmt: skip
            store.records = torch.full_like(store.records, 255, device=device)
            chooser = Chooser(store, self.selection, pooling, head_size**-0.5)
            told = index is not None and index.tells_outliers
            self.choosers.append(replace(chooser, outliers=outliers if told else 0.0))
        self.requests = DeviceRequests.empty(seats, device)
        entries = table * max(chooser.store.parts for chooser in self.choosers)
        self.plan = DevicePlan.empty(
            rows=rows, kv_heads=kv_heads, group=group, entries=entries, width=16, programs=3,
            device=device, positions=positions, outliers=outliers > 0,
        )  # fmt: skip
        self.room = self.plan.another()
        for room in self.plan, self.room:
            for tensor in (room.scores, room.stats, room.cosines):
                if tensor is not None:
                    tensor.fill_(float("nan"))

    @property
    def indexes(self):
        return [chooser.store for chooser in self.choosers if chooser.store.index is not None]

    def write(self, key, value, slot_mapping, drafted=False):
        moved = (tensor.to(self.device) for tensor in (key, value, slot_mapping))
        self.ops.write_kv(*moved, self.cache, self.indexes, drafted=drafted)

    def step(self, rows, query, far, least=0):
        moved = moved_rows(rows, operator.methodcaller("to", self.device))
        page = self.choosers[0].store.page_size
        self.ops.prepare_rows(moved, self.requests, page, least=least, far=far)
        arguments = query.to(self.device), moved, self.requests, self.choosers, self.plan
        self.ops.plan_decode(*arguments, **self.options)
        return moved

    def look_ahead(self, rows):
        """What is beside attention, by the rows that :meth:`step` returns."""
        for number, chooser in enumerate(self.choosers):
            if chooser.store.index is not None:
                arguments = rows, self.requests, number, chooser, self.room
                self.ops.select_ahead(*arguments, **self.options)


def decode_steps(
    device,
    *,
    methods,
    kv_heads=2,
    group=3,
    head_size=64,
    page=8,
    dtype=torch.bfloat16,
    steps=4,
    far=False,
    positions=False,
    seed=0,
    exact_records=True,
    threshold=0.6,
    counted=False,
    masses=(),
    least=(0,),
    drafts=0,
    outliers=0.0,
):
    """Prompts in chunks, and steps of requests of all kinds: the same rows, lists, records, state.

    Records that need not be the specification's are copied from the kernels to it. ``least`` is of
    one step after the other. If ``counted``, KV heads select different numbers of pages, some of
    them all or none. With ``masses``, the first method's requests attend to the fewest pages that
    reach one of these. Requests have up to ``drafts`` drafts, of which some are accepted. A share
    of the pages that methods with a suitable index select are ``outliers``.
    """  # fmt: skip
    torch.manual_seed(seed)
    draw = random.Random(seed)
    rows, seats = 7, 9
    shape = (kv_heads, group, head_size, page, dtype)
    size = {"pages": rows * TABLE, "seats": seats, "rows": rows, "positions": positions}
    size |= {"outliers": outliers}
    layers = [
        Layer(reference, "cpu", methods, shape, **size),
        Layer(kernels, device, methods, shape, **size),
    ]
    tables = torch.randperm(rows * TABLE).view(rows, TABLE).int()
    lengths = torch.randint(page * 8, page * 12, (rows,))
    lengths[1] = page * 3  # within its budget
    lengths[5] = page * 5 - 2  # soon to be beyond it
    order = torch.randperm(seats).int()
    of_seat, spare = order[:rows], order[rows]
    of_seat[6] = -1  # padding
    table = torch.zeros(seats, 8, dtype=torch.int32)
    for seat in range(seats):
        table[seat, : Column.SELECT + 1] = torch.tensor([1, 2, draw.randint(3, 6)])
        table[seat, Column.CHOOSER] = draw.randrange(len(methods))
        table[seat, Column.THRESHOLD] = bits(threshold)
    for row in range(len(methods)):  # each has one
        table[int(of_seat[row]), Column.CHOOSER] = row
    for number, (index, *_) in enumerate(methods):
        if index is None:
            table[table[:, Column.CHOOSER] == number, Column.SELECT] = 0
    table[of_seat[4].long(), Column.EXACT] = 1
    table[of_seat[5].long(), : Column.CHOOSER + 1] = torch.tensor([1, 2, 2, 0])
    for seat in range(seats if masses else 0):
        table[seat, Column.MASS] = bits(masses[seat % len(masses)])
    counts = torch.randint(0, 8, (seats, kv_heads + 2)).int()  # of other layers, too
    fixed = table[:, Column.SELECT] == 0  # everything or nothing, by no selection
    counts[fixed] = EVERYTHING * (counts[fixed] > 3).int()
    for layer in layers:
        layer.requests.table.copy_(table)
        layer.choosers[0].mass = bool(masses)
        if counted:
            layer.selection.counts = counts.to(device)[:, 1:-1]

    def slots(row, positions):
        return tables[row, positions // page].long() * page + positions % page

    def write(per_row):
        """Tokens of rows, from a position to another; then some padding."""
        mapping = torch.cat([slots(r, torch.arange(a, b)) for r, a, b in per_row])
        mapping = torch.cat([mapping, torch.tensor([-1, -1])])
        fused = torch.randn(len(mapping), 2 * kv_heads + 1, head_size).to(dtype)
        of_row = torch.cat([torch.full((b - a,), r) for r, a, b in per_row])
        fused[: len(of_row)][of_row == 3] = 0.5  # all pages of its context are alike
        key, value = fused[:, 1:].chunk(2, dim=1)
        for layer in layers:
            layer.write(key, value, mapping, drafted=drafts > 0)

    def write_prompts(chosen):
        """Write prompts in two chunks. The first one ends within a page, or is the whole prompt."""
        first = {row: min(2 * page + 5, int(lengths[row])) for row in chosen}
        write([(row, 0, end) for row, end in first.items()])
        second = [(row, end, int(lengths[row])) for row, end in first.items()]
        write([(row, start, end) for row, start, end in second if start < end])

    write_prompts(range(rows))
    query = torch.randn(rows, kv_heads * group, head_size).to(dtype)
    drafted = torch.zeros(rows, dtype=torch.int64)
    ahead = short = 0
    for step in range(steps):
        if step == 2:  # another request, in the place and the pages of one that has finished
            tables[0] = tables[0].flip(0)
            of_seat[0], drafted[0] = spare, 0
            write_prompts([0])
        lengths += torch.tensor([draw.randint(0, wrong) + 1 for wrong in drafted.tolist()])
        drafted = torch.tensor([draw.randint(0, drafts) for _ in range(rows)])
        ends, starts = lengths + drafted, torch.zeros(rows + 1, dtype=torch.int32)
        starts[1:] = (drafted + 1).cumsum(0)
        write([(row, int(lengths[row]) - 1, int(ends[row])) for row in range(rows)])
        same_records(layers, ends, tables, exact_records)
        noise = torch.randn(query.shape[0], 1, 1).abs() * torch.randn(query.shape)
        query = (query.float() * 0.8 + 0.6 * noise).to(dtype)
        prefilling = torch.zeros(rows, dtype=torch.int32)
        prefilling[5] = step == 0  # a prompt's last token
        written = torch.full((4, rows), 99, dtype=torch.int32)
        new = torch.cat([slots(r, torch.arange(lengths[r] - 1, ends[r])) for r in range(rows)])
        in_rows = DeviceRows(of_seat, prefilling, starts, ends.int(), new, tables, *written)
        in_rows = replace(in_rows, drafts=drafts)
        in_rows.slot_mapping[starts[6] :] = -1
        shortest = least[step % len(least)]
        asked = torch.full((int(starts[-1]), *query.shape[1:]), float("nan"), dtype=dtype)
        asked[starts[:-1].long()] = query  # those of drafts select nothing
        expected, actual = (layer.step(in_rows, asked, far, shortest) for layer in layers)
        short += bool((expected.choosers[lengths < shortest] < 0).any())
        for name in ("choosers", "fresh", "dense_lens", "certain"):
            assert torch.equal(getattr(expected, name), getattr(actual, name).cpu()), name
        same_plans(layers, expected, step)
        former = layers[0].selection.chosen.clone()
        for layer, of_step in zip(layers, (expected, actual), strict=True):
            layer.look_ahead(of_step)
        same_plans(layers, expected, step)
        ahead += not former.equal(layers[0].selection.chosen)
    assert bool(short) == any(least), "some contexts are short"
    assert bool(ahead) == (threshold < 1 and steps > 1), "some heads select beside attention"
    assert layers[0].requests.corrected.sum() > 0
    assert bool(masses) == bool(layers[0].requests.spared.sum() > 0)
    assert (layers[0].plan.lengths > 0).any()


def same_records(layers, lengths, tables, exact):
    """The caches agree, and the records of entries that count."""
    caches = (layer.cache.cpu().view(torch.int16) for layer in layers)
    assert torch.equal(*caches)
    for ours, theirs in zip(layers[0].indexes, layers[1].indexes, strict=True):
        if exact:
            same_entries(ours, theirs, lengths, tables)
        ours.records.copy_(theirs.records.cpu())


def same_entries(ours, theirs, lengths, tables):
    """The records of entries that count agree: to the bit, where they are built token by token."""
    layout = ours.index.fields(ours.head_size, ours.entry_tokens)
    for row, length in enumerate(lengths.tolist() if layout else ()):
        count = ops_reference.entry_count(length, ours)
        pages = tables[row, : -(-length // ours.page_size)].long()
        entries = (pages[:, None] * ours.parts + torch.arange(ours.parts)).flatten()[:count]
        records = (s.records[entries.to(s.records.device)].cpu() for s in (ours, theirs))
        kept = ours.dtype, ours.alignment
        a, b = (unpack(layout, of_store.flatten(0, 1), *kept) for of_store in records)
        for name in a:
            if ours.index.grows:
                assert torch.equal(a[name], b[name])
            torch.testing.assert_close(b[name], a[name], rtol=2**-7, atol=1e-6)


def dense_lens(device, *, far):
    """Lengths of a step whose rows all attend to selected pages."""
    count, requests = 3, DeviceRequests.empty(3, device)
    requests.table[:, : Column.SELECT + 1] = 1
    with torch.device(device):
        rows = DeviceRows(
            torch.arange(count).int(), torch.zeros(count).int(), torch.arange(count + 1).int(),
            torch.full((count,), 99).int(), torch.zeros(count).long(),
            torch.zeros(count, 7).int(), *torch.zeros(4, count).int(),
        )  # fmt: skip
    kernels.prepare_rows(rows, requests, 16, far=far)
    assert (rows.choosers == 0).all()
    return rows.dense_lens.tolist()


def long_contexts(
    device, *, lengths, tile_pages, index, pooling, page=8, entry=8, head_size=32, group=2,
    outliers=0.0,
):  # fmt: skip
    """Selections from contexts that are ranked in tiles; of the last one all pages are alike."""
    torch.manual_seed(sum(lengths))
    rows, longest, dtype = len(lengths), -(-max(lengths) // page), torch.bfloat16
    shape, size = (1, group, head_size, page, dtype), {"pages": rows * longest, "table": longest}
    size |= {"seats": rows, "rows": rows, "positions": True, "outliers": outliers}
    methods = [(index, entry, pooling)]
    layers = [
        Layer(reference, "cpu", methods, shape, **size),
        Layer(kernels, device, methods, shape, **size, tile_pages=tile_pages),
    ]
    cache = torch.randn(layers[0].cache.shape)
    cache[-longest:] = 0.5
    table = torch.zeros(rows, 8, dtype=torch.int32)
    table[:, : Column.SELECT + 1] = torch.tensor([1, 2, 6])
    table[:, Column.THRESHOLD] = bits(1.0)
    for layer in layers:
        layer.cache.copy_(cache)
        layer.requests.table.copy_(table)
    pages = torch.arange(rows * longest, dtype=torch.int32)
    kernels.index_pages(pages.to(device), layers[1].indexes[0])
    layers[0].indexes[0].records.copy_(layers[1].indexes[0].records.cpu())
    ones = torch.ones(rows, dtype=torch.int64)
    in_rows = DeviceRows(
        torch.randperm(rows).int(), torch.zeros(rows, dtype=torch.int32),
        torch.arange(rows + 1, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), ones,
        pages.view(rows, longest), *torch.empty(4, rows, dtype=torch.int32),
    )  # fmt: skip
    query = torch.randn(rows, group, head_size).to(dtype)
    steps = [layer.step(in_rows, query, False) for layer in layers]
    expected = steps[0]
    assert (expected.choosers == 0).all()
    same_plans(layers, expected, 0)
    chosen = layers[0].selection.chosen.clone()
    for layer, of_step in zip(layers, steps, strict=True):  # selects the same anew
        assert layer.selection.corrected is not None
        layer.selection.corrected.zero_()
        layer.selection.chosen.zero_()
        layer.look_ahead(of_step)
        assert torch.equal(layer.selection.chosen.cpu(), chosen)


@triton.jit
def _count_outliers(counts, SHARE: tl.constexpr):
    select = tl.program_id(0)
    tl.store(counts + select, outlier_units(select, SHARE))


def outlier_counts(device, *, share):
    """How many outliers there are among up to 200 selected pages."""
    counts = torch.zeros(200, dtype=torch.int32, device=device)
    _count_outliers[(len(counts),)](counts, SHARE=share)
    nothing: Any = None
    chooser = Chooser(nothing, nothing, Pooling.SUM, 1.0, outliers=share)
    assert counts.tolist() == [chooser.outlier_units(select) for select in range(len(counts))]


def kept_lists(
    device, *, kv_heads=2, page=16, pages=12, drafts=0, most=70, positions=False, seed=0
):
    """What is kept of the prompts of a step's rows, and all after it.

    The rows: of two methods that keep tokens, some heads none or as many as there is room for, the
    first one's answer long; of a method that selects nothing, of one of pages, exact, and padding.
    With ``positions`` the cache is far, and the context of the method that selects nothing within
    its budget: all of it is in sink and window, some of it in both.
    """
    torch.manual_seed(seed)
    rows, seats = 7, 9
    kept, none, others = (0, 2), 1, 3
    lengths = torch.tensor([11 * page - 3, 12 * page - 5, *[10 * page + 5] * 5])
    if positions:
        lengths[3] = page + 7 if drafts else page - 7
    drafted = torch.tensor([drafts, drafts - 1, *[1, 2, drafts, 0, 0]]) * min(drafts, 1)
    ends, starts = lengths + drafted, torch.zeros(rows + 1, dtype=torch.int32)
    starts[1:] = (drafted + 1).cumsum(0)
    seat = torch.randperm(seats)[:rows].int()
    seat[6] = -1
    table = torch.zeros(seats, 8, dtype=torch.int32)
    table[:, : Column.SELECT + 1] = torch.tensor([0, 0, 5])
    for row, method in enumerate((*kept, kept[0], none, others)):
        table[seat[row].long(), Column.CHOOSER] = method
    table[seat[3].long(), : Column.SELECT + 1] = torch.tensor([1, 2, 0])
    table[seat[5].long(), Column.EXACT] = 1
    tables = torch.randperm(rows * pages).view(rows, pages).int()
    new = [torch.full((count + 1,), row) for row, count in enumerate(drafted.tolist())]
    prompts, written = torch.zeros(rows, dtype=torch.int32), torch.full((4, rows), 99)
    in_rows = DeviceRows(seat, prompts, starts, ends.int(), torch.cat(new), tables, *written.int())
    in_rows = replace(in_rows, drafts=drafts)
    selection = Selection.empty(
        seats=seats, kv_heads=kv_heads, group=1, head_size=16, most_selected=most,
        dtype=torch.bfloat16,
    )  # fmt: skip
    selection.ends = torch.randint(most, 9 * page, (seats,)).int()
    selection.ends[seat[0].long()] = most
    selection.ends[seat[1].long()] = lengths[1] - 1
    for of_seat, end in enumerate(selection.ends.tolist()):
        for head in range(kv_heads):
            kept_of_head = torch.randperm(end)[:most].sort().values
            selection.chosen[of_seat, head] = kept_of_head
    counts = torch.randint(0, most, (seats, kv_heads + 2)).int()  # of other layers, too
    counts[seat[1].long(), 1], counts[seat[1].long(), kv_heads] = 0, most
    plans = []
    for ops, where in ((reference, "cpu"), (kernels, device)):
        requests = DeviceRequests.empty(seats, where)
        requests.table.copy_(table)
        moved = moved_rows(in_rows, operator.methodcaller("to", where))
        held = replace(
            selection, chosen=selection.chosen.to(where), ends=selection.ends.to(where),
            counts=counts.to(where)[:, 1:-1],
        )  # fmt: skip
        plan = DevicePlan.empty(
            rows=rows, kv_heads=kv_heads, group=1, entries=1, width=pages * page, programs=3,
            device=where, positions=positions,
        )  # fmt: skip
        ops.prepare_rows(moved, requests, page, far=positions)
        tiles = {} if ops is reference else {"tile_tokens": 32}
        ops.list_kept(moved, requests, kept, (none,), held, page, plan, **tiles)
        plans.append(plan)
    ours, theirs = (plan.lengths.view(rows, kv_heads).cpu() for plan in plans)
    assert torch.equal(ours, theirs)
    assert (ours[:4] > 0).all()
    assert (ours[4:] == -1).all()
    assert (ours[1, [0, -1]] - drafted[1]).tolist() == [1, most + 1]
    assert bool((ours[3] == ends[3]).all()) == positions
    for pair, length in enumerate(plans[0].lengths.tolist()):
        a, b = (plan.lists[pair, : max(length, 0)].cpu() for plan in plans)
        assert torch.equal(a, b), (pair, (a != b).sum())


RULES = {
    "sum": Keeping(recent_share=0.5),
    "latest": Keeping(rating="latest", sink=2, per_layer=True),
    "stamp": Keeping(rating="stamp", page=16, recent=16),
    "position": Keeping(rating="position", sink=1),
    "pages": Keeping(page=3, sink=4, recent_share=0.29),
    "stamps of layers": Keeping(rating="stamp", per_layer=True, recent=3),
    "recent": Keeping(sink=5, recent=90),
    "all spared": Keeping(sink=5, recent=100),
    "sink alone": Keeping(sink=400),
}
"""How tokens may be rated and spared."""


def dropped_tokens(
    device, rule, *, kv_heads=2, group=3, most=100, tile=32, steps=3, workers=0, seed=0
):
    """Steps that drop tokens: lists, attention, and what is kept then. With ``workers`` what tokens
    receive is added up over so many.

    The rows: of the method, of heads with room and without, one whose heads keep nothing yet; of a
    method that keeps tokens once; of one that selects nothing; exact; and padding.
    """
    torch.manual_seed(seed)
    rule, rows, seats, page, head_size = RULES[rule], 7, 9, 16, 16
    number, once, none = 1, 2, 0
    pages = -(-most // page) + 3
    seat = torch.randperm(seats)[:rows].int()
    seat[6] = -1
    table = torch.zeros(seats, COLUMNS, dtype=torch.int32)
    for row, method in enumerate((number, number, number, once, none)):
        table[seat[row].long(), Column.CHOOSER] = method
    table[seat[4].long(), : Column.SELECT + 1] = torch.tensor([1, 2, 0])
    table[seat[5].long(), Column.EXACT] = 1
    tables = torch.randperm(rows * pages).view(rows, pages).int()
    cache = torch.randn(rows * pages, kv_heads, page, 2 * head_size).bfloat16()
    end = pages * page - 9
    first = torch.tensor([end, end, 1, *[end] * 4])
    budgets = torch.randint(20, most + 1, (seats, kv_heads)).int()
    budgets[seat[1].long(), 0] = most
    counts = budgets - 1 - torch.randint(0, 3, budgets.shape).int()
    counts[seat[0].long()] = budgets[seat[0].long()] - 1
    if rule.per_layer:
        budgets, counts = (n[:, :1].expand(-1, kv_heads).clone() for n in (budgets, counts))
    counts[seat[2].long()] = 0
    chosen = torch.zeros(seats, kv_heads, most, dtype=torch.int32)
    for of_seat in range(seats):
        for head in range(kv_heads):
            if rule is RULES["all spared"]:  # nothing else is kept
                count = int(counts[of_seat, head])
                whole = torch.arange(end - 1 - count, end - 1)
                whole[: rule.sink] = torch.arange(rule.sink)[: len(whole)]
            elif head == 0 or not rule.per_layer:
                of_pages = torch.randperm((end - 10) // rule.page)[: most // rule.page + 1]
                whole = of_pages.sort().values[:, None] * rule.page + torch.arange(rule.page)
                whole = whole.flatten()[:most]
            chosen[of_seat, head, : len(whole)] = whole
    ratings = torch.rand(chosen.shape)
    if rule.rating in ("stamp", "position"):
        ratings = (ratings * 99).round()
    ratings[torch.rand(ratings.shape) < 0.05] = float("inf")
    ratings[:, -1] = 2.0 * most - torch.arange(most)  # the latest go that are not spared
    ratings[seat[1].long(), 0, : rule.page] = -1  # the first page goes, if it is not spared
    ends = torch.full((seats,), 5, dtype=torch.int32)
    found = []
    for ops, where in ((reference, "cpu"), (kernels, device)):
        requests = DeviceRequests.empty(seats, where)
        requests.table.copy_(table)
        of_layers = torch.zeros(2, seats, kv_heads + 3, dtype=torch.int32, device=where)
        of_layers[0, :, 1:-2], of_layers[1, :, 1:-2] = counts, budgets
        kept = KeptTokens(
            chosen.clone().to(where), ratings.clone().to(where), *of_layers[..., 1:-2]
        )
        held = Selection.empty(
            seats=seats, kv_heads=kv_heads, group=group, head_size=head_size, most_selected=most,
            dtype=torch.bfloat16,
        )  # fmt: skip
        held = replace(held, chosen=kept.chosen, counts=kept.counts, ends=ends.to(where))
        plan = DevicePlan.empty(
            rows=rows, kv_heads=kv_heads, group=group, entries=most, width=pages * page + most,
            programs=3, device=where,
        )  # fmt: skip
        plan.scores.fill_(float("nan"))
        workspace = DecodeWorkspace.empty(
            rows=rows * kv_heads, splits=2, group=group, head_size=head_size, device=where
        )
        draw, units = torch.Generator().manual_seed(seed), cache.view(-1, 1, 2 * head_size)
        steps_of: list[tuple[torch.Tensor, ...]] = []
        for step in range(steps):
            lens, nothing = (first + step).int(), torch.zeros(rows, dtype=torch.int32)
            in_rows = DeviceRows(
                seat, nothing, torch.arange(rows + 1, dtype=torch.int32), lens,
                torch.ones(rows, dtype=torch.int64), tables, *torch.full((4, rows), 99).int(),
            )  # fmt: skip
            in_rows = moved_rows(in_rows, operator.methodcaller("to", where))
            query = torch.randn(rows, kv_heads * group, head_size, generator=draw)
            query = (5 * query).bfloat16().to(where)  # some tokens get next to nothing
            out, lse = torch.zeros_like(query), torch.zeros(rows * kv_heads, group, device=where)
            ops.prepare_rows(in_rows, requests, page)
            given = in_rows, requests, (once,), (none,), held, page, plan
            ops.list_kept(*given, dropping=(number,))
            decode = slot_ops.sparse_decode if ops is reference else kernels.sparse_decode
            attention = query, units.to(where), plan.lists, plan.lengths, 0.25, out, lse
            decode(*attention, workspace, scores=plan.scores)
            options = {} if ops is reference else {"tile_tokens": tile}
            of_step = plan.scores, lse, in_rows, number, kept
            received = None
            if workers:  # as if others had the same heads again
                received = torch.zeros(rows, plan.scores.shape[2], device=where)
                ops.receive_tokens(*of_step, received, **options)
                received *= workers
            ops.drop_tokens(*of_step, rule, received=received, **options)
            state = plan.lengths, kept.counts, kept.chosen, kept.ratings, out.float()
            steps_of.append(tuple(part.cpu().clone() for part in state))
        found.append(steps_of)
    own, alone = seat[:3].long(), torch.ones(seats, dtype=torch.bool)
    alone[own] = False
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(ours[0], theirs[0]), "lengths"
        assert torch.equal(ours[1], theirs[1]), "counts"
        torch.testing.assert_close(ours[4], theirs[4], rtol=0.05, atol=0.05)
        for of_seat in own.tolist():
            for head in range(kv_heads):
                here = of_seat, head, slice(int(theirs[1][of_seat, head]))
                assert torch.equal(ours[2][here], theirs[2][here]), "tokens"
                torch.testing.assert_close(ours[3][here], theirs[3][here], rtol=1e-3, atol=1e-4)
        assert torch.equal(ours[2][alone], chosen[alone])
        assert torch.equal(ours[1][alone], counts[alone])
    last = found[1][-1]
    assert (last[0].view(rows, kv_heads)[3:5] > 0).all()
    assert (last[0].view(rows, kv_heads)[5:] == -1).all()
    assert (last[1][own[0]] < budgets[own[0]]).all()
    assert (last[1][own[2]] == steps).all()


def token_steps(
    device,
    *,
    filters=False,
    pooling=Pooling.MEAN_SOFTMAX,
    kv_heads=2,
    group=3,
    head_size=64,
    page=16,
    entry=16,
    dtype=torch.bfloat16,
    pages=12,
    counted=False,
    drafts=0,
    positions=False,
    seed=0,
):
    """Single tokens of a step's rows: selected by each KV head, or by a filter for all of them.

    If ``counted``, KV heads select different numbers of tokens, some of them all or none. Rows have
    up to ``drafts`` drafts. With ``positions`` the cache is far, and two contexts are within their
    budgets.

    The rows: of three lengths, one whose tokens are all alike, of a method that selects nothing, of
    a method of pages, exact, and padding.
    """
    torch.manual_seed(seed)
    rows, seats = 8, 9
    shape, number = (kv_heads, group, head_size, page, dtype), {"tokens": 0, "none": 1, "pages": 2}
    methods = [(OneBit(), entry, pooling), (None, page, pooling), (Mean(), page, Pooling.SUM)]
    size = {"pages": rows * pages, "seats": seats, "rows": rows, "positions": False, "table": pages}
    layers = [
        Layer(reference, "cpu", methods, shape, **size),
        Layer(kernels, device, methods, shape, **size),
    ]
    tables = torch.randperm(rows * pages).view(rows, pages).int()
    lengths = torch.tensor([9 * page + 1, 11 * page - 3, 12 * page, *[10 * page + 5] * 5])
    if positions:
        lengths[0], lengths[4] = 7 * page - 2, page - 5
    drafted = torch.tensor([drafts, drafts - 1, *[0, 1, 2, drafts, 1, 0]]) * min(drafts, 1)
    ends, starts = lengths + drafted, torch.zeros(rows + 1, dtype=torch.int32)
    starts[1:] = (drafted + 1).cumsum(0)
    seat = torch.randperm(seats)[:rows].int()
    seat[7] = -1
    table = torch.zeros(seats, 8, dtype=torch.int32)
    table[:, : Column.SELECT + 1] = torch.tensor([1, 2, 4])
    table[seat[1].long(), Column.SELECT] = 5
    table[seat[4].long(), Column.CHOOSER], table[seat[4].long(), Column.SELECT] = number["none"], 0
    table[seat[5].long(), Column.CHOOSER] = number["pages"]
    table[seat[6].long(), Column.EXACT] = 1
    table[:, Column.THRESHOLD] = bits(1.0)
    at = [tables[r, torch.arange(n) // page].long() * page + torch.arange(n) % page
          for r, n in enumerate(ends.tolist())]  # fmt: skip
    mapping = torch.cat([*at, torch.tensor([-1])])
    fused = torch.randn(len(mapping), 2 * kv_heads + 1, head_size).to(dtype)
    fused[sum(map(len, at[:3])) :][: len(at[3])] = 0.5
    query = 3 * torch.randn(int(starts[-1]), kv_heads * group, head_size).to(dtype)
    new = [of_row[length - 1 :] for of_row, length in zip(at, lengths.tolist(), strict=True)]
    prompts, written = torch.zeros(rows, dtype=torch.int32), torch.full((4, rows), 99)
    in_rows = DeviceRows(seat, prompts, starts, ends.int(), torch.cat(new), tables, *written.int())
    in_rows = replace(in_rows, drafts=drafts)
    counts = torch.randint(0, 6 * page, (seats, kv_heads + 2)).int()
    counts[seat[2].long(), 1], counts[seat[2].long(), 2] = 0, 99 * page
    for layer in layers:
        layer.requests.table.copy_(table)
        if counted:
            layer.selection.counts = counts.to(layer.device)[:, 1:-1]
        key, value = fused[:, 1:].chunk(2, dim=1)
        layer.write(key, value, mapping)
        layer.plan = DevicePlan.empty(
            rows=rows, kv_heads=kv_heads, group=group, entries=pages * page, width=pages * page,
            programs=3, device=layer.device, positions=positions,
        )  # fmt: skip
        layer.plan.scores.fill_(float("nan"))
        layer.plan.stats.fill_(float("nan"))
        moved = moved_rows(in_rows, operator.methodcaller("to", layer.device))
        layer.ops.prepare_rows(moved, layer.requests, page, far=positions)
        given = query.to(layer.device), moved, layer.requests
        tiles = {} if layer.ops is reference else {"tile_tokens": 64}
        if filters:
            store = IndexRecords.empty(
                Exact(), pages=rows * pages, kv_heads=kv_heads, head_size=head_size,
                page_size=page, dtype=dtype, entry_tokens=1, cache=layer.cache,
                layout="token_major", alignment=RECORD_ALIGNMENT,
            )  # fmt: skip
            store.records = store.records.to(layer.device)
            of_filter = number["tokens"], [number["none"]], store, head_size**-0.5
            layer.ops.filter_tokens(*given, *of_filter, layer.plan, **tiles)
        else:
            chosen = {number[name]: layer.choosers[number[name]] for name in ("tokens", "none")}
            layer.ops.plan_tokens(*given, chosen, layer.plan, **tiles)
    same_entries(layers[0].indexes[0], layers[1].indexes[0], ends, tables)
    ours, theirs = (layer.plan.lengths.view(rows, kv_heads).cpu() for layer in layers)
    assert torch.equal(ours, theirs)
    told = [3 * page, 12 * page] if counted else [7 * page] * 2
    assert ours[2].tolist() == told[:kv_heads]
    wholly = (
        page + lengths[4] - (lengths[4] - 1) // page * page + page
    )  # and two pages, a part full
    wanted = torch.tensor([*(n * page for n in (7, 8, 7, 7)), int(wholly), -1, -1, -1])
    if positions:
        wanted[[0, 4]] = lengths[[0, 4]]
    assert counted or ours[:, 0].equal((wanted + drafted * (wanted > 0)).int())
    for pair, length in enumerate(layers[0].plan.lengths.tolist()):
        a, b = (layer.plan.lists[pair, : max(length, 0)].cpu() for layer in layers)
        assert torch.equal(a, b), (pair, (a != b).sum())
    assert torch.equal(layers[0].requests.corrected, layers[1].requests.corrected.cpu())
    if filters:
        of_heads = layers[1].plan.lists.view(rows, kv_heads, -1)[1:4, :, : 2 * page]
        one = 0 if positions else 1  # of one page, two units
        assert (of_heads[:, 1] // page - of_heads[:, 0] // page == one).all()


def same_plans(layers, rows, step):
    """Lists, lengths, what is remembered and counted."""
    ours, theirs = layers
    assert torch.equal(ours.plan.lengths, theirs.plan.lengths.cpu()), step
    page = ours.choosers[0].store.page_size
    for pair, length in enumerate(ours.plan.lengths.tolist()):
        listed = -(-length // page) if length > 0 else 0
        a, b = (layer.plan.lists[pair, :listed].cpu() for layer in layers)
        assert torch.equal(a, b), (step, pair, a, b)
    assert torch.equal(ours.requests.table, theirs.requests.table.cpu())
    assert torch.equal(ours.requests.corrected, theirs.requests.corrected.cpu())
    assert torch.equal(ours.requests.spared, theirs.requests.spared.cpu())
    for name in ("query", "corrected"):
        kept = (getattr(layer.selection, name).cpu() for layer in layers)
        assert torch.equal(*kept), (step, name)
    for row, chooser in enumerate(rows.choosers.tolist()):
        if chooser >= 0:
            seat = int(rows.seats[row])
            chosen = [layer.selection.chosen[seat].cpu() for layer in layers]
            assert torch.equal(*chosen), (step, row)


def low_rank_records(device, *, head_size, entry, rank=0, kv_heads=1):
    """Records approximate keys nearly as well as the specification's do."""
    torch.manual_seed(head_size + entry)
    index, pages, dtype = LowRank(rank), 4, torch.bfloat16
    store = IndexRecords.empty(
        index, pages=pages, kv_heads=kv_heads, head_size=head_size, page_size=entry, dtype=dtype,
        layout="token_major", alignment=RECORD_ALIGNMENT,
    )  # fmt: skip
    strong = torch.randn(pages, kv_heads, entry, 6) * torch.tensor([4.0, 2, 1.5, 1, 1, 0.7])
    keys = strong @ torch.randn(pages, kv_heads, 6, head_size) * 0.3
    keys += 0.3 * torch.randn_like(keys) + 2 * torch.randn(pages, kv_heads, 1, head_size)
    keys[0, 0] = 1.5  # no direction is left of it
    cache = torch.cat([keys, torch.randn_like(keys)], -1).to(dtype)
    store.cache = cache.to(device)
    store.records = torch.zeros_like(store.records, device=device)
    kernels.index_pages(torch.arange(pages, dtype=torch.int32, device=device), store)
    layout = index.fields(head_size, entry)
    given = cache[..., :head_size].float().flatten(0, 1)
    errors = []
    query = torch.randn(5, head_size)
    exact = torch.einsum("gd,ntd->gnt", query, given).logsumexp(-1)
    for records in (
        store.records.cpu().flatten(0, 1),
        pack(layout, index.build(given), dtype, store.alignment),
    ):
        record = unpack(layout, records, dtype, store.alignment)
        scored = index.score(query, record, 1.0)
        errors.append((float((scored - exact).square().mean()), scored))
    assert errors[0][0] < 1.3 * errors[1][0] + 1e-3, [error for error, _ in errors]
    return errors[0][0], errors[1][0]
