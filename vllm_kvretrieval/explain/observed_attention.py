"""The attention of a prompt's queries, layer by layer, taken in while a model reads it."""

from dataclasses import dataclass

import torch

from vllm_kvretrieval.kernels.observe import observe
from vllm_kvretrieval.observed_model import Seen, attend
from vllm_kvretrieval.retrieval.keeping import STAMPED, Keeping

LATEST = 32
"""Queries at the end of a prompt whose attention is shown."""


@dataclass
class LayerAttention:
    """The observed attention of one layer.

    Attributes:
        mass: float32 [kv_heads, tokens], or [1, tokens] for all heads together; the attention that
            tokens received from the observed queries, summed as
            :func:`vllm_kvretrieval.kernels.observe.observe` does.
        entropy: Nats; Shannon entropy of the observed queries' attention, a mean over queries and
            heads.
        queries: [heads, n, head_size]; queries of the prompt's last ``n`` tokens.
        keys: [kv_heads, tokens, head_size]; as a KV cache has them.
        scale: Softmax scale.
    """

    mass: torch.Tensor
    entropy: float
    queries: torch.Tensor
    keys: torch.Tensor
    scale: float

    @property
    def kv_heads(self) -> int:
        """Number of KV heads of the layer."""
        return len(self.keys)

    def latest(self, queries: int = LATEST) -> torch.Tensor:
        """float32 [kv_heads, tokens]; attention of the last queries, as many as are at hand.

        It is a mean over queries and over the query heads of each KV head, so a row's sum is 1.
        """
        tokens = self.keys.shape[1]
        return self.attention(tokens - min(queries, self.queries.shape[1]), tokens)

    def queries_at(self, begin: int, end: int) -> torch.Tensor:
        """[heads, end - begin, head_size]; the queries of tokens, which have to be at hand."""
        first = self.keys.shape[1] - self.queries.shape[1]
        return self.queries[:, begin - first : end - first]

    def attention(self, begin: int, end: int) -> torch.Tensor:
        """float32 [kv_heads, tokens]; as :meth:`latest`, of the queries of these tokens."""
        lengths = torch.arange(begin + 1, end + 1)
        attention = attend(self.queries_at(begin, end), self.keys, lengths, self.scale)
        return attention.unflatten(0, (self.kv_heads, -1)).mean((1, 2))


class PromptAttention:
    """Watches a prompt, whose layers are given to :meth:`observe`.

    Args:
        tokens: Tokens of the prompt.
        observed: Queries at its end whose attention counts; None: all.
        rule: How methods that keep tokens by their attention rate them.
        latest: Queries at its end to keep.

    Attributes:
        layers: The attention seen so far, by number of the layer.
    """

    def __init__(
        self,
        tokens: int,
        observed: int | None,
        rule: Keeping | None = None,
        latest: int = LATEST,
    ) -> None:
        self._tokens, self._latest = tokens, latest
        self._rule = rule or Keeping(per_layer=True)
        self._first = Keeping(observation=observed).first_observed(tokens)
        self.layers: dict[int, LayerAttention] = {}

    @property
    def positions(self) -> torch.Tensor:
        """int64 [n]; positions of the queries that are to be shown."""
        return torch.arange(max(min(self._first, self._tokens - self._latest), 0), self._tokens)

    def observe(self, seen: Seen) -> None:
        """Take in one layer's queries, which are adjacent."""
        query, key, context, scale = seen.query, seen.key, seen.context, seen.scale
        if seen.layer not in self.layers:
            rows = 1 if self._rule.per_layer else len(key)
            mass, nothing = torch.zeros(rows, self._tokens), query[:, :0]
            self.layers[seen.layer] = LayerAttention(mass, 0.0, nothing, key[:, :0], scale)
        layer = self.layers[seen.layer]
        layer.queries = torch.cat([layer.queries, query], 1)[:, -self._latest :].clone()
        end = int(context[-1])
        if end == self._tokens:
            layer.keys = key
        first = max(int(context[0]) - 1, self._first)
        if first < end:
            asked = query[:, first - end :].transpose(0, 1)
            entropy = observe(
                asked,
                first,
                key.float(),
                scale,
                layer.mass[:, :end],
                entropies=True,
                stamped=STAMPED if self._rule.rating == "stamp" else None,
            )
            layer.entropy += float(entropy) / (len(query) * (self._tokens - self._first))
