"""Which slots hold the pages that are wanted, and which pages have to be recalled into which."""

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import COLUMNS, Column, DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.slots import Origins, Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.triton.checks import check_heads, check_list, check_units
from vllm_kvretrieval.kernels.triton.ranking import find_highest
from vllm_kvretrieval.kernels.types import Selection

MOST_SLOTS = 4096
"""Of a (seat, KV head); a program holds what it knows of them in registers."""

_COLUMNS = tl.constexpr(COLUMNS)
_SINK = tl.constexpr(int(Column.SINK))
_WINDOW = tl.constexpr(int(Column.WINDOW))
_SELECT = tl.constexpr(int(Column.SELECT))
_COUNTERS = tl.constexpr(len(Traffic))
_LOOKED_UP = tl.constexpr(int(Traffic.LOOKED_UP))
_MISSED = tl.constexpr(int(Traffic.MISSED))
_AHEAD = tl.constexpr(int(Traffic.AHEAD))
_HELD = tl.constexpr(int(Traffic.HELD))


@triton.jit
def _unit_of(table, position, there, head, kv_heads, RUN: tl.constexpr):
    """The units of the home at some positions of a context, counted in units of a KV head."""
    page = tl.load(table + position // RUN, mask=there, other=0)
    return (page * kv_heads + head) * RUN + position % RUN


@triton.jit
def _resolve_kernel(
    wanted,
    lengths,
    table,
    seats,
    choosers,
    fresh,
    seq_lens,
    certain,
    query_start,
    block_table,
    held,
    stamp,
    step,
    traffic,
    slot_lists,
    sources,
    targets,
    recall_count,
    key,
    value,
    slots,
    key_stride,
    value_stride,
    wanted_stride,
    table_stride,
    lists_stride,
    kv_heads,
    capacity,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    RUN: tl.constexpr,  # units of a page of contexts
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    AHEAD: tl.constexpr,
    IN_PLACE: tl.constexpr,  # whether sources are by places in lists, and targets are the same room
    GROWS: tl.constexpr,  # whether lists may be longer than there are slots
):
    pair = tl.program_id(0)
    row = pair // kv_heads
    head = pair % kv_heads
    if tl.load(choosers + row) < 0:
        return
    seat = tl.load(seats + row)
    of_seat = seat * kv_heads + head
    if AHEAD:
        options = table + seat * _COLUMNS
        select = tl.load(options + _SELECT)
        between = tl.cdiv(tl.load(certain + row), PAGE)
        between -= tl.load(options + _SINK) + tl.load(options + _WINDOW)
        if between <= select:
            return
        listed = select
        wanted += of_seat.to(tl.int64) * wanted_stride
    else:
        listed = tl.cdiv(tl.load(lengths + pair), PAGE)
        wanted += pair.to(tl.int64) * wanted_stride
    total = listed
    if GROWS:
        listed = tl.minimum(total, capacity)
    slot_lists += pair.to(tl.int64) * lists_stride
    if IN_PLACE:
        sources += pair.to(tl.int64) * lists_stride
        targets += pair.to(tl.int64) * lists_stride

    slot = tl.arange(0, SLOTS)
    mine = slot < capacity
    slot += of_seat * capacity
    now = tl.load(step)
    page = tl.load(held + slot, mask=mine, other=-1)
    held_before = tl.sum((page >= 0).to(tl.int32), 0)
    unused = now - tl.load(stamp + slot, mask=mine, other=0)
    if not AHEAD:
        if tl.load(fresh + row) == 1:
            page = tl.full([SLOTS], -1, tl.int32)
            tl.store(held + slot, page, mask=mine)
        # The step's tokens, to the slots of their pages.
        first = tl.load(certain + row) - 1
        from_token = tl.load(query_start + row).to(tl.int64)
        for draft in tl.range(0, tl.load(seq_lens + row) - first):
            at = first + draft
            found = tl.max(tl.where(page == at // PAGE, slot, -1), 0)
            if found >= 0:
                dims = tl.arange(0, DIMS)
                token = from_token + draft
                read = head * HEAD_SIZE + dims
                to = slots + (found.to(tl.int64) * PAGE + at % PAGE) * (2 * HEAD_SIZE) + dims
                k = tl.load(key + token * key_stride + read, mask=dims < HEAD_SIZE)
                tl.store(to, k, mask=dims < HEAD_SIZE)
                v = tl.load(value + token * value_stride + read, mask=dims < HEAD_SIZE)
                tl.store(to + HEAD_SIZE, v, mask=dims < HEAD_SIZE)
    entry = tl.arange(0, WIDTH)
    in_list = entry < listed
    tl.store(slot_lists + entry, tl.full([WIDTH], -1, tl.int32), mask=in_list)
    if IN_PLACE:
        tl.store(sources + entry, tl.full([WIDTH], -1, tl.int32), mask=in_list)

    # Lists rise: every slot looks for its page by halving.
    low = tl.zeros([SLOTS], tl.int32)
    high = tl.zeros([SLOTS], tl.int32) + listed
    for _ in tl.static_range(ROUNDS):
        middle = (low + high) // 2
        before = tl.load(wanted + middle, mask=low < high, other=0) < page
        high = tl.where(before, high, middle)
        low = tl.where(before & (low < high), middle + 1, low)
    there = mine & (page >= 0) & (low < listed)
    there = there & (tl.load(wanted + low, mask=there, other=-1) == page)
    tl.debug_barrier()
    tl.store(slot_lists + low, slot, mask=there)
    tl.debug_barrier()
    miss = in_list & (tl.load(slot_lists + entry, mask=in_list, other=0) < 0)

    given = mine & ~there
    if AHEAD:
        given = given & (unused != 0)
    age = tl.where(given, tl.maximum(unused, 0), -1)
    age = tl.where(given & (page < 0), tl.max(age, 0) + 1, age)
    missing = tl.minimum(tl.sum(miss.to(tl.int32), 0), tl.sum(given.to(tl.int32), 0))
    used = there
    if missing > 0:
        rank = tl.cumsum(miss.to(tl.int32), 0) - 1
        miss = miss & (rank < missing)
        victim = find_highest(age, missing, tl.zeros([], tl.int32), tl.max(age, 0) + 1)
        first = 0
        if not IN_PLACE:
            first = tl.atomic_add(recall_count, missing, sem="relaxed")
        to = targets + first
        tl.store(to + tl.cumsum(victim.to(tl.int32), 0) - 1, slot, mask=victim)
        tl.debug_barrier()
        goal = tl.load(to + rank, mask=miss, other=0)
        position = tl.load(wanted + entry, mask=miss, other=0)
        of_row = block_table + row.to(tl.int64) * table_stride
        source = _unit_of(of_row, position, miss, head, kv_heads, RUN)
        if IN_PLACE:
            tl.debug_barrier()
            tl.store(sources + entry, tl.where(miss, source, -1), mask=in_list)
        else:
            tl.store(sources + first + rank, source, mask=miss)
        tl.store(slot_lists + entry, goal, mask=miss)
        tl.store(held + goal, position, mask=miss)
        used = used | victim
    tl.store(stamp + slot, tl.zeros([SLOTS], tl.int32) + now, mask=used)
    if GROWS:  # what is left is read at home, and stays there
        of_row = block_table + row.to(tl.int64) * table_stride
        for first_beyond in tl.range(listed, total, WIDTH):
            beyond = first_beyond + tl.arange(0, WIDTH)
            there_beyond = beyond < total
            at_home = tl.load(wanted + beyond, mask=there_beyond, other=0)
            unit = _unit_of(of_row, at_home, there_beyond, head, kv_heads, RUN)
            tl.store(sources + beyond, unit, mask=there_beyond)
            tl.store(slot_lists + beyond, tl.full([WIDTH], -1, tl.int32), mask=there_beyond)
    seen = traffic + seat * _COUNTERS
    held_now = tl.sum(((page >= 0) | used).to(tl.int32), 0)
    # Nobody reads what is counted, or the list of recalls, before the kernel has ended.
    tl.atomic_add(seen + _HELD, (held_now - held_before).to(tl.int64), sem="relaxed")
    if AHEAD:
        tl.atomic_add(seen + _AHEAD, missing.to(tl.int64), sem="relaxed")
    else:
        tl.atomic_add(seen + _LOOKED_UP, total.to(tl.int64), sem="relaxed")
        tl.atomic_add(seen + _MISSED, (missing + total - listed).to(tl.int64), sem="relaxed")


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
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.resolve`.

    One program per (row, KV head).

    Raises:
        ValueError: A tensor's dtype or shape is not that of the signature, a list may be longer
            than there are slots for it, or there is no room for what may be missing.
    """
    if not plan.positions:
        raise ValueError("the plan must list positions in contexts, not units")
    check_list("plan.lengths", plan.lengths, (len(plan.lengths),), torch.int32)
    page_size, width = slots.shape[1:]
    check_units("slots", slots, key.dtype)
    check_heads("key", key, width // 2, key.dtype)
    check_heads("value", value, width // 2, key.dtype)
    if len(slots) != residency.held.numel():
        raise ValueError(f"{len(slots)} slots, but {residency.held.numel()} that may hold a page")
    written = key, value, slots
    _launch(
        plan.lists, plan.lengths, None, rows, residency, missing, slot_lists, page_size, written
    )


def resolve_ahead(
    selection: Selection,
    rows: DeviceRows,
    requests: DeviceRequests,
    residency: Residency,
    recalls: Recalls,
    slot_lists: torch.Tensor,
    page_size: int,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.resolve_ahead`.

    One program per (row, KV head). Bytes moved: some 16 per slot and entry of a list.

    Raises:
        ValueError: As :func:`resolve`.
    """
    if selection.counts is not None:
        raise ValueError("the selection must be of equal counts")
    chosen = selection.chosen.flatten(0, 1)
    check_list("requests.table", requests.table, (len(requests.table), COLUMNS), torch.int32)
    _launch(chosen, None, requests.table, rows, residency, recalls, slot_lists, page_size, None)


def _launch(
    wanted: torch.Tensor,
    lengths: torch.Tensor | None,
    table: torch.Tensor | None,
    rows: DeviceRows,
    residency: Residency,
    missing: Recalls | Origins,
    slot_lists: torch.Tensor,
    page_size: int,
    written: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    """Lists of what a step attends to have ``lengths``, and tokens that are written: keys, values
    and slots. Those of a selection have a ``table``."""
    key, value, slots = written or (None, None, None)
    head_size = 1 if slots is None else slots.shape[2] // 2
    seats, kv_heads, capacity = residency.held.shape
    pairs, width = len(rows) * kv_heads, wanted.shape[1]
    for name, tensor in (("held", residency.held), ("stamp", residency.stamp)):
        check_list(name, tensor, (seats, kv_heads, capacity), torch.int32)
    check_list("step", residency.step, (1,), torch.int32)
    check_list("traffic", residency.traffic, (seats, len(Traffic)), torch.int64)
    run, in_place, beyond = 1, False, False
    if isinstance(missing, Origins):
        in_place, beyond = True, missing.beyond
        run, beside = divmod(missing.home.shape[2], page_size)
        if beside:
            raise ValueError(
                f"slots of {page_size} tokens are no parts of pages of {missing.home.shape[2]}"
            )
        sources = targets = missing.units
        count, room = residency.step, len(sources) * width  # the count is not read
        check_list("origins.units", sources, (len(sources), slot_lists.stride(0)), torch.int32)
    else:
        sources, targets, count = missing.sources, missing.targets, missing.count
        room = len(sources)
        check_list("sources", sources, (room,), torch.int32)
        check_list("targets", targets, (room,), torch.int32)
        check_list("count", count, (1,), torch.int32)
    for name, tensor in (("wanted pages", wanted), ("slot_lists", slot_lists)):
        if tensor.dtype != torch.int32 or tensor.stride(1) != 1 or tensor.shape[1] < width:
            raise ValueError(
                f"{name} must be int32 lists of {width}, got {tensor.dtype} {list(tensor.shape)}"
            )
    if (width > capacity and not beyond) or capacity > MOST_SLOTS:
        raise ValueError(
            f"lists of up to {width} pages need as many slots per KV head, and {MOST_SLOTS} at "
            f"most, got {capacity}"
        )
    if min(room, len(slot_lists) * width) < pairs * width:
        raise ValueError(
            f"no room for {pairs} lists of {width}: {room} units to recall, "
            f"{len(slot_lists)} lists of slots"
        )
    if pairs == 0:
        return
    of_program, found = triton.next_power_of_2(capacity), min(width, capacity)
    _resolve_kernel[(pairs,)](
        wanted,
        lengths,
        table,
        rows.seats,
        rows.choosers,
        rows.fresh,
        rows.seq_lens,
        rows.certain,
        rows.query_start,
        rows.block_table,
        residency.held,
        residency.stamp,
        residency.step,
        residency.traffic,
        slot_lists,
        sources,
        targets,
        count,
        key,
        value,
        slots,
        0 if key is None else key.stride(0),
        0 if value is None else value.stride(0),
        wanted.stride(0),
        rows.block_table.stride(0),
        slot_lists.stride(0),
        kv_heads,
        capacity,
        HEAD_SIZE=head_size,
        DIMS=triton.next_power_of_2(head_size),
        PAGE=page_size,
        RUN=run,
        WIDTH=triton.next_power_of_2(found),
        SLOTS=of_program,
        ROUNDS=found.bit_length(),
        AHEAD=table is not None,
        IN_PLACE=in_place,
        GROWS=width > capacity,
        num_warps=min(max(of_program // 128, 2), 16),
        enable_fp_fusion=True,
    )
