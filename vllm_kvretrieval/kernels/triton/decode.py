"""Sparse decode attention over slots, split over the list and merged by log-sum-exp."""

import math

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.slots import DecodeWorkspace, Origins
from vllm_kvretrieval.kernels.triton.checks import check_heads, check_list, check_units

LOG2_E = tl.constexpr(math.log2(math.e))
MEMBERS = 16
"""Query heads of a tile, of all queries of a row: the fewest rows that tensor cores multiply."""
TILE_ELEMENTS = 8192
"""Elements of keys, and as many of values, that a program takes at a time."""
SPLITS_PER_UNIT = 2
"""Programs per multiprocessor, where there are few lists."""
LEAST_TILES = 4
"""Tiles of a part of the longest lists: parts of fewer cost more to merge than they save."""
MERGED_ELEMENTS = 8192
"""Elements of parts that are merged at a time: reads of all of them are on their way together."""
LEAST_MERGED = 4
"""Parts that are merged at a time, at least."""


@triton.jit
def _members_of(
    member, dims, first_head, queries,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
):  # fmt: skip
    """What the members of a tile are: one query after the other, each by its heads.

    Returns:
        Whether there is such a member; its query, and its head; whether there is an element of it,
        and its place in a query.
    """
    query_of = member // HEADS
    there = (member < GROUP) & (query_of < queries)
    head = first_head + member % HEADS
    mask = there[:, None] & (dims < HEAD_SIZE)[None, :]
    return there, query_of, head, mask, head[:, None] * HEAD_SIZE + dims[None, :]


