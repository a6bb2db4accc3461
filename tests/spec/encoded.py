"""The ops of an encoded home in plain torch: their specification. Slow, and meant to be read."""

import torch

from tests.spec import device
from vllm_kvretrieval.kernels.device import DeviceRows
from vllm_kvretrieval.kernels.encoded import EncodedUnits
from vllm_kvretrieval.kernels.slots import Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.types import IndexRecords
from vllm_kvretrieval.retrieval.index import pack


def update_index(key: torch.Tensor, slot_mapping: torch.Tensor, store: IndexRecords) -> None:
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.update_index`."""
    shape = store.pages, store.kv_heads, store.page_size, 2 * store.head_size
    beside = torch.zeros(shape, dtype=store.dtype)  # an index that grows reads no cache
    device.write_kv(key, key, slot_mapping, beside, [store])


def write_open(
    key: torch.Tensor,
    value: torch.Tensor,
    rows: DeviceRows,
    store: EncodedUnits,
    residency: Residency,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.write_open`."""
    _, ring, _, page_size, width = store.open.shape
    for row, seat, first, before, after in _written(rows):
        new = torch.cat([key[first:], value[first:]], -1)[: after - before]
        for page in range(before // page_size, after // page_size):
            begin = page * page_size
            old = store.open[seat, page % ring, :, : max(before - begin, 0)]
            of_step = new[max(begin - before, 0) : begin + page_size - before].transpose(0, 1)
            unit = torch.cat([old, of_step], 1)
            keys, values = unit.split(width // 2, -1)
            number = int(rows.block_table[row, page])
            store.units[number] = store.codec.encode(keys, values)
        if after - before > 1:
            continue
        page, offset = divmod(before, page_size)
        store.open[seat, page % ring, :, offset] = new[0]
        if offset == 0:
            closed = residency.held[seat] == page - ring
            closed &= residency.held[seat] >= 0
            residency.held[seat][closed] = -1
            residency.traffic[seat, Traffic.HELD] -= closed.sum()


def index_open(
    key: torch.Tensor, rows: DeviceRows, store: EncodedUnits, index: IndexRecords
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.index_open`."""
    _, ring, _, page_size, width = store.open.shape
    size, by = index.entry_tokens, index.index
    assert by is not None
    for row, seat, first, before, after in _written(rows):
        for entry in range(before // size, after // size):
            page = entry // index.parts
            old = store.open[seat, page % ring, :, :, : width // 2]
            of_tokens = [
                old[:, place % page_size] if place < before else key[first + place - before]
                for place in range(entry * size, (entry + 1) * size)
            ]
            built = by.build(torch.stack(of_tokens, 1).float())
            number = int(rows.block_table[row, page]) * index.parts + entry % index.parts
            layout = by.fields(width // 2, size)
            index.records[number] = pack(layout, built, index.dtype, index.alignment)


def keep_open(
    key: torch.Tensor, value: torch.Tensor, rows: DeviceRows, store: EncodedUnits
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.keep_open`."""
    _, ring, _, page_size, _ = store.open.shape
    for _, seat, first, before, after in _written(rows):
        if after - before == 1:
            continue
        for position in range(max(before, (after // page_size - store.kept) * page_size), after):
            token = first + position - before
            written = torch.cat([key[token], value[token]], -1)
            store.open[seat, position // page_size % ring, :, position % page_size] = written


def recall_encoded(
    store: EncodedUnits,
    slots: torch.Tensor,
    residency: Residency,
    recalls: Recalls,
    *,
    programs: int = 16,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.recall_encoded`."""
    _, kv_heads, capacity = residency.held.shape
    listed = zip(recalls.sources.tolist(), recalls.targets.tolist(), strict=True)
    for _, (source, target) in zip(range(int(recalls.count)), listed, strict=False):
        number, head = divmod(source, kv_heads)
        seat = target // capacity // kv_heads
        page = int(residency.held.flatten()[target])
        slots[target] = _page(store, seat, page, number)[head]


def stage_encoded(
    store: EncodedUnits,
    buffer: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    seats: torch.Tensor,
    *,
    programs: int = 16,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.stage_encoded`."""
    page_size = buffer.shape[2]
    for row, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
        for page in range(-(-length // page_size)):
            number = int(block_table[row, page])
            buffer[start + page] = _page(store, int(seats[row]), page, number)


def _page(store: EncodedUnits, seat: int, page: int, number: int) -> torch.Tensor:
    """[kv_heads, page, 2 * head_size]; a page of a request as it reads it.

    Args:
        store: The cache.
        seat: The request's.
        page: The page's position in its context.
        number: The page's id.
    """
    _, ring, _, page_size, width = store.open.shape
    if page >= store.first[seat]:
        return store.open[seat, page % ring]
    units, shape = store.units[number], (page_size, width // 2, store.open.dtype)
    return torch.cat(store.codec.decode(units, *shape), -1)


def _written(rows: DeviceRows) -> list[tuple[int, int, int, int, int]]:
    """Rows that write tokens: their numbers, seats, and first tokens in the batch; and tokens of
    their contexts before and after the step."""
    starts, found = rows.query_start.tolist(), []
    contexts = zip(rows.seats.tolist(), rows.seq_lens.tolist(), strict=True)
    for row, (seat, after) in enumerate(contexts):
        tokens = starts[row + 1] - starts[row]
        if seat >= 0 and tokens > 0 and rows.slot_mapping[starts[row]] >= 0:
            found.append((row, seat, starts[row], after - tokens, after))
    return found
