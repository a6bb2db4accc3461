"""The attention that the tokens of a prompt receive from some of its queries, on any device."""

import torch

SCRATCH = 1 << 20
"""The number of float32 scores that are held at once, unless one query of a group has more."""
DEVICE_SCRATCH = 1 << 24
"""The same on a device, where many small launches take longer than a few large ones."""
SCORES = 3
"""The largest number of tensors of scores at a time."""


def observe(
    query: torch.Tensor,
    first: int,
    keys: torch.Tensor,
    scale: float,
    mass: torch.Tensor,
    entropies: bool = False,
    stamped: float | None = None,
    scratch: int | None = None,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add up the softmax weights that queries give to the tokens of their context.

    Each query attends to the tokens before it and to its own. Queries are taken a few at a time, so
    no matrix of all queries and tokens is made. Arithmetic is float32. Nothing waits for a device.

    Args:
        query: [n, kv_heads * group, head_size]; queries of adjacent tokens.
        first: Position of the first of these tokens in the context.
        keys: float32 [kv_heads, tokens, head_size]; keys of the first ``tokens`` tokens of the
            context, ``first + n`` or more.
        scale: Softmax scale.
        mass: float32 [kv_heads, tokens], or [1, tokens] for all heads together; added to.
        entropies: Whether to compute entropies, which takes a third more time.
        stamped: If given, ``mass`` becomes the position of the latest query by which some head
            gives a token more weight than this, in place of sums.
        scratch: The number of scores that are held at once; None: ``SCRATCH``.
        softcap: Logits become ``softcap * tanh(logit / softcap)``; 0: they stay.
        sinks: float32 [kv_heads * group]; logits beside those of a head's tokens; None: there are
            none. They take a part of the weights.

    Returns:
        float64 []; the sum over heads and queries of the Shannon entropies of attention to tokens,
        in nats; 0 without ``entropies``.
    """
    kv_heads, _, head_size = keys.shape
    count, heads, _ = query.shape
    group = heads // kv_heads
    grouped = (query.float() * scale).view(count, kv_heads, group, head_size)
    total, begin = torch.zeros((), dtype=torch.float64, device=keys.device), 0
    while begin < count:
        size = max(1, (scratch or SCRATCH) // (heads * (first + count)))
        end = min(begin + size, count)
        tokens = first + end
        block = grouped[begin:end].permute(1, 2, 0, 3).reshape(kv_heads, -1, head_size)
        scores = torch.bmm(block, keys[:, :tokens].transpose(1, 2))
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        by_query = scores.view(kv_heads, group, end - begin, tokens)
        later = torch.ones(end - begin, end - begin, dtype=torch.bool, device=scores.device).triu(1)
        by_query[..., first + begin :].masked_fill_(later, torch.finfo(torch.float32).min)
        if entropies or sinks is not None:
            lse = scores.logsumexp(-1)
            if sinks is not None:
                beside = sinks.view(kv_heads, group, 1).expand(-1, -1, end - begin).flatten(1)
                lse = torch.logaddexp(lse, beside)
            weights = (scores - lse[..., None]).exp_()
        else:
            weights = scores.softmax(-1)
        if entropies:
            whole = 1.0 if sinks is None else weights.sum(-1, dtype=torch.float64)
            products = torch.linalg.vecdot(weights, scores)
            total += (whole * lse.double() - products.double()).sum()
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
    """The keys of one KV head of a context, in a token-major cache.

    Args:
        cache: [P, kv_heads, page_size, 2 * head_size].
        pages: int64 [n]; page ids of the context, in order.
        tokens: Tokens of the context.
        head: The KV head.

    Returns:
        float32 [1, tokens, head_size].
    """
    head_size = cache.shape[-1] // 2
    keys = cache[:, head, :, :head_size][pages].flatten(0, 1)
    return keys[None, :tokens].float()


def observing_bytes(
    tokens: int, group: int, head_size: int, dtype: torch.dtype, scratch: int | None = None
) -> int:
    """Bytes that it takes to observe a context, one KV head at a time.

    Args:
        tokens: Tokens of the context.
        group: Query heads per KV head.
        head_size, dtype: Head size and dtype of the cache.
        scratch: See :func:`observe`.
    """
    keys = tokens * head_size * (dtype.itemsize + torch.float32.itemsize)
    return keys + SCORES * max(scratch or SCRATCH, tokens * group) * torch.float32.itemsize
