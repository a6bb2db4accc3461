"""Decode steps: which pages or tokens each KV head selects."""

import math

import torch

from vllm_kvretrieval.kernels.outside_rules import choose_pages
from vllm_kvretrieval.kernels.reference.index import fields_of, keys_of_entries
from vllm_kvretrieval.kernels.rows import DecodeRows, Mode, Remainder
from vllm_kvretrieval.kernels.types import Chooser, IndexRecords, Selection
from vllm_kvretrieval.retrieval.index import Index
from vllm_kvretrieval.retrieval.index.base import unpack_means
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.rule import Rule

LEAST_SHARE = 1e-5
"""The share of the attention below which there is no remainder."""
MOST_OF_ATTENDED = 0.4
"""The most that a remainder has of the attention of pages attended to, by the index."""


def plan_decode(
    query: torch.Tensor, rows: DecodeRows, chooser: Chooser, remainder: Remainder | None = None
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.plan_decode`."""
    store, selection = chooser.store, chooser.selection
    for r in range(len(rows)):
        length, size = int(rows.seq_lens[r]), store.page_size
        pages = rows.block_table[r, : -(-length // size)].long()
        first = pages[:: store.spans] // store.spans * store.parts
        entries = (first[:, None] + torch.arange(store.parts)).flatten()
        drafts = 0 if rows.starts is None else int(rows.starts[r + 1] - rows.starts[r]) - 1
        entries = entries[: entry_count(length - drafts, store)]
        count = length if rows.per_token else len(pages)  # of units of selection
        sink, window = int(rows.sink[r]), int(rows.window[r])
        mode, seat = Mode(int(rows.mode[r])), int(rows.seats[r])
        grouped = query[r].view(store.kv_heads, chooser.group, store.head_size)
        previous = selection.query[seat].view_as(grouped)
        for head in range(store.kv_heads):
            select = selected(rows, r, head, count, selection)
            chosen = torch.arange(sink, sink + select)
            everything = sink + select + window == count
            if mode is Mode.SELECT and select > 0:
                if isinstance(store.index, Rule):
                    record = record_of(store.index, entries, head, store)
                    asked = grouped[head].float()
                    best = choose_pages(store.index, asked, record, rows, r, head, chooser)
                    enough = torch.arange(select)
                else:
                    best, enough = select_units(
                        grouped[head].float(), entries, head, chooser, (sink, count - window),
                        select, rows.per_token, float(rows.numbers["mass"][r]),
                    )  # fmt: skip
                corrected = bool(rows.fresh[r]) or turned(
                    grouped[head], previous[head], float(rows.numbers["threshold"][r])
                )
                former = selection.chosen[seat, head, :select]
                chosen = best[enough] if corrected or everything else former.long()
                rows.corrected[seat] += corrected
                if len(chosen) < select:
                    rows.spared[seat] += select - len(chosen)
                former.copy_(best)
            elif mode is Mode.GIVEN and not everything:
                chosen = selection.chosen[seat, head, :select].long()
            attended = torch.cat([torch.arange(sink), chosen, torch.arange(count - window, count)])
            if remainder is not None:
                heads = slice(head * chooser.group, (head + 1) * chooser.group)
                of_head = Remainder(remainder.values[r, heads], remainder.lse[r, heads])
                scored = mode is Mode.SELECT and int(rows.select[r]) > 0
                rest = scored and len(attended) < count
                left = entries if rest else entries[:0]
                add_up(grouped[head].float(), left, head, chooser, attended, of_head)
            page, offset = (attended // size, attended % size) if rows.per_token else (attended, 0)
            numbers = pages[page] * store.kv_heads + head
            listed = rows.lists[r * store.kv_heads + head]
            listed[: len(attended)] = numbers * size + offset if rows.per_token else numbers
            tokens = len(attended) if rows.per_token else len(attended) * size
            if not rows.per_token and attended[-1:].eq(count - 1).any():
                tokens -= len(pages) * size - length  # the tail page's rest
            rows.lengths[r * store.kv_heads + head] = tokens
            if select > 0 and mode is Mode.SELECT:
                previous[head] = grouped[head]


def add_up(
    query: torch.Tensor,
    entries: torch.Tensor,
    head: int,
    chooser: Chooser,
    attended: torch.Tensor,
    remainder: Remainder,
) -> None:
    """Add up what one KV head does not attend to; see :meth:`Ops.plan_decode`.

    Args:
        query: float32 [group, head_size].
        entries: int64 [n]; those of the context that count.
        head: Number of the KV head.
        chooser: How to select.
        attended: int64; positions of the pages that the head attends to.
        remainder: The head's remainder, written: [group, head_size] and [group].
    """
    remainder.values.zero_()
    remainder.lse.fill_(-math.inf)
    store = chooser.store
    if not len(entries) or not chooser.remainder:
        return
    assert store.index is not None
    scores = score_entries(store.index, query, entries, head, chooser).double()
    shares = scores.softmax(1)
    share = shares.mean(0)
    listed = torch.isin(torch.arange(len(share)) // store.parts, attended)
    records = store.records[entries, head]
    values = unpack_means(records, store.spans, store.head_size).flatten(0, 1).double()
    kept = (share <= chooser.remainder) & ~listed & values.isfinite().all(1)
    if kept.any():
        mass = scores[:, kept].logsumexp(1)
        total = scores.logsumexp(1)
        some = mass - total > math.log(LEAST_SHARE)
        most = total + (MOST_OF_ATTENDED * shares[:, listed].sum(1)).log()
        remainder.lse[some] = mass.minimum(most)[some].float()
        remainder.values[some] = (scores[some][:, kept].softmax(1) @ values[kept]).float()


def selected(rows: DecodeRows, r: int, head: int, units: int, selection: Selection) -> int:
    """The number of units between sink and window that a KV head attends to.

    The context has ``units`` units.
    """
    mode, select = Mode(int(rows.mode[r])), int(rows.select[r])
    if mode is Mode.SELECT and (select == 0 or selection.counts is None):
        return select
    between = units - int(rows.sink[r]) - int(rows.window[r])
    if mode is Mode.WHOLE:
        return between
    assert selection.counts is not None, "what is given is counted"
    return min(int(selection.counts[rows.seats[r], head]), between)


def entry_count(seq_len: int, store: IndexRecords) -> int:
    """The number of entries of a context that have records; unfinished ones do if records grow."""
    grows = store.index is not None and store.index.grows
    return -(-seq_len // store.entry_tokens) if grows else seq_len // store.entry_tokens


def select_units(
    query: torch.Tensor,
    entries: torch.Tensor,
    head: int,
    chooser: Chooser,
    between: tuple[int, int],
    select: int,
    per_token: bool,
    mass: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best units of selection between sink and window for one KV head.

    Args:
        query: float32 [group, head_size].
        entries: int64 [n]; those of the context that count.
        head: Number of the KV head.
        chooser: How to select.
        between: Where the sink ends and the window begins, in units.
        select: How many units to select.
        per_token: Whether units are single tokens; else they are pages.
        mass: See :data:`~vllm_kvretrieval.retrieval.families.scored.MASS`.

    Returns:
        int64 [select]; positions in the context, rising. And int64 [<= select], rising: the places
        among them of those that are enough for the mass.
    """
    store, parts = chooser.store, 1 if per_token else chooser.store.parts
    assert store.index is not None
    scores = score_entries(store.index, query, entries, head, chooser, per_token)
    norms = chooser.pooling.norms(scores)
    pooled = chooser.pooling.pool(scores.double() - norms, parts).nan_to_num(nan=-math.inf)
    sink, end = between
    if count := chooser.outlier_units(select):
        pooled[sink + find_outliers(entries, head, store, between, count)] = math.inf
    candidates = sink + top_pages(pooled[sink:end], max(select, select * chooser.rerank))
    enough = torch.arange(select)
    if mass < 1:
        enough = reach_mass(pooled.exp(), candidates, between, mass)
    if len(candidates) == select:
        return candidates, enough
    chosen = (candidates[:, None] * parts + torch.arange(parts)).flatten()
    scores = score_entries(Exact(), query, entries[chosen], head, chooser)
    pooled = chooser.pooling.pool(scores.double() - norms, parts).nan_to_num(nan=-math.inf)
    return candidates[top_pages(pooled, select)], enough


def find_outliers(
    entries: torch.Tensor, head: int, store: IndexRecords, between: tuple[int, int], count: int
) -> torch.Tensor:
    """The pages between sink and window whose keys are least like the means of their entries.

    Args:
        entries: int64 [n]; those of the context that count.
        head: Number of the KV head.
        store: The page index, which tells outliers.
        between: Where the sink ends and the window begins, in pages.
        count: How many pages to find.

    Returns:
        int64 [count]; positions, counted from the end of the sink.
    """
    entries = entries[between[0] * store.parts : between[1] * store.parts]
    cosines = fields_of(store.records[entries, head], store)["least_cosine"]
    least = cosines.double().view(-1, store.parts).amin(1)
    return top_pages((-least).nan_to_num(nan=-math.inf, neginf=-math.inf, posinf=math.inf), count)


def reach_mass(
    shares: torch.Tensor, candidates: torch.Tensor, between: tuple[int, int], mass: float
) -> torch.Tensor:
    """The fewest candidates that reach a mass together with sink and window, at least one.

    Args:
        shares: float64 [units]; of all units that have one.
        candidates: int64 [n], n > 0; positions.
        between: Where the sink ends and the window begins.
        mass: Share of the sum.

    Returns:
        int64 [<= n]; places among the candidates, rising.
    """
    sink, end = between
    order = shares[candidates].argsort(descending=True, stable=True)
    reached = shares[:sink].sum() + shares[end:].sum() + shares[candidates[order]].cumsum(0)
    short = int((reached[:-1] < mass * shares.sum()).sum())
    return order[: short + 1].sort().values


def record_of(
    index: Index, entries: torch.Tensor, head: int, store: IndexRecords
) -> dict[str, torch.Tensor]:
    """What an index is given of entries of a KV head, [n, ...] each."""
    record = {}
    if index == store.index:
        record = fields_of(store.records[entries, head], store)
    if index.reads_keys:
        record["keys"] = keys_of_entries(entries, store)[:, :, head]
    return record


def score_entries(
    index: Index,
    query: torch.Tensor,
    entries: torch.Tensor,
    head: int,
    chooser: Chooser,
    per_token: bool = False,
) -> torch.Tensor:
    """The scores of entries of a KV head, or of their pages or tokens, by the index.

    Returns:
        float32 [group, n].
    """
    store = chooser.store
    record = record_of(index, entries, head, store)
    if per_token:
        return index.score_tokens(query, record, chooser.scale).flatten(1)
    if store.spans > 1:
        return index.score_pages(query, record, chooser.scale, store.spans).flatten(1)
    return index.score(query, record, chooser.scale)


def top_pages(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the ``count`` highest scores, rising; of equal scores the earlier wins."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def turned(query: torch.Tensor, previous: torch.Tensor, threshold: float) -> bool:
    """Whether a KV head must be corrected (FreeKV, section 3.3)."""
    if threshold >= 1 or threshold <= -1:
        return threshold >= 1
    similarity = torch.cosine_similarity(query.float(), previous.float(), dim=-1)
    return similarity.mean().item() < threshold
