"""Pages encoded in mapped host memory, and open ones on the device."""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import DeviceRows
from vllm_kvretrieval.kernels.encoded import EncodedUnits
from vllm_kvretrieval.kernels.slots import Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.triton.checks import check_heads, check_list, check_rows, check_units
from vllm_kvretrieval.kernels.triton.rows_codec import (
    WAYS,
    codes_of,
    element_at,
    encodable,
    ends_of,
    fit,
    rounded,
    scale_of,
    store_words,
)
from vllm_kvretrieval.kernels.triton.sparse_rows import (
    inner_ends,
    lay_outliers,
    list_outliers,
    lower_of,
    two_lowest,
)
from vllm_kvretrieval.retrieval.codec.quantised import Quantised
from vllm_kvretrieval.retrieval.codec.rows import Rows
from vllm_kvretrieval.retrieval.codec.sparse import Sparse, outlier_count

TILE = 4096
"""Codes in a tile: bytes that a program decodes at a time, at most."""
ENCODED = 2048
"""Elements that it encodes at a time, at most, which takes more registers."""
FOUND = 1024
"""Elements among which it finds outliers at a time."""
MOST_REGISTERS = 128
"""Of a thread that finds outliers: two programs have room on a multiprocessor."""
SHARING = 16
"""Programs that share the pages of a row and a KV head, where rows may have several tokens."""
WARPS = 8

_COUNTERS = tl.constexpr(len(Traffic))
_HELD = tl.constexpr(int(Traffic.HELD))


@triton.jit
def _open_page(opened, seat, page, head, kv_heads, RING: tl.constexpr, UNIT: tl.constexpr):
    """A page of a KV head in the ring of a seat."""
    place = (seat.to(tl.int64) * RING + page % RING) * kv_heads + head
    return opened + place * UNIT


