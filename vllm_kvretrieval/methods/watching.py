"""Watching prompts in a layer: what their tokens receive of the attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_kvretrieval.kernels.observe import (
    DEVICE_SCRATCH,
    context_keys,
    observe,
    observing_bytes,
)
from vllm_kvretrieval.methods.kept_prompts import KeptPrompts, Watch
from vllm_kvretrieval.retrieval.keeping import STAMPED

RANKED = 40
"""Bytes that it takes to rank a token of a KV head: of the sums two copies; of the ranks, with what
sorting takes, twice four and eight bytes, and as many again."""


@dataclass(frozen=True)
class Watcher:
    """Adds up the attention of a layer.

    Attributes:
        prompts: The prompts of which some tokens are kept.
        layer: The layer's place among retrieval layers.
        scale, softcap, sinks, scratch: See :func:`vllm_kvretrieval.kernels.observe.observe`.
    """

    prompts: KeptPrompts
    layer: int
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    scratch: int | None = None

    def add(self, query: torch.Tensor, kv_cache: torch.Tensor, watch: Watch) -> None:
        """Add what some queries of a step give to the tokens of their prompt.

        Args:
            query: [tokens, heads, head_size]; the step's.
            kv_cache: [pages, kv_heads, page_size, 2 * head_size]; the layer's, with the step's.
            watch: The queries.
        """
        rule, watched = self.prompts.rules[watch.method], watch.watched
        by_entropy = self.prompts.methods[watch.method].budget_shares.entropy is not None
        stamped = STAMPED if rule.rating == "stamp" else None
        kv_heads = kv_cache.shape[1]
        by_head = query[watch.tokens].chunk(kv_heads, dim=1)
        sinks = [None] * kv_heads if self.sinks is None else self.sinks.chunk(kv_heads)
        tokens = watch.first + len(by_head[0])
        mass = watched.mass(self.layer, 1 if rule.per_layer else kv_heads)[:, :tokens]
        for head, asked in enumerate(by_head):
            keys = context_keys(kv_cache, watch.pages, tokens, head)
            received = mass if rule.per_layer else mass[head : head + 1]
            entropy = observe(
                asked,
                watch.first,
                keys,
                self.scale,
                received,
                by_entropy,
                stamped,
                self.scratch,
                softcap=self.softcap,
                sinks=sinks[head],
            )
            if by_entropy:
                watched.entropies[self.layer] += entropy / query.shape[1]


def watching_bytes(
    tokens: int, kv_heads: Sequence[int], group: int, head_size: int, dtype: torch.dtype
) -> int:
    """Bytes that it takes on a device to watch prompts, and to choose what is kept of them.

    Args:
        tokens: Tokens of the prompts that are read at a time, in all.
        kv_heads: KV heads of each retrieval layer.
        group: Query heads per KV head.
        head_size, dtype: Head size and dtype of the cache.
    """
    sums = torch.float32.itemsize * tokens * sum(kv_heads)
    ranks = RANKED * tokens * max(kv_heads, default=0)
    return sums + ranks + observing_bytes(tokens, group, head_size, dtype, DEVICE_SCRATCH)
