"""Scores of pages and tokens by each index, and their pooling, written from the papers alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ROUNDING = 1e-5
"""How far scores may be off that are computed in float32, in units of ``q.k * scale``."""
SIGMAS = 3
"""Standard deviations of the sum of many roundings that are taken for its bound."""


@dataclass(frozen=True)
class Method:
    """The method of a request, as the test states it."""

    index: str = "min_max"
    pooling: str = "mean_softmax"
    entry_tokens: int = 32
    entry_pages: int = 1
    rerank: int = 0
    rank: int = 11
    per_token: bool = False
    remainder: float = 0.0
    outliers: float = 0.0
    # Of what is selected, per retrieval layer and KV head, 1 on average; None: all the same.
    shares: tuple[tuple[float, ...], ...] | None = None


# ------------------------------------------------------------------------------------- scores
# Each gives, of queries [group, d] (times the softmax scale) and the keys of n entries,
# [n, tokens, d], the scores [group, n]; and how far a served score may be off, besides ROUNDING,
# for what the record of an entry is kept in: elements of `dtype`, unless the index has its own.


def bounds(query, keys, method, dtype):
    """FreeKV, section 3.2, and Quest: relu(q) @ kmax.T + min(q, 0) @ kmin.T."""
    return query.clamp(min=0) @ keys.amax(1).T + query.clamp(max=0) @ keys.amin(1).T, 0.0


def mean(query, keys, method, dtype):
    return query @ keys.mean(1).T, rounded(query, keys.mean(1), dtype)


def spread(query, keys, method, dtype):
    """The mean, and one standard deviation in each channel's favour."""
    centre, width = keys.mean(1), keys.std(1, correction=0)
    off = rounded(query, centre, dtype) + rounded(query, width, dtype)
    return query @ centre.T + query.abs() @ width.T, off


def sphere(query, keys, method, dtype):
    """ArkVale: the best key that the smallest sphere around the mean may hold."""
    centre = keys.mean(1, keepdim=True)
    radius = (keys - centre).norm(dim=-1).amax(-1)
    scores = query @ centre[:, 0].T + query.norm(dim=-1, keepdim=True) * radius
    return scores, rounded(query, centre[:, 0], dtype)


def farthest(query, keys, method, dtype):
    """InfLLM: the mean score of four representative keys, here those farthest from the mean."""
    order = (keys - keys.mean(1, keepdim=True)).norm(dim=-1).argsort(-1, descending=True)
    chosen = torch.stack([k[o[:4]] for k, o in zip(keys, order, strict=True)])
    scores = (query @ chosen.transpose(1, 2)).mean(-1).T
    return scores, rounded(query, chosen.mean(1), dtype)


def one_bit(query, keys, method, dtype):
    """FIER, section 3.2: keys rounded to the minimum or the maximum of their channel."""
    low, high = keys.amin(1, keepdim=True), keys.amax(1, keepdim=True)
    _, off = one_bit_tokens(query, keys, method, dtype)
    return mass(query, torch.where(keys - low > high - keys, high, low), method, dtype)[0], off[
        ..., 0
    ]


def one_bit_tokens(query, keys, method, dtype):
    """FIER, sections 3.2 and 3.3: of each token, q.k with its key rounded; [group, n, tokens].

    Served are products with whole numbers of a 32000th of what all channels may add.
    """
    low, high = keys.amin(1, keepdim=True), keys.amax(1, keepdim=True)
    scale, zero = high - low, low
    bits = ((keys - zero) / scale.clamp(min=1e-30) > 0.5).float()
    step = (query.abs() @ scale[:, 0].T) / 32000
    off = SIGMAS * (keys.shape[2] / 12) ** 0.5 * step
    return torch.einsum("gd,ntd->gnt", query, bits * scale + zero), off[..., None]


