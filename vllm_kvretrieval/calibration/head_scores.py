"""Echo and induction scores: how much KV heads look far back (RazorAttention, section 3.2)."""

import torch

from vllm_kvretrieval.observed_model import Seen

REPEATS = 4
"""Repetitions of the random tokens, as in the paper."""


def repeated_tokens(vocabulary: int, excluded: list[int], count: int, seed: int) -> torch.Tensor:
    """int64 [REPEATS * count]; ``count`` different random tokens, repeated.

    Args:
        vocabulary: Number of tokens of the model.
        excluded: Tokens that are not used, since they have a special meaning.
        count: Tokens of one repetition.
        seed: Seed of the random choice.

    Raises:
        ValueError: There are not as many tokens.
    """
    usable = torch.ones(vocabulary, dtype=torch.bool)
    usable[[token for token in excluded if token < vocabulary]] = False
    tokens = usable.nonzero()[:, 0]
    if count > len(tokens):
        raise ValueError(f"the model has {len(tokens)} tokens: use --tokens {len(tokens)} or less")
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
    return tokens[order[:count]].repeat(REPEATS)


class HeadScores:
    """Sums, over queries, the attention that a text's repetitions get.

    A token's *echo* is the attention that it gives to its earlier occurrences; its *induction* is
    the attention that it gives to the tokens right after these.

    Args:
        period: Tokens of a repetition, all different.
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self._echo: dict[int, torch.Tensor] = {}
        self._induction: dict[int, torch.Tensor] = {}
        self._queries: dict[int, int] = {}

    def observe(self, seen: Seen) -> None:
        """Take in one layer's queries."""
        layer, heads = seen.layer, len(seen.key)
        grouped = torch.zeros(heads, len(seen.query) // heads, dtype=torch.float64)
        if layer not in self._queries:
            self._echo[layer], self._induction[layer] = grouped, grouped.clone()
        for lengths, attention in seen.attention():
            back = self.period * torch.arange(1, REPEATS)
            earlier = lengths[:, None] - 1 - back
            for scores, places in ((self._echo, earlier), (self._induction, earlier + 1)):
                given = attention.gather(2, places.clamp(min=0).expand(len(attention), -1, -1))
                given = given.masked_fill(earlier < 0, 0)
                scores[layer] += given.sum((1, 2), dtype=torch.float64).view_as(grouped)
        self._queries[layer] = self._queries.get(layer, 0) + len(seen.context)

    def _of(self, scores: dict[int, torch.Tensor], layer: int) -> list[float]:
        best = (scores[layer] / self._queries[layer]).amax(1).clamp(max=1)
        return [round(score, 4) for score in best.tolist()]

    def echo(self, layer: int) -> list[float]:
        """The echo score per KV head: the mean over the queries, of its best query head."""
        return self._of(self._echo, layer)

    def induction(self, layer: int) -> list[float]:
        """The induction score per KV head, as :meth:`echo`."""
        return self._of(self._induction, layer)
