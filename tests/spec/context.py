"""Filter layers, which select tokens for the layers after them."""

import torch

from vllm_kvretrieval.kernels.reference.index import keys_of
from vllm_kvretrieval.kernels.reference.plan import top_pages
from vllm_kvretrieval.kernels.rows import DecodeRows
from vllm_kvretrieval.kernels.types import ContextSelector, Merge


def select_context(
    query: torch.Tensor,
    weights: torch.Tensor,
    rows: DecodeRows,
    selector: ContextSelector,
    merge: Merge | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.select_context`."""
    drafts = 0 if rows.starts is None else rows.starts.diff() - 1
    lengths = (rows.seq_lens - drafts).tolist()
    ratings = torch.full((*weights.shape, max(lengths)), -torch.inf, dtype=torch.float64)
    for r, length in enumerate(lengths):
        queries = query[: len(rows) * weights.shape[1]].unflatten(0, weights.shape)[r]
        ratings[r, :, :length] = context_ratings(queries, rows.block_table[r], length, selector)
    if merge is not None:
        merge(ratings)
    for r, length in enumerate(lengths):
        sink, window, select = (int(t[r]) for t in (rows.sink, rows.window, rows.select))
        scores = context_scores(ratings[r, :, :length], weights[r])
        best = sink + top_pages(scores[sink : int(rows.seq_lens[r]) - window], select)
        selector.chosen[int(rows.seats[r]), :select] = best


def context_ratings(
    queries: torch.Tensor, blocks: torch.Tensor, length: int, selector: ContextSelector
) -> torch.Tensor:
    """The logarithm of the highest attention that any head gives a token, float64 [n, length].

    Args:
        queries: [n, kv_heads * group, head_size]; the latest last. Each attends to one token more
            than the one before it; what it does not attend to has minus infinity.
        blocks: int32 [>= pages]; ids of the context's pages.
        length: Tokens of the context.
        selector: The layer's selector.
    """
    store = selector.store
    assert store.cache is not None
    pages = store.cache[blocks[: -(-length // store.page_size)].long()]
    keys = torch.cat([keys_of(page, store.layout) for page in pages], 1)[:, :length].double()
    keys = keys.repeat_interleave(selector.group, 0)
    ratings = torch.full((len(queries), length), -torch.inf, dtype=torch.float64)
    for number, query in enumerate(queries.double()):
        context = length - (len(queries) - 1 - number)
        if context >= 1:
            scores = torch.einsum("hd,htd->ht", query, keys[:, :context]) * selector.scale
            if selector.softcap:
                scores = selector.softcap * (scores / selector.softcap).tanh()
            whole = scores
            if selector.sinks is not None:
                whole = torch.cat([scores, selector.sinks.double()[:, None]], 1)
            parts = scores - whole.logsumexp(-1, keepdim=True)
            ratings[number, :context] = parts.where(~parts.isnan(), -torch.inf).amax(0)
    return ratings


def context_scores(ratings: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The scores of a request's tokens, float64 [length]; with one query its ratings.

    Args:
        ratings: float64 [n, length].
        weights: float32 [n].
    """
    if len(ratings) == 1:
        return ratings[0]
    return (ratings.exp() * weights.double()[:, None]).sum(0)


def list_context(rows: DecodeRows, selector: ContextSelector, kv_heads: int) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.list_context`."""
    size = selector.store.page_size
    for r in range(len(rows)):
        length = int(rows.seq_lens[r])
        sink, window, select = (int(t[r]) for t in (rows.sink, rows.window, rows.select))
        chosen = selector.chosen[int(rows.seats[r]), :select].long()
        attended = torch.cat([torch.arange(sink), chosen, torch.arange(length - window, length)])
        pages = rows.block_table[r, attended // size].long()
        for head in range(kv_heads):
            listed = rows.lists[r * kv_heads + head]
            listed[: len(attended)] = (pages * kv_heads + head) * size + attended % size
            rows.lengths[r * kv_heads + head] = len(attended)
