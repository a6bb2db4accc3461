"""Prompts whose chunks attend to tokens that filter layers select for them (OmniKV, D.10)."""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_kvretrieval.kernels import Contexts, ContextSelector, DecodeRows, TokenLists
from vllm_kvretrieval.methods.prompt_chunks import ChunkPlanner, Chunks, Prompts, int32
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.roles import OBSERVATIONS

WEIGHTS = OBSERVATIONS["uniform"]
"""The weights of a chunk's last queries, by which filters select for it."""


@dataclass
class TokenChunks(Chunks[TokenLists]):
    """Chunks that filters select tokens for; the window takes in what lies right before them.

    Rows have seats of their own, their numbers in the step. The entries of lists are the rows'.

    Attributes:
        queries: [R * n]; the last ones of each.
        weights: float32 [R, n]; of these.
        listed: The filter layer whose selection the lists hold.
    """

    weights: torch.Tensor
    listed: ContextSelector | None = None


class TokenChunkPlanner(ChunkPlanner):
    """Plans chunks of prompts, which attend to tokens that filter layers select for them.

    Args:
        config: With a ``prefill_budget``.
        kv_heads: KV heads of the layers that follow a filter.
    """

    gathers = True

    def __init__(self, config: RetrievalConfig, kv_heads: int) -> None:
        super().__init__(config)
        self.kv_heads = kv_heads
        parts = config.page_budget(config.prefill_budget)
        self.sink, self.window, self.select = (
            pages * config.page_size for pages in (parts.sink, parts.window, parts.select)
        )

    def plan(self, prompts: Prompts) -> TokenChunks:
        """See :meth:`ChunkPlanner.plan`."""
        rows, new = self._rows(prompts), prompts.division.new
        lists = TokenLists(rows.lists, rows.lengths, 1, self.kv_heads)
        queries, weights = _last_queries(prompts.start + new.cumsum(), new)
        return TokenChunks(prompts.method, queries, rows, lists, weights)

    def _rows(self, prompts: Prompts) -> DecodeRows:
        chunks, seat = prompts.division, prompts.first
        lens, count, sparse = chunks.attended, len(chunks.new), chunks.sparse
        sink, select = sparse * self.sink, sparse * self.select
        seats = torch.arange(seat, seat + count, dtype=torch.int32)
        context = prompts.block_table[torch.from_numpy(chunks.request)]
        return DecodeRows.selecting(
            Contexts(context, int32(chunks.ends), seats),
            torch.empty(count * self.kv_heads, int(lens.max()), dtype=torch.int32),
            lengths=int32(lens.repeat(self.kv_heads)),
            sink=int32(sink),
            window=int32(lens - sink - select),
            select=int32(select),
            corrected=torch.zeros(seat + count, dtype=torch.int64),
            per_token=True,
        )


def _last_queries(ends: np.ndarray, new: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries and weights of chunks, given where they end among the step's tokens."""
    window = len(WEIGHTS)
    back = np.arange(window, 0, -1)
    queries = ends[:, None] - np.minimum(back, new[:, None])
    weights = np.where(back <= new[:, None], WEIGHTS, 0.0)
    return torch.from_numpy(queries.flatten()), torch.from_numpy(weights).float()
