"""What a step drops of the tokens that are kept, by what they get of its attention."""

import torch
import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import DeviceRows
from vllm_kvretrieval.kernels.triton.checks import check_counts, check_list, check_rows
from vllm_kvretrieval.kernels.triton.decode import LOG2_E
from vllm_kvretrieval.kernels.types import KeptTokens
from vllm_kvretrieval.retrieval.keeping import RATINGS, STAMPED, Keeping

TILE = 1024
"""Tokens that a program rates, or moves, at a time."""
RECEIVING = 4
"""Programs that add up what the tokens of a row have received."""
WARPS = 8

_SUM, _LATEST, _STAMP, _POSITION = (tl.constexpr(number) for number in range(len(RATINGS)))
_NOWHERE = tl.constexpr(1 << 30)
"""Behind every list."""
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _received(
    scores,
    lse,
    row,
    head,
    place,
    total,
    most,
    kv_heads,
    PER_LAYER: tl.constexpr,
    HIGHEST: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
):
    """What tokens get of the attention of a KV head, or of all: of its query heads added up, or the
    most of any."""
    members = tl.arange(0, MEMBERS)
    in_group = members < GROUP
    there = in_group[:, None] & (place < total)[None, :]
    received = tl.zeros([TILE], tl.float32)
    first = head
    heads = 1
    if PER_LAYER:
        first = 0
        heads = kv_heads
    for number in tl.range(0, heads):
        of = (row * kv_heads + first + number).to(tl.int64) * GROUP + members
        score = tl.load(scores + of[:, None] * most + place[None, :], mask=there, other=0.0)
        whole = tl.load(lse + of, mask=in_group, other=0.0)
        weight = tl.where(there, tl.exp2((score - whole[:, None]) * LOG2_E), 0.0)
        if HIGHEST:
            received = tl.maximum(received, tl.max(weight, 0))
        else:
            received += tl.sum(weight, 0)
    return received