def low_rank(query, keys, method, dtype):
    """Keys of the best rank that the index has, unquantised.

    Served are a mean of 8 bits, and coefficients and directions of 4; queries are rounded to 8 bits
    for these. Each value is at most half a step off, which is noise of a variance of step**2 / 12.
    """
    centre = keys.mean(1, keepdim=True)
    u, s, v = decomposed(keys - centre)
    along, directions = (u * s[:, None])[..., : method.rank], v[:, : method.rank]
    tokens = query @ (centre + along @ directions).transpose(1, 2)  # [n, group, tokens]
    norm = query.square().sum(-1)[None, :, None]
    steps = directions.abs().amax(-1) / 7, along.abs().amax(1) / 7, centre.abs().amax(-1) / 127
    variance = norm * (along.square() @ steps[0].square()[..., None]).transpose(1, 2)
    across = (query @ directions.transpose(1, 2)).square() @ steps[1].square()[..., None]
    of_query = (query.abs().amax(-1)[:, None] / 127).square() * along.square().sum(-1)[:, None]
    variance = (variance + across + of_query + norm * steps[2][..., None].square()) / 12
    pages = tokens.unflatten(-1, (method.entry_pages, -1))
    deviation = SIGMAS * variance.sqrt().unflatten(-1, (method.entry_pages, -1))
    off = (torch.softmax(pages, -1) * deviation).sum(-1)
    return pages.logsumexp(-1).transpose(0, 1).flatten(1), off.transpose(0, 1).flatten(1)


DECOMPOSED: dict[Any, tuple[torch.Tensor, ...]] = {}


def decomposed(matrices):
    """``torch.linalg.svd`` of [n, tokens, d]; of a matrix that was there before, as it was then.

    Most entries of a context are those of the step before.
    """
    names = [(matrix.shape, matrix.numpy().tobytes()) for matrix in matrices]
    if new := [i for i, name in enumerate(names) if name not in DECOMPOSED]:
        parts = torch.linalg.svd(matrices[new], full_matrices=False)
        DECOMPOSED.update(zip((names[i] for i in new), zip(*parts, strict=True), strict=True))
    return [torch.stack(parts) for parts in zip(*(DECOMPOSED[n] for n in names), strict=True)]


def mass(query, keys, method, dtype):
    """Logarithm of the attention that the keys get."""
    return torch.logsumexp(query @ keys.transpose(1, 2), -1).T, 0.0


def rounded(query, values, dtype):
    """How far products are off where values are rounded to ``dtype``."""
    return query.abs() @ values.abs().T * torch.finfo(dtype).eps / 2


INDEXES = {
    "min_max": bounds,
    "mean": mean,
    "mean_std": spread,
    "bounding": sphere,
    "representative": farthest,
    "one_bit": one_bit,
    "low_rank": low_rank,
    "landmark": mean,  # ShadowKV, section 4.1
    "exact": mass,
}


# ------------------------------------------------------------------------------------ pooling
# Of scores [group, entries], less what `NORMS` gives of all of them, [group, 1], one score per
# page; the exponential poolings give its logarithm.

NORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mean_softmax": lambda scores: scores.logsumexp(-1, keepdim=True),  # FreeKV, section 3.2
    "relative": lambda scores: scores.amax(-1, keepdim=True),  # to each head's best entry
    "max": lambda scores: 0,
    "sum": lambda scores: 0,
    "max_softmax": lambda scores: scores.logsumexp(-1, keepdim=True),  # ShadowKV, algorithm 2
}


def by_page(scores, parts, reduce):
    if parts == 1:
        return scores
    return torch.stack([reduce(page) for page in scores.split(parts, -1)], -1)


def added_up(scores, parts):
    return by_page(scores.exp().sum(0), parts, lambda page: page.sum(-1)).log()


POOLINGS = {
    "mean_softmax": added_up,
    "relative": added_up,
    "max": lambda scores, parts: by_page(scores.amax(0), parts, lambda page: page.amax(-1)),
    "sum": lambda scores, parts: by_page(scores.sum(0), parts, lambda page: page.amax(-1)),
    "max_softmax": lambda scores, parts: by_page(
        scores.exp().amax(0), parts, lambda page: page.sum(-1)
    ).log(),
}
