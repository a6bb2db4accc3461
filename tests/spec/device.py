"""The ops of a decode step on a device, in plain torch: their specification."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from tests.spec import ops as reference
from vllm_kvretrieval.kernels.device import (
    Column,
    DevicePlan,
    DeviceRequests,
    DeviceRows,
    ScoreRoom,
)
from vllm_kvretrieval.kernels.reference.plan import entry_count, select_units, selected, turned
from vllm_kvretrieval.kernels.rows import Contexts, DecodeRows, Mode
from vllm_kvretrieval.kernels.types import (
    Chooser,
    ContextSelector,
    IndexRecords,
    KeptTokens,
    Selection,
)
from vllm_kvretrieval.retrieval.keeping import Keeping


def prepare_rows(
    rows: DeviceRows,
    requests: DeviceRequests,
    page_size: int,
    *,
    least: int = 0,
    far: bool = False,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.prepare_rows`."""
    starts = rows.query_start.tolist()
    for row, seat in enumerate(rows.seats.tolist()):
        length, options = int(rows.seq_lens[row]), requests.table[seat]
        active = seat >= 0 and starts[row + 1] > starts[row] and not rows.prefilling[row]
        certain = length - (starts[row + 1] - starts[row] - 1) if active else length
        active = active and bool(rows.slot_mapping[starts[row]] >= 0)
        active = active and not options[Column.EXACT]
        budget = options[[Column.SINK, Column.WINDOW, Column.SELECT]].sum()
        beyond = bool(-(-certain // page_size) > budget) and certain >= least
        listed = active and (far or beyond)
        rows.choosers[row] = options[Column.CHOOSER] if listed else -1
        last = int(options[Column.LAST_LEN])
        within = -(-last // page_size) <= budget
        rows.fresh[row] = 0 if not listed else 1 if last == 0 else 2 * int(within)
        staged = far and seat >= 0 and rows.prefilling[row] and starts[row + 1] - starts[row] > 1
        rows.dense_lens[row] = int(row == 0) if listed or staged else length
        rows.certain[row] = certain if listed else length
        if seat >= 0:
            options[Column.LAST_LEN] = certain if listed else 0


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    indexes: Sequence[IndexRecords],
    *,
    drafted: bool = False,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.write_kv`."""
    reference.write_cache(key, value, slot_mapping, cache, "token_major")
    for store in indexes:
        reference.update_index(key, slot_mapping, store)
        if drafted and store.index is not None and store.index.grows:
            ends = slot_mapping[slot_mapping >= 0].tolist()
            of_page = {slot // store.page_size: slot % store.page_size + 1 for slot in ends}
            _build_records(of_page, store)


def _build_records(ends: Mapping[int, int], store: IndexRecords) -> None:
    """Build the records of pages anew, from so many tokens of each."""
    pages, tokens = (torch.tensor([*of]).int() for of in (ends.keys(), ends.values()))
    reference.index_pages(pages, tokens, store)


@contextmanager
def _without_drafts(own: torch.Tensor, rows: DeviceRows, store: IndexRecords) -> Iterator[None]:
    """Records that grow, of the last pages of rows, from the tokens that are certain."""
    size, ends = store.page_size, {}
    if store.index is not None and store.index.grows and rows.drafts:
        for row in own.tolist():
            last = int(rows.certain[row]) - 1
            ends[int(rows.block_table[row, last // size])] = last % size + 1
    kept = store.records.clone()
    if ends:
        _build_records(ends, store)
    yield
    store.records.copy_(kept)


def index_pages(pages: torch.Tensor, store: IndexRecords) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.index_pages`."""
    reference.index_pages(pages, torch.full_like(pages, store.page_size), store)


def plan_decode(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    choosers: Sequence[Chooser],
    plan: DevicePlan,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.plan_decode`."""
    kv_heads, size = choosers[0].store.kv_heads, choosers[0].store.page_size
    plan.lengths[: len(rows) * kv_heads] = -1
    for number, chooser in enumerate(choosers):
        own = (rows.choosers == number).nonzero()[:, 0]
        step = _step(own, rows, requests, size, kv_heads, mass=chooser.mass)
        if chooser.store.index is None and chooser.selection.counts is not None:
            step.mode[step.mode == Mode.SELECT] = Mode.GIVEN
        if len(own):
            with _without_drafts(own, rows, chooser.store):
                _plan_now(query[rows.query_start[own].long()], step, chooser)
        for i, row in enumerate(own.tolist()):
            for head in range(kv_heads):
                pair, found = row * kv_heads + head, i * kv_heads + head
                listed = step.lists[found, : -(-int(step.lengths[found]) // size)]
                certain, length = (-(-int(of[row]) // size) for of in (rows.certain, rows.seq_lens))
                pages = rows.block_table[row, :length]
                listed = torch.cat([listed, pages[certain:] * kv_heads + head])
                if plan.positions:
                    listed = (pages == listed[:, None] // kv_heads).int().argmax(1)
                plan.lengths[pair] = step.lengths[found] + rows.seq_lens[row] - rows.certain[row]
                plan.lists[pair, : len(listed)] = listed


def _plan_now(query: torch.Tensor, step: DecodeRows, chooser: Chooser) -> None:
    """Plan as the CPU does, but for selections that no head attends to in this step."""
    selection, shape = chooser.selection, (chooser.store.kv_heads, chooser.group, -1)
    former = selection.chosen.clone()
    assert selection.corrected is not None
    for row, seat in enumerate(step.seats.tolist()):
        if step.mode[row] == Mode.SELECT and step.select[row] > 0:
            now, before = (q.view(shape) for q in (query[row], selection.query[seat]))
            fresh, threshold = bool(step.fresh[row]), float(step.numbers["threshold"][row])
            corrected = [fresh or turned(*of, threshold) for of in zip(now, before, strict=True)]
            found = torch.tensor(corrected).int()
            if selection.counts is not None:
                pages = -(-int(step.seq_lens[row]) // chooser.store.page_size)
                between = pages - int(step.sink[row]) - int(step.window[row])
                found += 2 * (selection.counts[seat] >= between).int()
                # Heads that select nothing are not asked.
                found = torch.where(selection.counts[seat] > 0, found, selection.corrected[seat])
            selection.corrected[seat] = found
    reference.plan_decode(query, step, chooser)
    for row, seat in enumerate(step.seats.tolist()):
        if step.mode[row] == Mode.SELECT and step.select[row] > 0:
            waits = selection.corrected[seat] == 0
            selection.chosen[seat, waits] = former[seat, waits]


def select_ahead(
    rows: DeviceRows,
    requests: DeviceRequests,
    number: int,
    chooser: Chooser,
    room: ScoreRoom,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.select_ahead`."""
    store, own = chooser.store, (rows.choosers == number).nonzero()[:, 0]
    step = _step(own, rows, requests, store.page_size, store.kv_heads)
    with _without_drafts(own, rows, store):
        _select_ahead(step, chooser)


def _select_ahead(step: DecodeRows, chooser: Chooser) -> None:
    store, selection = chooser.store, chooser.selection
    assert selection.corrected is not None
    for row, seat in enumerate(step.seats.tolist()):
        select, length = int(step.select[row]), int(step.seq_lens[row])
        if select == 0:
            continue
        pages = step.block_table[row, : -(-length // store.page_size)].long()
        entries = (pages[:, None] * store.parts + torch.arange(store.parts)).flatten()
        entries = entries[: entry_count(length, store)]
        between = int(step.sink[row]), len(pages) - int(step.window[row])
        asked = selection.query[seat].view(store.kv_heads, chooser.group, -1).float()
        for head in (selection.corrected[seat] == 0).nonzero()[:, 0].tolist():
            select = selected(step, row, head, len(pages), selection)
            best, _ = select_units(asked[head], entries, head, chooser, between, select, False)
            selection.chosen[seat, head, :select] = best


def plan_tokens(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    choosers: Mapping[int, Chooser],
    plan: DevicePlan,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.plan_tokens`."""
    store = next(iter(choosers.values())).store
    plan.lengths[: len(rows) * store.kv_heads] = -1
    for number, chooser in choosers.items():
        own = (rows.choosers == number).nonzero()[:, 0]
        if chooser.store.index is None:
            _list_pages(own, rows, requests, store.page_size, store.kv_heads, plan)
            continue
        step = _step(own, rows, requests, store.page_size, store.kv_heads, per_token=True)
        if len(own):
            forgotten = Selection.empty(
                seats=len(requests.table),
                kv_heads=store.kv_heads,
                group=chooser.group,
                head_size=store.head_size,
                most_selected=step.lists.shape[1],
                dtype=store.dtype,
                counts=chooser.selection.counts,
            )
            asked = query[rows.query_start[own].long()]
            reference.plan_decode(asked, step, replace(chooser, selection=forgotten))
        _take_lists(own, rows, step, store, plan)


def filter_tokens(
    query: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    number: int,
    others: Collection[int],
    store: IndexRecords,
    scale: float,
    plan: DevicePlan,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.filter_tokens`."""
    plan.lengths[: len(rows) * store.kv_heads] = -1
    for other in others:
        own = (rows.choosers == other).nonzero()[:, 0]
        _list_pages(own, rows, requests, store.page_size, store.kv_heads, plan)
    own = (rows.choosers == number).nonzero()[:, 0]
    step = _step(own, rows, requests, store.page_size, store.kv_heads, per_token=True)
    chosen = torch.zeros(len(requests.table), store.pages * store.page_size, dtype=torch.int32)
    selector = ContextSelector(store, chosen, query.shape[1] // store.kv_heads, scale)
    if len(own):
        asked = query[rows.query_start[own].long()]
        reference.select_context(asked, torch.ones(len(own), 1), step, selector)
        reference.list_context(step, selector, store.kv_heads)
    _take_lists(own, rows, step, store, plan)


def list_kept(
    rows: DeviceRows,
    requests: DeviceRequests,
    numbers: Collection[int],
    others: Collection[int],
    selection: Selection,
    page_size: int,
    plan: DevicePlan,
    *,
    dropping: Collection[int] = (),
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.list_kept`."""
    assert selection.counts is not None
    assert selection.ends is not None
    kv_heads = selection.chosen.shape[1]
    plan.lengths[: len(rows) * kv_heads] = -1
    for other in others:
        own = (rows.choosers == other).nonzero()[:, 0]
        _list_pages(own, rows, requests, page_size, kv_heads, plan)
    for number in (*numbers, *dropping):
        for row in (rows.choosers == number).nonzero()[:, 0].tolist():
            seat = int(rows.seats[row])
            end = int(rows.certain[row]) - 1 if number in dropping else int(selection.ends[seat])
            after = torch.arange(end, int(rows.seq_lens[row]))
            for head in range(kv_heads):
                kept = selection.chosen[seat, head, : int(selection.counts[seat, head])]
                tokens = torch.cat([kept.long(), after])
                pair = row * kv_heads + head
                plan.lengths[pair] = len(tokens)
                listed = _numbers(tokens, row, head, rows, page_size, kv_heads, plan)
                plan.lists[pair, : len(tokens)] = listed


def receive_tokens(
    scores: torch.Tensor,
    lse: torch.Tensor,
    rows: DeviceRows,
    number: int,
    kept: KeptTokens,
    received: torch.Tensor,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.receive_tokens`."""
    weights = (scores - lse[..., None]).exp().unflatten(0, (-1, kept.chosen.shape[1]))
    for row in (rows.choosers == number).nonzero()[:, 0].tolist():
        listed = slice(int(kept.counts[rows.seats[row], 0]) + 1)
        received[row, listed] = weights[row].sum((0, 1))[listed]


def drop_tokens(
    scores: torch.Tensor,
    lse: torch.Tensor,
    rows: DeviceRows,
    number: int,
    kept: KeptTokens,
    rule: Keeping,
    *,
    received: torch.Tensor | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.drop_tokens`."""
    own = (rows.choosers == number).nonzero()[:, 0]
    if not len(own):
        return
    kv_heads, seats = kept.chosen.shape[1], rows.seats[own]
    weights = (scores - lse[..., None]).exp().unflatten(0, (-1, kv_heads))[own]
    if rule.per_layer:
        weights = weights.flatten(1, 2).sum(1)[:, None, None]
    if received is not None:
        weights = received[own][:, None, None]
    step = DecodeRows.given(
        Contexts(rows.block_table[own], rows.certain[own], seats),
        torch.empty(len(own) * kv_heads, 1, dtype=torch.int32),
        sink=0,
        window=1,
        fresh=False,
        per_token=True,
    )
    reference.drop_tokens(weights, step, kept, rule)
    counts = kept.counts[seats.long()] + 1
    full = counts >= kept.budgets[seats.long()]
    kept.counts[seats.long()] = torch.where(full, (counts - rule.page).clamp(min=0), counts)


def _list_pages(
    own: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    size: int,
    kv_heads: int,
    plan: DevicePlan,
) -> None:
    """The tokens of the first and of the last pages, for methods that select nothing."""
    for row in own.tolist():
        options, length = requests.table[rows.seats[row]], int(rows.certain[row])
        pages = -(-length // size)
        first, last = int(options[Column.SINK]), pages - int(options[Column.WINDOW])
        positions = torch.arange(int(rows.seq_lens[row]))
        tokens = positions[(positions // size < first) | (positions // size >= last)]
        for head in range(kv_heads):
            pair = row * kv_heads + head
            plan.lengths[pair] = len(tokens)
            listed = _numbers(tokens, row, head, rows, size, kv_heads, plan)
            plan.lists[pair, : len(tokens)] = listed


def _numbers(
    tokens: torch.Tensor,
    row: int,
    head: int,
    rows: DeviceRows,
    size: int,
    kv_heads: int,
    plan: DevicePlan,
) -> torch.Tensor:
    """What stands in a plan's lists for the tokens at some positions of a row's context."""
    if plan.positions:
        return tokens
    return (rows.block_table[row, tokens // size] * kv_heads + head) * size + tokens % size


def _take_lists(
    own: torch.Tensor, rows: DeviceRows, step: DecodeRows, store: IndexRecords, plan: DevicePlan
) -> None:
    """Lists of tokens into the plan of all rows; drafts end them."""
    size, kv_heads = store.page_size, store.kv_heads
    for i, row in enumerate(own.tolist()):
        drafts = torch.arange(int(rows.certain[row]), int(rows.seq_lens[row]))
        for head in range(kv_heads):
            pair, found = row * kv_heads + head, i * kv_heads + head
            listed = step.lists[found, : int(step.lengths[found])]
            if plan.positions:
                page = (rows.block_table[row] == listed[:, None] // size // kv_heads).int()
                listed = page.argmax(1) * size + listed % size
            drafted = _numbers(drafts, row, head, rows, size, kv_heads, plan)
            listed = torch.cat([listed, drafted])
            plan.lengths[pair] = len(listed)
            plan.lists[pair, : len(listed)] = listed


def _step(
    own: torch.Tensor,
    rows: DeviceRows,
    requests: DeviceRequests,
    size: int,
    kv_heads: int,
    *,
    per_token: bool = False,
    mass: bool = False,
) -> DecodeRows:
    """Some of the rows as :class:`DecodeRows`, which the ops of the CPU take."""
    seats, lengths = rows.seats[own], rows.certain[own]
    options = requests.table[seats.long()]
    sink, window, select = (
        options[:, c].contiguous() for c in (Column.SINK, Column.WINDOW, Column.SELECT)
    )
    budget = sink + window + select
    whole = -(-lengths // size) <= budget
    if per_token:
        sink, window, select = sink * size, window * size, select * size
    step = DecodeRows.selecting(
        Contexts(rows.block_table[own], lengths, seats),
        torch.zeros(
            len(own) * kv_heads,
            rows.block_table.shape[1] * (size if per_token else 1),
            dtype=torch.int32,
        ),
        per_token=per_token,
        lengths=torch.zeros(len(own) * kv_heads, dtype=torch.int32),
        sink=torch.where(whole, 0, sink),
        window=torch.where(whole, lengths if per_token else 0, window),
        select=torch.where(whole, 0, select),
        fresh=(rows.fresh[own] != 0).to(torch.uint8),
        numbers={
            "threshold": options[:, Column.THRESHOLD].contiguous().view(torch.float32),
            "mass": options[:, Column.MASS].contiguous().view(torch.float32) if mass else 1.0,
        },
        spared=requests.spared,
        corrected=requests.corrected,
    )
    step.mode[whole] = Mode.WHOLE
    return step