@triton.jit
def _receive_kernel(
    scores,
    lse,
    received,
    seats,
    counts,
    choosers,
    scored,
    counts_stride,
    kv_heads,
    NUMBER: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(choosers + row) != NUMBER:
        return
    seat = tl.load(seats + row).to(tl.int64)
    total = tl.load(counts + seat * counts_stride) + 1
    received += row.to(tl.int64) * scored
    for tile in tl.range(tl.program_id(1), tl.cdiv(total, TILE), tl.num_programs(1)):
        place = tile * TILE + tl.arange(0, TILE)
        of_heads = _received(
            scores, lse, row, 0, place, total, scored, kv_heads, True, False, GROUP, MEMBERS, TILE
        )
        tl.store(received + place, of_heads, mask=place < total)


@triton.jit
def _open_rating(chosen, ratings, place, there, sink, recent_from):
    """Positions and ratings of kept tokens; of those that do not leave the rating is infinity."""
    position = tl.load(chosen + place, mask=there, other=0)
    rating = tl.load(ratings + place, mask=there, other=0.0)
    spared = (position < sink) | (position >= recent_from)
    return position, tl.where(spared, _INFINITY, rating)


@triton.jit
def _drop_kernel(
    scores,
    lse,
    given,
    chosen,
    ratings,
    counts,
    budgets,
    seats,
    certain,
    choosers,
    scored,  # tokens of a list that have scores
    most,  # tokens that a KV head has room for
    counts_stride,
    budgets_stride,
    kv_heads,
    sink,
    recent,
    NUMBER: tl.constexpr,
    SHARE: tl.constexpr,
    PAGE: tl.constexpr,
    RATING: tl.constexpr,
    STAMPED: tl.constexpr,
    PER_LAYER: tl.constexpr,
    GIVEN: tl.constexpr,  # whether what tokens have received is given
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
):
    pair = tl.program_id(0)
    row = pair // kv_heads
    head = pair % kv_heads
    if tl.load(choosers + row) != NUMBER:
        return
    seat = tl.load(seats + row).to(tl.int64)
    last = tl.load(certain + row) - 1
    counts += seat * counts_stride + head
    count = tl.load(counts)
    budget = tl.load(budgets + seat * budgets_stride + head)
    chosen += (seat * kv_heads + head) * most
    ratings += (seat * kv_heads + head) * most
    total = count + 1  # the new token is the last of the list
    for tile in tl.range(0, tl.cdiv(total, TILE)):
        place = tile * TILE + tl.arange(0, TILE)
        kept = place < count
        rated = tl.load(ratings + place, mask=kept, other=0.0)
        if RATING == _POSITION:
            rated = tl.where(kept, rated, last.to(tl.float32))
        else:
            if GIVEN:
                of_row = given + row.to(tl.int64) * scored
                received = tl.load(of_row + place, mask=place < total, other=0.0)
            else:
                received = _received(
                    scores, lse, row, head, place, total, scored, kv_heads,
                    PER_LAYER, RATING == _STAMP and not PER_LAYER, GROUP, MEMBERS, TILE,
                )  # fmt: skip
            if RATING == _SUM:
                rated += received
            elif RATING == _LATEST:
                rated = received
            else:
                high = tl.maximum(rated, last.to(tl.float32))
                rated = tl.where(received > STAMPED, high, rated)
        tl.store(ratings + place, rated, mask=place < total)
        tl.store(chosen + place, last, mask=place == count)
    tl.debug_barrier()
    if total < budget:
        tl.store(counts, total)
        return

    share = (budget.to(tl.float64) * SHARE).to(tl.int32)
    recent_from = last + 1 - tl.minimum(tl.maximum(share, recent), tl.maximum(budget - sink, 0))
    least = _INFINITY
    victim = _NOWHERE
    behind = _NOWHERE  # the first page behind the sink
    final = 0  # the last page
    for tile in tl.range(0, tl.cdiv(total, TILE)):
        place = tile * TILE + tl.arange(0, TILE)
        begins = place < total
        position, best = _open_rating(chosen, ratings, place, begins, sink, recent_from)
        if PAGE > 1:
            page = position // PAGE
            after = begins & (place > 0)
            before = tl.load(chosen + place - 1, mask=after, other=0) // PAGE
            begins = begins & ((place == 0) | (before != page))
            for further in tl.range(1, PAGE):
                there = place + further < total
                other, rating = _open_rating(
                    chosen, ratings, place + further, there, sink, recent_from
                )
                same = there & (other // PAGE == page)
                best = tl.where(same, tl.maximum(best, rating), best)
        best = tl.where(begins, best, _INFINITY)
        lowest = tl.min(best, 0)
        found = tl.min(tl.where((best == lowest) & (best < _INFINITY), place, _NOWHERE), 0)
        victim = tl.where(lowest < least, found, victim)
        least = tl.minimum(lowest, least)
        open_ = begins & (position >= sink)
        behind = tl.minimum(behind, tl.min(tl.where(open_, place, _NOWHERE), 0))
        final = tl.maximum(final, tl.max(tl.where(begins, place, 0), 0))
    behind = tl.where(behind < _NOWHERE, behind, final)
    victim = tl.where(victim < _NOWHERE, victim, behind)  # where all are spared
    left = tl.maximum(total - PAGE, 0)
    for tile in tl.range(victim // TILE, tl.cdiv(left, TILE)):
        place = tile * TILE + tl.arange(0, TILE)
        moves = (place >= victim) & (place < left)
        position = tl.load(chosen + place + PAGE, mask=moves, other=0)
        rating = tl.load(ratings + place + PAGE, mask=moves, other=0.0)
        tl.debug_barrier()
        tl.store(chosen + place, position, mask=moves)
        tl.store(ratings + place, rating, mask=moves)
    tl.store(counts, left)


def receive_tokens(
    scores: torch.Tensor,
    lse: torch.Tensor,
    rows: DeviceRows,
    number: int,
    kept: KeptTokens,
    received: torch.Tensor,
    *,
    tile_tokens: int = TILE,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.receive_tokens`.

    ``RECEIVING`` programs per row.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature.
    """
    group, _, kv_heads = _check(scores, lse, rows, kept)
    check_list("received", received, (len(rows), scores.shape[2]), torch.float32)
    if len(rows) == 0:
        return
    _receive_kernel[(len(rows), RECEIVING)](
        scores,
        lse,
        received,
        rows.seats,
        kept.counts,
        rows.choosers,
        scores.shape[2],
        kept.counts.stride(0),
        kv_heads,
        NUMBER=number,
        GROUP=group,
        MEMBERS=triton.next_power_of_2(group),
        TILE=tile_tokens,
        num_warps=WARPS,
    )


def drop_tokens(
    scores: torch.Tensor,
    lse: torch.Tensor,
    rows: DeviceRows,
    number: int,
    kept: KeptTokens,
    rule: Keeping,
    *,
    received: torch.Tensor | None = None,
    tile_tokens: int = TILE,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.device.DeviceOps.drop_tokens`.

    One launch, of a program per row and KV head. Where heads drop the same tokens, each program
    reads the scores of all.

    Raises:
        ValueError: A tensor's dtype, shape or strides are not those of the signature.
    """
    group, most, kv_heads = _check(scores, lse, rows, kept)
    if received is not None:
        check_list("received", received, (len(rows), scores.shape[2]), torch.float32)
        if not rule.per_layer:
            raise ValueError("what tokens have received is given of whole layers")
    if len(rows) == 0:
        return
    _drop_kernel[(len(rows) * kv_heads,)](
        scores,
        lse,
        lse if received is None else received,
        kept.chosen,
        kept.ratings,
        kept.counts,
        kept.budgets,
        rows.seats,
        rows.certain,
        rows.choosers,
        scores.shape[2],
        most,
        kept.counts.stride(0),
        kept.budgets.stride(0),
        kv_heads,
        rule.sink,
        rule.recent,
        NUMBER=number,
        SHARE=rule.recent_share,
        PAGE=rule.page,
        RATING=RATINGS.index(rule.rating),
        STAMPED=STAMPED,
        PER_LAYER=rule.per_layer,
        GIVEN=received is not None,
        GROUP=group,
        MEMBERS=triton.next_power_of_2(group),
        TILE=tile_tokens,
        num_warps=WARPS,
    )


def _check(
    scores: torch.Tensor, lse: torch.Tensor, rows: DeviceRows, kept: KeptTokens
) -> tuple[int, int, int]:
    """Refuse tensors that are not those of the signatures; returns query heads of a KV head, tokens
    that a KV head has room for, and KV heads."""
    check_rows(rows)
    seats, kv_heads, most = kept.chosen.shape
    pairs, group = len(rows) * kv_heads, lse.shape[1]
    check_list("scores", scores, (pairs, group, scores.shape[2]), torch.float32)
    check_list("lse", lse, (pairs, group), torch.float32)
    check_list("kept.chosen", kept.chosen, (seats, kv_heads, most), torch.int32)
    check_list("kept.ratings", kept.ratings, (seats, kv_heads, most), torch.float32)
    check_counts(kept.counts, (seats, kv_heads), "kept.counts")
    check_counts(kept.budgets, (seats, kv_heads), "kept.budgets")
    return group, most, kv_heads
