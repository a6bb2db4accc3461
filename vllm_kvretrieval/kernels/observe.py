"""The attention that tokens of a prompt receive from some of its queries, on any device."""

import torch

SCRATCH = 1 << 20
"""Scores that are held at once, float32; one query of a KV head's group at least."""
SCORES = 3
"""How many tensors of scores there are at once, at most."""


def observe(
    query: torch.Tensor,
    first: int,
    keys: torch.Tensor,
    scale: float,
    mass: torch.Tensor,
    entropies: bool = False,
    stamped: float | None = None,
) -> float:
    """Add up the softmax weights that queries give to the tokens of their context.

    No matrix of all queries and tokens is made: queries are taken a few at a time, each attends to
    what lies before it and to itself. Arithmetic is float32.

    Args:
        query: [n, kv_heads * group, head_size]; of adjacent tokens.
        first: Position of the first of these in the context.
        keys: float32 [kv_heads, tokens, head_size]; of the context, ``first + n`` tokens or more.
        scale: Softmax scale.
        mass: float32 [kv_heads, tokens], or [1, tokens] for all heads together; added to.
        entropies: Whether these are wanted; they take a third more.
        stamped: Write, in place of sums, the position of the latest query of which a head gives a
            token more than this.

    Returns:
        The Shannon entropies of the queries' attention in nats, summed over heads and queries; 0
        where they are not wanted.
    """
    kv_heads, _, head_size = keys.shape
    count, heads, _ = query.shape
    group = heads // kv_heads
    grouped = (query.float() * scale).view(count, kv_heads, group, head_size)
    total, begin = 0.0, 0
    while begin < count:
        size = max(1, SCRATCH // (heads * (first + count)))
        end = min(begin + size, count)
        tokens = first + end
        block = grouped[begin:end].permute(1, 2, 0, 3).reshape(kv_heads, -1, head_size)
        scores = torch.bmm(block, keys[:, :tokens].transpose(1, 2))
        by_query = scores.view(kv_heads, group, end - begin, tokens)
        later = torch.ones(end - begin, end - begin, dtype=torch.bool, device=scores.device).triu(1)
        by_query[..., first + begin :].masked_fill_(later, torch.finfo(torch.float32).min)
        if entropies:
            lse = scores.logsumexp(-1)
            weights = (scores - lse[..., None]).exp_()
            products = torch.linalg.vecdot(weights, scores)
            total += float((lse.double() - products.double()).sum())
        else:
            weights = scores.softmax(-1)
        if stamped is None:
            received = weights.sum(1)
            mass[:, :tokens] += received if len(mass) == kv_heads else received.sum(0, keepdim=True)
        else:
            position = torch.arange(first + begin, first + end, device=scores.device).float()
            high = (weights > stamped).view_as(by_query).any(1) * position[:, None]
            latest = high.amax(1) if len(mass) == kv_heads else high.amax((0, 1))[None]
            mass[:, :tokens] = torch.maximum(mass[:, :tokens], latest)
        begin = end
    return total


def context_keys(cache: torch.Tensor, pages: torch.Tensor, tokens: int, head: int) -> torch.Tensor:
    """Keys of a context in a cache of rows, of one KV head.

    Args:
        cache: [P, kv_heads, page_size, 2 * head_size].
        pages: int64 [n]; those of the context, in order.
        tokens: How many it has.
        head: The KV head.

    Returns:
        float32 [1, tokens, head_size].
    """
    head_size = cache.shape[-1] // 2
    keys = cache[:, head, :, :head_size][pages].flatten(0, 1)
    return keys[None, :tokens].float()


def observing_bytes(tokens: int, group: int, head_size: int, dtype: torch.dtype) -> int:
    """Bytes that observing a context takes, one KV head at a time.

    Args:
        tokens: Of the context.
        group: Query heads of a KV head.
        head_size, dtype: Of the cache.
    """
    keys = tokens * head_size * (dtype.itemsize + torch.float32.itemsize)
    return keys + SCORES * max(SCRATCH, tokens * group) * torch.float32.itemsize