@triton.jit
def _read_rows(
    new,
    stride,
    old,
    behind,
    first,
    row,
    element,
    mask,
    TRANSPOSED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Elements of rows of a page that a step has filled, float32; see :func:`_encode_rows`."""
    at = element_at(row[:, None], element[None, :], TRANSPOSED, HEAD_SIZE)
    if TRANSPOSED:
        token, channel = behind + element[None, :], row[:, None]
    else:
        token, channel = behind + row[:, None], element[None, :]
    x = tl.load(old + at, mask=mask & (token < 0), other=0.0).to(tl.float32)
    of_step = new + (first + token).to(tl.int64) * stride + channel
    of_step = tl.load(of_step, mask=mask & (token >= 0), other=0.0).to(tl.float32)
    return tl.where(token < 0, x, of_step)


@triton.jit
def _find_outliers(
    new,
    stride,
    old,
    to,
    behind,
    first,
    TRANSPOSED: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    ALL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Keep the list of the outliers of a page's rows; see :func:`list_outliers`.

    Args:
        new, stride, old, behind, first: See :func:`_encode_rows`.
        to: Where the list goes.
        ALL: Rows, rounded up to a power of two, of which ``AT_ONCE`` elements are read at a time.
    """
    row = tl.arange(0, ALL)
    known = row >= 0
    low = tl.full([ALL], float("inf"), tl.float32)
    low_place, low_next = tl.zeros([ALL], tl.int32), low
    high, high_place, high_next = low, low_place, low  # of the rows with the other sign
    for begin in tl.range(0, LENGTH, AT_ONCE):
        element = begin + tl.arange(0, AT_ONCE)
        mask = (row < ROWS)[:, None] & (element < LENGTH)[None, :]
        x = _read_rows(new, stride, old, behind, first, row, element, mask, TRANSPOSED, HEAD_SIZE)
        known = known & encodable(x, mask)
        of_tile, place, following = two_lowest(x, mask, element)
        low, low_place, low_next = lower_of(low, low_place, low_next, of_tile, place, following)
        of_tile, place, following = two_lowest(-x, mask, element)
        high, high_place, high_next = lower_of(
            high, high_place, high_next, of_tile, place, following
        )
    return list_outliers(
        known, low, low_place, low_next - low, -high, high_place, high_next - high, to,
        old.dtype.element_ty, COUNT, ROWS, LENGTH, ALL,
    )  # fmt: skip


@triton.jit
def _encode_rows(
    new,
    stride,
    old,
    words,
    codes,
    lists,
    behind,
    first,
    TRANSPOSED: tl.constexpr,
    WAY: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    ALL: tl.constexpr,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Encode the keys, or the values, of a page that a step has filled, in a KV head.

    Args:
        new, stride: The keys or values of the step in this head, and elements between tokens.
        old: The page in its ring, with its tokens from before the step.
        words, codes, lists: Where the words, the codes, and the list of outliers go.
        behind: Tokens of the step before the page's first one; negative: the page has as many
            from before the step.
        first: The place in the batch of the row's first token.
        COUNT: Outliers of the rows.
    """
    TOGETHER: tl.constexpr = 8 // BITS
    APART: tl.constexpr = ROWS // TOGETHER
    element = tl.arange(0, WIDTH)
    if COUNT:
        bar, last = _find_outliers(
            new, stride, old, lists, behind, first, TRANSPOSED, COUNT, ROWS, LENGTH, ALL, AT_ONCE,
            HEAD_SIZE,
        )  # fmt: skip
    for begin in tl.range(0, APART, TALL):
        line = begin + tl.arange(0, TALL)
        mask = (line < APART)[:, None] & (element < LENGTH)[None, :]
        data = tl.zeros([TALL, WIDTH], tl.int32)
        for part in tl.static_range(TOGETHER):
            row = line + part * APART
            x = _read_rows(
                new, stride, old, behind, first, row, element, mask, TRANSPOSED, HEAD_SIZE
            )
            known = encodable(x, mask)
            low, high = ends_of(x, mask)
            if COUNT:
                low, high = inner_ends(x, mask, row, element, known, low, high, bar, last)
            step, base, word, second = fit(low, high, known, WAY, LEVELS)
            store_words(words, row, word, second, line < APART, WAY)
            data |= codes_of(x, step, base, known, LEVELS) << (BITS * part)
        to = codes + line[:, None] * LENGTH + element[None, :]
        tl.store(to, data.to(tl.uint8), mask=mask)


@triton.jit
def _write_open_kernel(
    key,
    value,
    units,
    opened,
    seats,
    query_start,
    seq_lens,
    slot_mapping,
    block_table,
    held,
    traffic,
    key_stride,
    value_stride,
    table_stride,
    kv_heads,
    capacity,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    SLOTS: tl.constexpr,
    UNIT: tl.constexpr,  # bytes, as are the next three
    VALUE_WORDS: tl.constexpr,
    KEY_CODES: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_WAY: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_LEVELS: tl.constexpr,
    KEY_TALL: tl.constexpr,
    KEY_LIST: tl.constexpr,
    KEY_COUNT: tl.constexpr,
    VALUE_WAY: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_LEVELS: tl.constexpr,
    VALUE_TALL: tl.constexpr,
    VALUE_LIST: tl.constexpr,
    VALUE_COUNT: tl.constexpr,
    FOUND: tl.constexpr,
):
    row = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    share = tl.program_id(1)
    seat = tl.load(seats + row)
    first = tl.load(query_start + row)
    tokens = tl.load(query_start + row + 1) - first
    if (seat < 0) | (tokens <= 0):
        return
    if tl.load(slot_mapping + first) < 0:
        return
    after = tl.load(seq_lens + row)
    before = after - tokens
    key += head * HEAD_SIZE
    value += head * HEAD_SIZE
    table = block_table + row.to(tl.int64) * table_stride
    SIZE: tl.constexpr = PAGE * 2 * HEAD_SIZE
    for page in tl.range(before // PAGE + share, after // PAGE, tl.num_programs(1)):
        unit = units + (tl.load(table + page).to(tl.int64) * kv_heads + head) * UNIT
        old = _open_page(opened, seat, page, head, kv_heads, RING, SIZE)
        behind = page * PAGE - before
        words = unit.to(tl.pointer_type(tl.uint16), bitcast=True)
        _encode_rows(
            key, key_stride, old, words, unit + KEY_CODES, unit + KEY_LIST, behind, first,
            True, KEY_WAY, KEY_BITS, KEY_LEVELS, KEY_COUNT, HEAD_SIZE, PAGE, DIMS, PAGE, KEY_TALL,
            FOUND // DIMS, HEAD_SIZE,
        )  # fmt: skip
        words = (unit + VALUE_WORDS).to(tl.pointer_type(tl.uint16), bitcast=True)
        _encode_rows(
            value, value_stride, old, words, unit + VALUE_CODES, unit + VALUE_LIST, behind, first,
            False, VALUE_WAY, VALUE_BITS, VALUE_LEVELS, VALUE_COUNT, PAGE, HEAD_SIZE, PAGE, DIMS,
            VALUE_TALL, FOUND // PAGE, HEAD_SIZE,
        )  # fmt: skip
    if (tokens > 1) | (share > 0):
        return
    page = before // PAGE
    dims = tl.arange(0, DIMS)
    of_token = dims < HEAD_SIZE
    to = _open_page(opened, seat, page, head, kv_heads, RING, SIZE)
    to += before % PAGE * (2 * HEAD_SIZE) + dims
    k = tl.load(key + first.to(tl.int64) * key_stride + dims, mask=of_token)
    tl.store(to, k, mask=of_token)
    v = tl.load(value + first.to(tl.int64) * value_stride + dims, mask=of_token)
    tl.store(to + HEAD_SIZE, v, mask=of_token)
    closed = page - RING
    if (before % PAGE == 0) & (closed >= 0):
        slot = tl.arange(0, SLOTS)
        at = held + (seat * kv_heads + head) * capacity + slot
        there = tl.load(at, mask=slot < capacity, other=-1) == closed
        tl.store(at, tl.full([SLOTS], -1, tl.int32), mask=there)
        gone = -tl.sum(there.to(tl.int32), 0)
        tl.atomic_add(traffic + seat * _COUNTERS + _HELD, gone.to(tl.int64), sem="relaxed")


@triton.jit
def _keep_open_kernel(
    key,
    value,
    opened,
    seats,
    query_start,
    seq_lens,
    slot_mapping,
    key_stride,
    value_stride,
    kv_heads,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    TALL: tl.constexpr,
):
    row = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    seat = tl.load(seats + row)
    first = tl.load(query_start + row)
    tokens = tl.load(query_start + row + 1) - first
    if (seat < 0) | (tokens <= 1):
        return
    if tl.load(slot_mapping + first) < 0:
        return
    after = tl.load(seq_lens + row)
    before = after - tokens
    begin = tl.maximum(before, (after // PAGE - (RING - 1)) * PAGE)
    dims = tl.arange(0, DIMS)
    for start in tl.range(begin + tl.program_id(1) * TALL, after, tl.num_programs(1) * TALL):
        token = start + tl.arange(0, TALL)
        mask = (token < after)[:, None] & (dims < HEAD_SIZE)[None, :]
        at = (first + token - before).to(tl.int64)[:, None]
        read = head * HEAD_SIZE + dims[None, :]
        place = (seat.to(tl.int64) * RING + token // PAGE % RING) * kv_heads + head
        to = opened + (place * PAGE + token % PAGE)[:, None] * (2 * HEAD_SIZE) + dims[None, :]
        tl.store(to, tl.load(key + at * key_stride + read, mask=mask), mask=mask)
        v = tl.load(value + at * value_stride + read, mask=mask)
        tl.store(to + HEAD_SIZE, v, mask=mask)


@triton.jit
def _decode_rows(
    words,
    codes,
    lists,
    open_page,
    is_open,
    to,
    begin,
    TRANSPOSED: tl.constexpr,
    WAY: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    ALL: tl.constexpr,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Decode rows of a unit, or copy them from an open page.

    Args:
        words, codes, lists: Those of the unit's rows of keys, or of values.
        open_page: The page in its ring, if it ``is_open``.
        to: The unit that is written.
        begin: The first of the rows that share bytes with ``TALL`` others.
        COUNT: Outliers of all of the unit's rows.
        ALL: These rows, rounded up to a power of two.
    """
    TOGETHER: tl.constexpr = 8 // BITS
    APART: tl.constexpr = ROWS // TOGETHER
    element = tl.arange(0, WIDTH)
    line = begin + tl.arange(0, TALL)
    mask = (line < APART)[:, None] & (element < LENGTH)[None, :]
    if is_open:
        for part in tl.static_range(TOGETHER):
            row = line + part * APART
            at = element_at(row[:, None], element[None, :], TRANSPOSED, HEAD_SIZE)
            tl.store(to + at, tl.load(open_page + at, mask=mask), mask=mask)
    else:
        read = codes + line[:, None] * LENGTH + element[None, :]
        data = tl.load(read, mask=mask, other=0).to(tl.int32)
        for part in tl.static_range(TOGETHER):
            row = line + part * APART
            step, base = scale_of(words, row, line < APART, WAY, LEVELS)
            code = (data >> (BITS * part)) & ((1 << BITS) - 1)
            x = code.to(tl.float32) * step[:, None] + base[:, None]
            at = element_at(row[:, None], element[None, :], TRANSPOSED, HEAD_SIZE)
            tl.store(to + at, rounded(x, to.dtype.element_ty), mask=mask)
        if COUNT:
            tl.debug_barrier()
            lay_outliers(
                lists, to, begin, TRANSPOSED, COUNT, ROWS, LENGTH, ALL, APART, TALL, HEAD_SIZE
            )


@triton.jit
def _decode_part(
    unit,
    open_page,
    is_open,
    to,
    part,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    KEY_CODES: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_WAY: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_LEVELS: tl.constexpr,
    KEY_TALL: tl.constexpr,
    KEY_LIST: tl.constexpr,
    KEY_COUNT: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    VALUE_WAY: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_LEVELS: tl.constexpr,
    VALUE_TALL: tl.constexpr,
    VALUE_LIST: tl.constexpr,
    VALUE_COUNT: tl.constexpr,
):
    """One part of a unit: some rows of its keys, or of its values."""
    if part < KEY_PARTS:
        words = unit.to(tl.pointer_type(tl.uint16), bitcast=True)
        _decode_rows(
            words, unit + KEY_CODES, unit + KEY_LIST, open_page, is_open, to, part * KEY_TALL,
            True, KEY_WAY, KEY_BITS, KEY_LEVELS, KEY_COUNT, HEAD_SIZE, PAGE, DIMS, PAGE, KEY_TALL,
            HEAD_SIZE,
        )  # fmt: skip
    else:
        words = (unit + VALUE_WORDS).to(tl.pointer_type(tl.uint16), bitcast=True)
        _decode_rows(
            words, unit + VALUE_CODES, unit + VALUE_LIST, open_page, is_open, to,
            (part - KEY_PARTS) * VALUE_TALL,
            False, VALUE_WAY, VALUE_BITS, VALUE_LEVELS, VALUE_COUNT, PAGE, HEAD_SIZE, PAGE, DIMS,
            VALUE_TALL, HEAD_SIZE,
        )  # fmt: skip


@triton.jit
def _recall_encoded_kernel(
    units,
    opened,
    open_from,
    slots,
    held,
    sources,
    targets,
    count,
    kv_heads,
    capacity,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    KEY_CODES: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_WAY: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_LEVELS: tl.constexpr,
    KEY_TALL: tl.constexpr,
    KEY_LIST: tl.constexpr,
    KEY_COUNT: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    VALUE_WAY: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_LEVELS: tl.constexpr,
    VALUE_TALL: tl.constexpr,
    VALUE_LIST: tl.constexpr,
    VALUE_COUNT: tl.constexpr,
):
    SIZE: tl.constexpr = PAGE * 2 * HEAD_SIZE
    work = tl.load(count) * PARTS
    for item in tl.range(tl.program_id(0), work, tl.num_programs(0)):
        source = tl.load(sources + item // PARTS).to(tl.int64)
        target = tl.load(targets + item // PARTS)
        page = tl.load(held + target)
        seat = target // capacity // kv_heads
        head = target // capacity % kv_heads
        _decode_part(
            units + source * UNIT,
            _open_page(opened, seat, page, head, kv_heads, RING, SIZE),
            page >= tl.load(open_from + seat),
            slots + target.to(tl.int64) * SIZE,
            item % PARTS,
            HEAD_SIZE, DIMS, PAGE, VALUE_WORDS, KEY_CODES, VALUE_CODES,
            KEY_WAY, KEY_BITS, KEY_LEVELS, KEY_TALL, KEY_LIST, KEY_COUNT, KEY_PARTS,
            VALUE_WAY, VALUE_BITS, VALUE_LEVELS, VALUE_TALL, VALUE_LIST, VALUE_COUNT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _stage_encoded_kernel(
    units,
    opened,
    open_from,
    buffer,
    block_table,
    lengths,
    starts,
    seats,
    rows,
    table_stride,
    kv_heads,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    KEY_CODES: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    KEY_WAY: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_LEVELS: tl.constexpr,
    KEY_TALL: tl.constexpr,
    KEY_LIST: tl.constexpr,
    KEY_COUNT: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    VALUE_WAY: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_LEVELS: tl.constexpr,
    VALUE_TALL: tl.constexpr,
    VALUE_LIST: tl.constexpr,
    VALUE_COUNT: tl.constexpr,
):
    SIZE: tl.constexpr = PAGE * 2 * HEAD_SIZE
    for row in tl.range(rows):
        seat = tl.load(seats + row)
        start = tl.load(starts + row).to(tl.int64)
        from_page = tl.load(open_from + seat)
        work = tl.cdiv(tl.load(lengths + row), PAGE) * kv_heads * PARTS
        pages = block_table + tl.cast(row, tl.int64) * table_stride
        for item in tl.range(tl.program_id(0), work, tl.num_programs(0)):
            page = item // PARTS // kv_heads
            head = item // PARTS % kv_heads
            source = tl.load(pages + page).to(tl.int64) * kv_heads + head
            _decode_part(
                units + source * UNIT,
                _open_page(opened, seat, page, head, kv_heads, RING, SIZE),
                page >= from_page,
                buffer + ((start + page) * kv_heads + head) * SIZE,
                item % PARTS,
                HEAD_SIZE, DIMS, PAGE, VALUE_WORDS, KEY_CODES, VALUE_CODES,
                KEY_WAY, KEY_BITS, KEY_LEVELS, KEY_TALL, KEY_LIST, KEY_COUNT, KEY_PARTS,
                VALUE_WAY, VALUE_BITS, VALUE_LEVELS, VALUE_TALL, VALUE_LIST, VALUE_COUNT,
            )  # fmt: skip


def write_open(
    key: torch.Tensor,
    value: torch.Tensor,
    rows: DeviceRows,
    store: EncodedUnits,
    residency: Residency,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.write_open`.

    One program per (row, KV head) where each row has a token; else ``SHARING``.

    Raises:
        ValueError: A tensor's dtype or shape is not that of the signature, or there is no kernel
            for the codec.
    """
    seats, ring, kv_heads, page, head_size = check_written(key, value, rows, store)
    capacity = residency.held.shape[2]
    check_list("held", residency.held, (seats, kv_heads, capacity), torch.int32)
    check_list("traffic", residency.traffic, (seats, len(Traffic)), torch.int64)
    if len(rows) == 0:
        return
    layout = _layout(store, encodes=True)
    _write_open_kernel[(len(rows) * kv_heads, 1 if len(key) == len(rows) else SHARING)](
        key,
        value,
        store.units,
        store.open,
        rows.seats,
        rows.query_start,
        rows.seq_lens,
        rows.slot_mapping,
        rows.block_table,
        residency.held,
        residency.traffic,
        key.stride(0),
        value.stride(0),
        rows.block_table.stride(0),
        kv_heads,
        capacity,
        HEAD_SIZE=head_size,
        DIMS=triton.next_power_of_2(head_size),
        PAGE=page,
        RING=ring,
        SLOTS=triton.next_power_of_2(capacity),
        UNIT=store.units.shape[2],
        **{name: layout[name] for name in layout if not name.endswith("PARTS")},
        FOUND=FOUND,
        num_warps=WARPS,
        **({"maxnreg": MOST_REGISTERS} if layout["KEY_COUNT"] else {}),
    )


def keep_open(
    key: torch.Tensor, value: torch.Tensor, rows: DeviceRows, store: EncodedUnits
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.keep_open`.

    ``SHARING`` programs per (row, KV head).

    Raises:
        ValueError: See :func:`write_open`.
    """
    _, ring, kv_heads, page, head_size = check_written(key, value, rows, store)
    if len(rows) == 0:
        return
    dims = triton.next_power_of_2(head_size)
    _keep_open_kernel[(len(rows) * kv_heads, SHARING)](
        key,
        value,
        store.open,
        rows.seats,
        rows.query_start,
        rows.seq_lens,
        rows.slot_mapping,
        key.stride(0),
        value.stride(0),
        kv_heads,
        HEAD_SIZE=head_size,
        DIMS=dims,
        PAGE=page,
        RING=ring,
        TALL=min(TILE // dims, page),
        num_warps=WARPS,
    )


def recall_encoded(
    store: EncodedUnits,
    slots: torch.Tensor,
    residency: Residency,
    recalls: Recalls,
    *,
    programs: int = 16,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.recall_encoded`.

    A persistent grid: the programs share out the listed units, some rows of which each decodes at
    a time.

    Raises:
        ValueError: See :func:`write_open`.
    """
    seats, ring, kv_heads, page, head_size = _check_store(store)
    capacity = residency.held.shape[2]
    check_units("slots", slots, store.open.dtype)
    check_list("held", residency.held, (seats, kv_heads, capacity), torch.int32)
    check_list("sources", recalls.sources, (len(recalls.sources),), torch.int32)
    check_list("targets", recalls.targets, (len(recalls.sources),), torch.int32)
    check_list("count", recalls.count, (1,), torch.int32)
    if slots.shape != (residency.held.numel(), page, 2 * head_size):
        raise ValueError(f"slots of {list(slots.shape)} do not fit pages of {[page, head_size]}")
    _recall_encoded_kernel[(programs,)](
        store.units,
        store.open,
        store.first,
        slots,
        residency.held,
        recalls.sources,
        recalls.targets,
        recalls.count,
        kv_heads,
        capacity,
        HEAD_SIZE=head_size,
        DIMS=triton.next_power_of_2(head_size),
        PAGE=page,
        RING=ring,
        UNIT=store.units.shape[2],
        **_layout(store),
        num_warps=WARPS,
    )


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
    """See :meth:`vllm_kvretrieval.kernels.encoded.EncodedOps.stage_encoded`.

    The programs share out the pages of each context, some rows of which each decodes at a time.

    Raises:
        ValueError: See :func:`write_open`.
    """
    _, ring, kv_heads, page, head_size = _check_store(store)
    check_units("buffer", buffer, store.open.dtype)
    for name, numbers in (("lengths", lengths), ("starts", starts), ("seats", seats)):
        check_list(name, numbers, (len(lengths),), torch.int32)
    if buffer.shape[1:] != store.open.shape[2:]:
        raise ValueError(
            f"pages of {list(store.open.shape[2:])} do not fit {list(buffer.shape[1:])}"
        )
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError(f"block_table must be int32 with contiguous rows, got {block_table.dtype}")
    _stage_encoded_kernel[(programs,)](
        store.units,
        store.open,
        store.first,
        buffer,
        block_table,
        lengths,
        starts,
        seats,
        len(lengths),
        block_table.stride(0),
        kv_heads,
        HEAD_SIZE=head_size,
        DIMS=triton.next_power_of_2(head_size),
        PAGE=page,
        RING=ring,
        UNIT=store.units.shape[2],
        **_layout(store),
        num_warps=WARPS,
    )


def _check_store(store: EncodedUnits) -> tuple[int, int, int, int, int]:
    """Refuse a cache that is not of its description; returns its seats, pages of a ring, KV heads,
    tokens of a page and channels of a head."""
    if not isinstance(store.codec, Quantised):
        raise ValueError(f"there is no kernel for codec={store.codec.name}")
    check_units("open", store.open, store.open.dtype)
    seats, ring, kv_heads, page, row = store.open.shape
    nbytes = store.codec.unit_bytes(page, row // 2, store.open.dtype)
    check_list("units", store.units, (len(store.units), kv_heads, nbytes), torch.uint8)
    check_list("first", store.first, (seats,), torch.int32)
    return seats, ring, kv_heads, page, row // 2


def check_written(
    key: torch.Tensor, value: torch.Tensor, rows: DeviceRows, store: EncodedUnits
) -> tuple[int, int, int, int, int]:
    """The same, and tokens that are not of the cache's heads."""
    sizes = _check_store(store)
    check_heads("key", key, sizes[-1], store.open.dtype)
    check_heads("value", value, sizes[-1], store.open.dtype)
    check_rows(rows)
    return sizes


def _layout(store: EncodedUnits, *, encodes: bool = False) -> dict[str, Any]:
    """Where the parts of a unit begin, and how its rows are encoded, and divided into tiles, to be
    decoded or to be encoded."""
    codec, (page, row) = store.codec, store.open.shape[3:]
    assert isinstance(codec, Quantised)
    head_size = row // 2
    key_words, value_words, key_codes, value_codes = codec.parts(page, head_size)
    dense, sizes = key_words + value_words + key_codes + value_codes, (head_size, page)
    sparse = isinstance(codec, Sparse)
    key_count, value_count = (outlier_count(*of) if sparse else 0 for of in (sizes, sizes[::-1]))
    keys = _of_rows("KEY", codec.keys, head_size, page, encodes)
    values = _of_rows("VALUE", codec.values, page, head_size, encodes)
    return {
        **keys,
        **{name: number for name, number in values.items() if name != "VALUE_PARTS"},
        "VALUE_WORDS": key_words,
        "KEY_CODES": key_words + value_words,
        "VALUE_CODES": key_words + value_words + key_codes,
        "KEY_LIST": dense,
        "KEY_COUNT": key_count,
        "VALUE_LIST": dense + key_count * (2 + store.open.element_size()),
        "VALUE_COUNT": value_count,
        "PARTS": keys["KEY_PARTS"] + values["VALUE_PARTS"],
    }


def _of_rows(name: str, rows: Rows, count: int, length: int, encodes: bool) -> dict[str, int]:
    """How so many rows of a length are encoded, and divided into parts."""
    apart = count * rows.bits // 8
    tile = ENCODED * rows.bits // 8 if encodes else TILE
    tall = min(tile // triton.next_power_of_2(length), triton.next_power_of_2(apart))
    return {
        f"{name}_WAY": WAYS[type(rows)],
        f"{name}_BITS": rows.bits,
        f"{name}_LEVELS": rows.levels,
        f"{name}_TALL": tall,
        f"{name}_PARTS": -(-apart // tall),
    }
