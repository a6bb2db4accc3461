"""The filter ability of layers, from their queries and keys, and the choice of filters."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_kvretrieval.retrieval.budget import DEFAULT_SHARE
from vllm_kvretrieval.retrieval.roles import MOST_FILTERS

POSITIONS_AT_ONCE = 16
"""Queries whose attention is in memory at a time: float32 [heads, 16, context] of one layer."""

DENSE_SHARE = 0.25
"""Most of the layers that may stay dense, as in the paper: 8 of 32 with {2, 8, 18}."""

LEAST_ATTENTION = 1e-30
"""What is divided by where there is no attention to select from."""

TOLERANCE = 0.01
"""Share of attention mass that is worth giving up for fewer dense layers."""


class FilterAbility:
    """Sums, over queries, a layer's attention on tokens that earlier layers select.

    The first and the last tokens of a context are neither selected nor counted: a decode step reads
    them anyway, and the first ones get much of the attention in every layer.

    Attributes:
        always: How many tokens at either end of a context these are.
        mass: float64 [layers, layers]; at [i, j], for j > i, the attention of layer j that falls
            on the tokens that layer i selects, summed over the queries.
        between: float64 [layers]; the attention that falls between the ends, summed.

    Args:
        layers: Number of layers of the model.
        tokens: Tokens that a layer selects.
    """

    def __init__(self, layers: int, tokens: int) -> None:
        self.tokens = tokens
        self.always = always_attended(tokens)
        self.mass = torch.zeros(layers, layers, dtype=torch.float64)
        self.between = torch.zeros(layers, dtype=torch.float64)
        self._chosen: dict[int, list[torch.Tensor]] = {}

    def begin(self) -> None:
        """Start with new queries, whose layers have to come in rising order."""
        self._chosen = {}

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        context: torch.Tensor,
        scale: float,
    ) -> None:
        """Take in one layer's queries.

        Selected are the tokens that OmniKV's context selector selects (section 4.2): those with the
        highest attention over all heads of the layer. Mass is a mean over the heads.

        Args:
            layer: The layer's number.
            query: [heads, n, head_size].
            key: [kv_heads, most tokens of a context, head_size].
            context: int64 [n]; tokens that each query attends to, its own included; more than
                ``tokens + 2 * always``.
            scale: Softmax scale.
        """
        chosen = []
        blocks = context.split(POSITIONS_AT_ONCE)
        for number, lengths in enumerate(blocks):
            start = number * POSITIONS_AT_ONCE
            part = query[:, start : start + len(lengths)]
            attention = attend(part, key[:, : int(lengths.max())], lengths, scale)
            place = torch.arange(attention.shape[-1])
            attention *= (place >= self.always) & (place < lengths[:, None] - self.always)
            mean = attention.mean(0)
            self.between[layer] += mean.sum(dtype=torch.float64)
            for earlier, sets in self._chosen.items():
                self.mass[earlier, layer] += mean.gather(1, sets[number]).sum(dtype=torch.float64)
            chosen.append(attention.amax(0).topk(self.tokens, -1).indices)
        self._chosen[layer] = chosen

    def similarity(self) -> torch.Tensor:
        """float64 [layers, layers]; ``mass`` as shares of ``between``; zero where there is none."""
        return self.mass / self.between.clamp(min=LEAST_ATTENTION)


def always_attended(tokens: int) -> int:
    """Tokens at either end of a context that are attended to beside so many selected ones."""
    return tokens // DEFAULT_SHARE


def attend(
    query: torch.Tensor, key: torch.Tensor, context: torch.Tensor, scale: float
) -> torch.Tensor:
    """float32 [heads, n, tokens]; softmax attention; see :meth:`FilterAbility.observe`."""
    grouped = query.float().unflatten(0, (len(key), -1))
    scores = torch.einsum("hgnd,htd->hgnt", grouped, key.float()).flatten(0, 1) * scale
    future = torch.arange(key.shape[1]) >= context[:, None]
    return scores.masked_fill_(future, -torch.inf).softmax(-1)


def abilities(similarity: torch.Tensor, layers: Sequence[int]) -> dict[int, float]:
    """The mean share of each layer over the layers after it; the last layer has none.

    Args:
        similarity: [layers, layers]; see :meth:`FilterAbility.similarity`.
        layers: The measured layers, rising.
    """
    return {
        layer: float(similarity[layer, layers[place + 1 :]].mean())
        for place, layer in enumerate(layers[:-1])
    }


class Choice(NamedTuple):
    """A set of filters.

    Attributes:
        filters: Numbers of layers.
        dense: Layers with full attention that attend to whole contexts, the filters included.
        kept: Mean over the layers with full attention of the share that they keep of their
            attention between sink and window; 1 for dense ones.
    """

    filters: tuple[int, ...]
    dense: int
    kept: float


def choose_filters(
    similarity: torch.Tensor,
    layers: Sequence[int],
    most: int = MOST_FILTERS,
    dense_share: float = DENSE_SHARE,
) -> Choice:
    """Choose filters.

    The paper takes layers of high ability, spread over the model, the first one early, and names
    no rule. Our rule: of all sets of at most ``most`` filters that leave no more than
    ``dense_share`` of the layers dense (rounded up), find the highest ``kept``; among the sets
    within ``TOLERANCE`` of it take one with the fewest dense layers, and of these the one that
    keeps most.

    Args:
        similarity: [layers, layers]; see :meth:`FilterAbility.similarity`.
        layers: Layers with full attention, rising.
        most: Most filters.
        dense_share: Largest share of dense layers among those with full attention.

    Raises:
        ValueError: No set of filters is possible.
    """
    limit = math.ceil(dense_share * len(layers))
    sums = similarity[:, layers].cumsum(1).tolist()
    at = {layer: place for place, layer in enumerate(layers)}

    def evaluate(filters: tuple[int, ...]) -> Choice | None:
        kept, sparse = 0.0, 0
        for layer, following in itertools.zip_longest(filters, filters[1:]):
            # Its followers lie between these places; the one right after it in the model is dense.
            start = at[layer] + 1 + (layer + 1 in at)
            end = len(layers) if following is None else at[following]
            if start >= end:
                return None
            kept += sums[layer][end - 1] - sums[layer][start - 1]
            sparse += end - start
        dense = len(layers) - sparse
        return Choice(filters, dense, (kept + dense) / len(layers)) if dense <= limit else None

    sets = (itertools.combinations(layers, count) for count in range(1, most + 1))
    evaluated = map(evaluate, itertools.chain.from_iterable(sets))
    choices = [choice for choice in evaluated if choice is not None]
    if not choices:
        raise ValueError(
            f"no filters leave at most {limit} of {len(layers)} layers with full attention dense; "
            "allow a larger share"
        )
    best = max(choice.kept for choice in choices)
    good = [choice for choice in choices if choice.kept >= best - TOLERANCE]
    return min(good, key=lambda choice: (choice.dense, -choice.kept))
