"""Which rows of a step attend to a selection, found out on the device."""

import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import COLUMNS, Column, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.triton.checks import check_requests, check_rows

_COLUMNS = tl.constexpr(COLUMNS)
_SINK = tl.constexpr(int(Column.SINK))
_WINDOW = tl.constexpr(int(Column.WINDOW))
_SELECT = tl.constexpr(int(Column.SELECT))
_CHOOSER = tl.constexpr(int(Column.CHOOSER))
_EXACT = tl.constexpr(int(Column.EXACT))
_LAST_LEN = tl.constexpr(int(Column.LAST_LEN))


@triton.jit
def read_budget(table, seat, there):
    """The pages that a request attends to: at the beginning, at the end, and selected ones.

    Args:
        table: The table of running requests.
        seat: The request's.
        there: Whether to read it; else all are 0.
    """
    options = table + seat * _COLUMNS
    sink = tl.load(options + _SINK, mask=there, other=0)
    window = tl.load(options + _WINDOW, mask=there, other=0)
    return sink, window, tl.load(options + _SELECT, mask=there, other=0)


@triton.jit
def selecting(row, seats, certain, choosers, table, NUMBER: tl.constexpr, PAGE: tl.constexpr):
    """Whether a row selects by the method of a number; not if its context is within its budget."""
    own = tl.load(choosers + row) == NUMBER
    sink, window, select = read_budget(table, tl.load(seats + row), own)
    pages = tl.cdiv(tl.load(certain + row), PAGE)
    return own & (select > 0) & (pages > sink + window + select)


@triton.jit
def listed_token(table, token, there, head, kv_heads, PAGE: tl.constexpr, POSITIONS: tl.constexpr):
    """What stands in lists of tokens for some at positions of a context, in a KV head: these, or
    their numbers in the cache, by the context's ``table`` of pages."""
    if POSITIONS:
        number = token
    else:
        page = tl.load(table + token // PAGE, mask=there, other=0)
        number = (page * kv_heads + head) * PAGE + token % PAGE
    return number


@triton.jit(do_not_specialize=["least"])
def _prepare_kernel(
    seats,
    prefilling,
    query_start,
    seq_lens,
    slot_mapping,
    table,
    choosers,
    fresh,
    dense_lens,
    certain,
    least,
    PAGE: tl.constexpr,
    FAR: tl.constexpr,
):
    row = tl.program_id(0)
    seat = tl.load(seats + row)
    length = tl.load(seq_lens + row)
    first = tl.load(query_start + row)
    tokens = tl.load(query_start + row + 1) - first
    active = (seat >= 0) & (tokens > 0)
    active = active & (tl.load(prefilling + row) == 0)
    active = active & (tl.load(slot_mapping + first, mask=active, other=-1) >= 0)
    options = table + seat * _COLUMNS
    active = active & (tl.load(options + _EXACT, mask=active, other=1) == 0)
    sink, window, select = read_budget(table, seat, active)
    budget = sink + window + select
    listed = active
    known = length - tl.where(active, tokens - 1, 0)
    if not FAR:
        listed = listed & (tl.cdiv(known, PAGE) > budget) & (known >= least)
    chooser = tl.load(options + _CHOOSER, mask=listed, other=-1)
    last = tl.load(options + _LAST_LEN, mask=listed, other=0)
    since = tl.where(last == 0, 1, tl.where(tl.cdiv(last, PAGE) <= budget, 2, 0))
    tl.store(choosers + row, chooser)
    tl.store(fresh + row, tl.where(listed, since, 0))
    empty = listed
    if FAR:
        empty = empty | ((seat >= 0) & (tl.load(prefilling + row) != 0) & (tokens > 1))
    # FlashAttention 3 divides by the tokens of all rows, so the first row keeps one.
    tl.store(dense_lens + row, tl.where(empty, (row == 0).to(tl.int32), length))
    tl.store(certain + row, tl.where(listed, known, length))
    tl.store(options + _LAST_LEN, tl.where(listed, known, 0), mask=seat >= 0)


def prepare_rows(
    rows: DeviceRows,
    requests: DeviceRequests,
    page_size: int,
    *,
    least: int = 0,
    far: bool = False,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.prepare_rows`.

    One program per row. Bytes moved: less than 100 per row.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature.
    """
    check_rows(rows)
    check_requests(requests)
    if len(rows) == 0:
        return
    _prepare_kernel[(len(rows),)](
        rows.seats,
        rows.prefilling,
        rows.query_start,
        rows.seq_lens,
        rows.slot_mapping,
        requests.table,
        rows.choosers,
        rows.fresh,
        rows.dense_lens,
        rows.certain,
        least,
        PAGE=page_size,
        FAR=far,
        num_warps=1,
    )
