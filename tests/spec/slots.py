"""The ops over slots in plain torch: their specification. Slow, and meant to be read."""

import torch

from vllm_kvretrieval.kernels.device import Column, DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.slots import DecodeWorkspace, Origins, Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.types import Selection


def recall_units(
    home: torch.Tensor,
    slots: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    count: torch.Tensor,
    *,
    programs: int = 16,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.recall_units`."""
    listed = int(count)
    slots[targets[:listed].long()] = home.flatten(0, 1)[sources[:listed].long()]


def resolve(
    key: torch.Tensor,
    value: torch.Tensor,
    plan: DevicePlan,
    rows: DeviceRows,
    residency: Residency,
    missing: Recalls | Origins,
    slots: torch.Tensor,
    slot_lists: torch.Tensor,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.resolve`."""
    held, page_size = residency.held, slots.shape[1]
    of_seat = slots.view(*held.shape, *slots.shape[1:])
    for row, seat in enumerate(rows.seats.tolist()):
        if rows.choosers[row] < 0:
            continue
        if rows.fresh[row] == 1:
            residency.traffic[seat, Traffic.HELD] -= (held[seat] >= 0).sum()
            held[seat] = -1
        new = range(int(rows.certain[row]) - 1, int(rows.seq_lens[row]))
        for token, position in enumerate(new, int(rows.query_start[row])):
            page, offset = divmod(position, page_size)
            for head, slot in (held[seat] == page).nonzero().tolist():
                written = torch.cat([key[token, head], value[token, head]])
                of_seat[seat, head, slot, offset] = written
        for head in range(held.shape[1]):
            pair = row * held.shape[1] + head
            pages = -(-int(plan.lengths[pair]) // page_size)
            wanted, most = plan.lists[pair, :pages], held.shape[2]
            free = torch.ones_like(held[seat, head], dtype=torch.bool)
            found = _find(wanted[:most], head, free, seat, residency)
            found += [(-1, True)] * (pages - len(found))  # which no slot gets
            slot_lists[pair, :pages] = torch.tensor([slot for slot, _ in found], dtype=torch.int32)
            if isinstance(missing, Origins):
                units = _units(wanted, row, head, rows, held.shape[1], missing, page_size)
                missed = torch.tensor([missed for _, missed in found], dtype=torch.bool)
                missing.units[pair, :pages] = units.where(missed, -1)
            else:
                units = rows.block_table[row, wanted.long()] * held.shape[1] + head
                _append(missing, units, found)
            residency.traffic[seat, Traffic.LOOKED_UP] += pages
            residency.traffic[seat, Traffic.MISSED] += sum(missed for _, missed in found)


def _units(
    wanted: torch.Tensor,
    row: int,
    head: int,
    rows: DeviceRows,
    kv_heads: int,
    origins: Origins,
    tokens: int,
) -> torch.Tensor:
    """The units of so many tokens, of which a page of the home has some, at positions that are
    wanted."""
    run = origins.home.shape[2] // tokens
    return (rows.block_table[row, wanted.long() // run] * kv_heads + head) * run + wanted % run


def resolve_ahead(
    selection: Selection,
    rows: DeviceRows,
    requests: DeviceRequests,
    residency: Residency,
    recalls: Recalls,
    slot_lists: torch.Tensor,
    page_size: int,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.resolve_ahead`."""
    held, stamp = residency.held, residency.stamp
    for row, seat in enumerate(rows.seats.tolist()):
        if rows.choosers[row] < 0:
            continue
        options = requests.table[seat]
        between = -(-int(rows.certain[row]) // page_size)
        between -= int(options[Column.SINK] + options[Column.WINDOW])
        if between <= options[Column.SELECT]:
            continue
        for head in range(held.shape[1]):
            wanted = selection.chosen[seat, head, : int(options[Column.SELECT])]
            free = stamp[seat, head] != residency.step
            found = _find(wanted, head, free, seat, residency)
            units = rows.block_table[row, wanted.long()] * held.shape[1] + head
            _append(recalls, units, found)
            slot_lists[row * held.shape[1] + head, : len(wanted)] = torch.tensor(
                [slot for slot, _ in found], dtype=torch.int32
            )
            residency.traffic[seat, Traffic.AHEAD] += sum(missed for _, missed in found)


def _find(
    wanted: torch.Tensor,
    head: int,
    free: torch.Tensor,
    seat: int,
    residency: Residency,
) -> list[tuple[int, bool]]:
    """The slot of every page (-1: it gets none), and whether the page was missing and got one.

    Args:
        wanted: [n]; pages by position.
        head: The KV head that attends to them.
        free: bool [C]; what may be given away, unless it holds a page that is wanted.
        seat: The request's.
        residency: See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.resolve`.
    """
    step = int(residency.step)
    _, kv_heads, capacity = residency.held.shape
    held, stamp = residency.held[seat, head], residency.stamp[seat, head]
    first = (seat * kv_heads + head) * capacity
    wanted_slots = (held[:, None] == wanted).any(1)
    candidates = (free & ~wanted_slots).nonzero()[:, 0].tolist()
    candidates.sort(key=lambda slot: -1 if held[slot] < 0 else int(stamp[slot]))
    missing = [page for page in wanted.tolist() if page not in held]
    victims = sorted(candidates[: len(missing)])
    for page, slot in zip(missing, victims, strict=False):
        residency.traffic[seat, Traffic.HELD] += held[slot] < 0
        held[slot] = page
    found = []
    for page in wanted.tolist():
        slots = (held == page).nonzero()[:, 0].tolist()
        stamp[slots] = step
        found.append((first + slots[0] if slots else -1, bool(slots) and page in missing))
    return found


def _append(recalls: Recalls, units: torch.Tensor, found: list[tuple[int, bool]]) -> None:
    for unit, (slot, missed) in zip(units.tolist(), found, strict=True):
        if missed:
            entry = int(recalls.count)
            recalls.sources[entry], recalls.targets[entry] = unit, slot
            recalls.count += 1


def stage_context(
    home: torch.Tensor,
    buffer: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    *,
    programs: int = 16,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.stage_context`."""
    for row, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
        pages = -(-length // home.shape[2])
        buffer[start : start + pages] = home[block_table[row, :pages].long()]


def sparse_decode(
    query: torch.Tensor,
    slots: torch.Tensor,
    slot_lists: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    starts: torch.Tensor | None = None,
    queries: int = 1,
    scores: torch.Tensor | None = None,
    origins: Origins | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.sparse_decode`. Computes in float64."""
    if origins is not None:
        slots, slot_lists = _with_missing(slots, slot_lists, lengths, origins)
    group = lse.shape[1] // queries
    kv_heads = query.shape[1] // group
    for row, length in enumerate(lengths.tolist()):
        if length < 0:
            continue
        request, head = divmod(row, kv_heads)
        members = slice(head * group, (head + 1) * group)
        of_row = range(request, request + 1)
        if starts is not None:
            of_row = range(*starts[request : request + 2].tolist())
        for number, token in enumerate(of_row):
            seen = max(length - (len(of_row) - 1 - number), 0)
            listed = slots[slot_lists[row, : -(-seen // slots.shape[1])].long()]
            keys, values = listed.flatten(0, 1)[:seen].double().chunk(2, dim=-1)
            found = query[token, members].double() @ keys.T * scale
            if softcap:
                found = softcap * (found / softcap).tanh()
            if scores is not None:
                most = min(seen, scores.shape[2])
                scores[row, :, :most] = found[:, :most]
            if sinks is not None:  # a score without a value
                found = torch.cat([found, sinks[members, None].double()], 1)
                values = torch.cat([values, values.new_zeros(1, values.shape[1])])
            of_query = slice(number * group, (number + 1) * group)
            lse[row, of_query] = found.logsumexp(dim=-1)
            out[token, members] = (found.softmax(dim=-1) @ values).to(out.dtype)


def _with_missing(
    slots: torch.Tensor, slot_lists: torch.Tensor, lengths: torch.Tensor, origins: Origins
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write pages of the home to the slots that miss them.

    Returns:
        Slots and lists of all pages, those for which there is no slot included.
    """
    page = slots.shape[1]
    at_home, slot_lists = origins.home.view(-1, *slots.shape[1:]), slot_lists.clone()
    beyond = list[torch.Tensor]()
    for row, length in enumerate(lengths.tolist()):
        for place, first in enumerate(range(0, length, page)):
            if (unit := int(origins.units[row, place])) < 0:
                continue
            there = slice(0, min(length - first, page))
            if (slot := int(slot_lists[row, place])) >= 0:
                slots[slot, there] = at_home[unit, there]
            else:
                slot_lists[row, place] = len(slots) + len(beyond)
                beyond.append(at_home[unit])
    return torch.cat([slots, torch.stack(beyond)]) if beyond else slots, slot_lists