@triton.jit
def _merge_parts(
    outs, lses, first_part, member, dims, there, mask,
    SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a row by log-sum-exp, in their order.

    The first of them are read together with all log-sum-exps, before these are waited for.

    Args:
        outs, lses: float32; outputs and log-sum-exps to base 2 of all parts.
        first_part: Number of the row's first part.
        member, dims, there, mask: See :func:`_members_of`.

    Returns:
        float32: the highest log-sum-exps, sums of exponentials over them, and of outputs by these.
    """
    all_parts = (first_part + tl.arange(0, SPLITS))[:, None] * GROUP + member[None, :]
    all_lse = tl.load(lses + all_parts, mask=there[None, :], other=0.0, cache_modifier=".cg")
    for first in tl.static_range(0, SPLITS, AT_ONCE):
        part = (first_part + first + tl.arange(0, AT_ONCE))[:, None] * GROUP + member[None, :]
        result = tl.load(
            outs + part[:, :, None] * HEAD_SIZE + dims[None, None, :],
            mask=mask[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        lse = tl.load(lses + part, mask=there[None, :], other=0.0, cache_modifier=".cg")
        if first == 0:
            best = tl.max(all_lse, 0)
            reference = tl.where(best == float("-inf"), 0.0, best)
            total = tl.sum(tl.exp2(all_lse - reference[None, :]), 0)
        weighted = tl.sum(result * tl.exp2(lse - reference[None, :])[:, :, None], 0)
        if first == 0:
            acc = weighted
        else:
            acc += weighted
    return best, total, acc


@triton.jit
def _sparse_decode_kernel(
    query,
    slots,
    slot_lists,
    lengths,
    out,
    lse,
    partial_out,
    partial_lse,
    arrivals,
    sinks,
    query_start,
    scored,
    home,
    origins,
    scale,  # of scores for exponentials to base 2; with a cap, of twice a score over the cap
    cap,  # for exponentials to base 2
    query_stride,
    list_stride,
    out_stride,
    kv_heads,
    most,  # tokens of a list whose scores are written
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,  # of all queries of a row
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    MEMBERS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    HELD: tl.constexpr,  # members that parts are merged for, a power of two
    AT_ONCE: tl.constexpr,
    FAR: tl.constexpr,  # whether some pages are read from the home, and written to their slots
    BEYOND: tl.constexpr,  # whether some have no slot
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    SCORED: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    HEADS: tl.constexpr = GROUP // QUERIES
    request = (row // kv_heads).to(tl.int64)
    members = tl.arange(0, MEMBERS)
    dims = tl.arange(0, DIMS)
    in_head = dims < HEAD_SIZE
    queries = 1
    if QUERIES > 1:
        first_query = tl.load(query_start + request)
        queries = tl.load(query_start + request + 1) - first_query
        request = first_query.to(tl.int64)
    first_head = row % kv_heads * HEADS
    in_group, query_of, head, head_mask, head_offsets = _members_of(
        members, dims, first_head, queries, HEADS, GROUP, HEAD_SIZE
    )
    of_query = query + (request + query_of)[:, None] * query_stride
    q = tl.load(of_query + head_offsets, mask=head_mask, other=0.0)

    length = tl.load(lengths + row)
    if length < 0:
        return
    seen = length - (queries - 1 - query_of)
    tiles = tl.cdiv(length, TILE)
    per_split = tl.cdiv(tiles, SPLITS)
    first = split * per_split
    last = tl.minimum(first + per_split, tiles)

    best = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    acc = tl.zeros([MEMBERS, DIMS], tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        tokens = tile * TILE + tl.arange(0, TILE)
        valid = tokens < length
        place = row.to(tl.int64) * list_stride + tokens // PAGE
        slot = tl.load(slot_lists + place, mask=valid, other=0).to(tl.int64)
        to = slots + (slot * PAGE + tokens % PAGE) * (2 * HEAD_SIZE)
        at = to
        if FAR:
            origin = tl.load(origins + place, mask=valid, other=-1)
            missing = origin >= 0
            away = home + (origin.to(tl.int64) * PAGE + tokens % PAGE) * (2 * HEAD_SIZE)
            at = tl.multiple_of(tl.where(missing, away, to), 16)
        k = tl.load(at[None, :] + dims[:, None], mask=valid[None, :] & in_head[:, None], other=0.0)
        if FAR:
            keeps = missing
            if BEYOND:
                keeps = missing & (slot >= 0)
            tl.store(to[None, :] + dims[:, None], k, mask=keeps[None, :] & in_head[:, None])
        scores = tl.dot(q, k, out_dtype=tl.float32) * scale
        if CAPPED:  # the hyperbolic tangent, by its exponential
            scores = cap - 2 * cap / (1 + tl.exp2(scores))
        if SCORED:
            of_row = row.to(tl.int64) * GROUP + members
            written = in_group[:, None] & (valid & (tokens < most))[None, :]
            to_scores = scored + of_row[:, None] * most + tokens[None, :]
            tl.store(to_scores, scores / LOG2_E, mask=written)
        visible = valid[None, :]
        if QUERIES > 1:
            visible = tokens[None, :] < seen[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        base = new_best
        if QUERIES > 1:  # a query may see nothing of a part
            base = tl.where(new_best == float("-inf"), 0.0, new_best)
        decay = tl.exp2(best - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(
            at[:, None] + HEAD_SIZE + dims[None, :],
            mask=valid[:, None] & in_head[None, :],
            other=0.0,
        )
        if FAR:
            of_value = to[:, None] + HEAD_SIZE + dims[None, :]
            tl.store(of_value, v, mask=keeps[:, None] & in_head[None, :])
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, out_dtype=tl.float32)
        best = new_best

    if SPLITS > 1:
        partial = (row * SPLITS + split).to(tl.int64) * GROUP + members
        partial_offsets = partial[:, None] * HEAD_SIZE + dims[None, :]
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(partial_lse + partial, best + tl.log2(total), mask=in_group)
        tl.store(partial_out + partial_offsets, result, mask=head_mask)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.store(arrivals + row, 0)
        members = tl.arange(0, HELD)
        in_group, query_of, head, head_mask, head_offsets = _members_of(
            members, dims, first_head, queries, HEADS, GROUP, HEAD_SIZE
        )
        best, total, acc = _merge_parts(
            partial_out, partial_lse, row.to(tl.int64) * SPLITS, members, dims, in_group,
            head_mask, SPLITS, AT_ONCE, GROUP, HEAD_SIZE,
        )  # fmt: skip
    if SINKS:  # a score without a value
        sink = tl.load(sinks + head, mask=in_group, other=0.0).to(tl.float32)
        sink *= LOG2_E
        new_best = tl.maximum(best, sink)
        decay = tl.exp2(best - new_best)
        total = total * decay + tl.exp2(sink - new_best)
        acc = acc * decay[:, None]
        best = new_best
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    result_lse = best + tl.log2(total)
    to = out + (request + query_of)[:, None] * out_stride
    tl.store(to + head_offsets, result.to(out.dtype.element_ty), mask=head_mask)
    tl.store(lse + row.to(tl.int64) * GROUP + members, result_lse / LOG2_E, mask=in_group)


def count_splits(rows: int, multiprocessors: int, tokens: int, head_size: int) -> int:
    """Parts to attend to each list in: a power of two.

    Every multiprocessor gets about two programs, if that leaves each ``LEAST_TILES`` tiles.

    Args:
        rows: Lists.
        multiprocessors: The device's multiprocessors.
        tokens: The most that a list has.
        head_size: Channels of a key.
    """
    tiles = -(-tokens * triton.next_power_of_2(head_size) // TILE_ELEMENTS)
    wanted = min(SPLITS_PER_UNIT * multiprocessors // rows, tiles // LEAST_TILES)
    return 1 << max(0, wanted.bit_length() - 1)


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
    tile_elements: int = TILE_ELEMENTS,
    stages: int = 5,
    warps: int = 4,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.sparse_decode`.

    Each program takes ``1 / workspace.splits`` of a row's tiles; the one that finishes a row last
    merges its parts, so there is no second launch. Besides what the signature counts, ``4 * group *
    head_size`` bytes per part are written and read again. Tiles are on their way before they are
    used, whether they come from slots or over the bus; with five stages two of them.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature, or a KV head
            has more than 16 query heads, those of all queries of a row counted.
    """
    (rows, group), (_, page, row) = lse.shape, slots.shape
    head_size = row // 2
    kv_heads = query.shape[1] * queries // group
    check_units("slots", slots, query.dtype)
    check_heads("query", query, head_size, query.dtype)
    check_heads("out", out, head_size, query.dtype)
    check_list("slot_lists", slot_lists, (rows, slot_lists.shape[1]), torch.int32)
    check_list("lengths", lengths, (rows,), torch.int32)
    check_list("lse", lse, (rows, group), torch.float32)
    if not 1 <= group <= MEMBERS:
        raise ValueError(
            f"{group} query heads per KV head, of all queries: 1 to {MEMBERS} are supported"
        )
    if queries > 1:
        if starts is None:
            raise ValueError(f"rows of {queries} queries need to know where these start")
        check_list("starts", starts, (rows // kv_heads + 1,), torch.int32)
    if workspace.out.shape[0] < rows or workspace.out.shape[2:] != (group, head_size):
        raise ValueError(
            f"the workspace {list(workspace.out.shape)} is not for {rows} rows of {group} heads of "
            f"size {head_size}"
        )
    if sinks is not None and (sinks.shape != query.shape[1:2] or not sinks.is_contiguous()):
        raise ValueError(
            f"sinks must be [{query.shape[1]}], contiguous, got {list(sinks.shape)} with strides "
            f"{sinks.stride()}"
        )
    if scores is not None:
        check_list("scores", scores, (rows, group, scores.shape[2]), torch.float32)
        if queries > 1:
            raise ValueError(f"scores are of rows of one query, and these have {queries}")
    if origins is not None:
        check_units("origins.home", origins.home, query.dtype)
        of_home, width = origins.home.shape[2:]
        if of_home % page or width != row:
            raise ValueError(
                f"units of {list(origins.home.shape[2:])} do not fit {list(slots.shape[1:])}"
            )
        if (origins.home.data_ptr() | slots.data_ptr()) % 16:
            raise ValueError("slots and origins.home must begin at multiples of 16 bytes")
        units, listed = origins.units, slot_lists.shape[1]
        check_list("origins.units", units, (max(len(units), rows), listed), torch.int32)
    if rows == 0:
        return
    dims = triton.next_power_of_2(head_size)
    held = triton.next_power_of_2(group)
    merged = max(MERGED_ELEMENTS // (held * dims), LEAST_MERGED)
    _sparse_decode_kernel[(rows, workspace.splits)](
        query,
        slots,
        slot_lists,
        lengths,
        out,
        lse,
        workspace.out,
        workspace.lse,
        workspace.arrivals,
        lse if sinks is None else sinks,
        lengths if starts is None else starts,
        lse if scores is None else scores,
        slots if origins is None else origins.home,
        slot_lists if origins is None else origins.units,
        scale * LOG2_E.value * (2 / softcap if softcap else 1),
        softcap * LOG2_E.value,
        query.stride(0),
        slot_lists.stride(0),
        out.stride(0),
        kv_heads,
        0 if scores is None else scores.shape[2],
        QUERIES=queries,
        GROUP=group,
        HEAD_SIZE=head_size,
        PAGE=page,
        MEMBERS=MEMBERS,
        DIMS=dims,
        TILE=tile_elements // dims,
        SPLITS=workspace.splits,
        HELD=held,
        AT_ONCE=min(merged, workspace.splits),
        FAR=origins is not None,
        BEYOND=origins is not None and origins.beyond,
        SINKS=sinks is not None,
        CAPPED=softcap > 0,
        SCORED=scores is not None,
        STAGES=stages,
        num_warps=warps,
        enable_fp_fusion=True,
    )
