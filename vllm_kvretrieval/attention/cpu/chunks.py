"""Sparse prefill: chunks of a prompt attend to a part of what lies before them (OmniKV, D.10)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_kvretrieval.attention.cpu.division import Division, Divisor, int32
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.kernels import Contexts, ContextSelector, DecodeRows, TokenLists
from vllm_kvretrieval.retrieval.roles import OBSERVATIONS

if TYPE_CHECKING:
    from vllm_kvretrieval.options.engine import RetrievalConfig

WEIGHTS = OBSERVATIONS["uniform"]
"""The weights of a chunk's last queries, by which filters select for it."""


@dataclass
class Chunks:
    """Adjacent chunks of a step that are staged together; each is a row.

    Attributes:
        method: The number of the method that selects for them.
        rows: What filters select for, and what that is; the window is the chunk itself and what
            lies right before it. They have seats of their own, their numbers in the step.
        queries: int64 [R * n]; places of their last queries among the step's tokens.
        weights: float32 [R, n]; of these.
        lists: What they attend to, their own tokens at the end; its entries are the rows' lists.
        block_table: int32 [R, blocks]; where that lies in the staging buffer.
        start: The first token of the chunks in the step.
        query_start_loc: int32 [R + 1]; the first token of each, counted from there.
        listed: The filter layers whose selections the lists hold.
    """

    method: int
    rows: DecodeRows
    queries: torch.Tensor
    weights: torch.Tensor
    lists: TokenLists
    block_table: torch.Tensor
    start: int
    query_start_loc: torch.Tensor
    listed: ContextSelector | None = None


class ChunkPlanner(Divisor):
    """Plans chunks of prompts, which attend to tokens that filter layers select for them.

    Args:
        config: With a ``prefill_budget``.
    """

    def __init__(self, config: "RetrievalConfig") -> None:
        super().__init__(config)
        self.method = list(config.methods).index(config.method)
        parts = config.page_budget(config.prefill_budget)
        self.sink, self.window, self.select = (
            pages * config.page_size for pages in (parts.sink, parts.window, parts.select)
        )

    def plan(
        self,
        division: Division,
        block_table: torch.Tensor,
        start: int,
        staging: PrefillStaging,
        kv_heads: int,
        first_seat: int,
    ) -> list[Chunks]:
        """How chunks are staged: all at once, or in turns, as they fit.

        Args:
            division: How the prompts of adjacent requests are divided.
            block_table: int32 [requests, >= pages]; theirs.
            start: The first token of these requests in the step.
            staging: Where they are to be staged.
            kv_heads: KV heads of the layers that follow a filter.
            first_seat: The seat of the first chunk.
        """
        lens = division.attended
        blocks = -(-lens // staging.block_size)
        starts = start + np.concatenate([[0], division.new.cumsum()])
        made = []
        for turn in staging.turns(blocks):
            chunks = Division(*(of_each[turn] for of_each in division))
            begins = starts[turn.start : turn.stop + 1]
            rows = self._rows(chunks, block_table, lens[turn], kv_heads, first_seat + turn.start)
            lists = TokenLists(rows.lists, rows.lengths, 1, kv_heads)
            last = blocks[turn].cumsum()
            first = (last - blocks[turn])[:, None]
            table = np.minimum(first + np.arange(blocks[turn].max()), last[-1] - 1)
            queries, weights = _last_queries(begins[1:], chunks.new)
            starts_of = int32(begins - begins[0])
            where = int(begins[0])
            made.append(
                Chunks(self.method, rows, queries, weights, lists, int32(table), where, starts_of)
            )
        return made

    def _rows(
        self, chunks: Division, table: torch.Tensor, lens: np.ndarray, kv_heads: int, seat: int
    ) -> DecodeRows:
        count, sparse = len(lens), chunks.sparse
        sink, select = sparse * self.sink, sparse * self.select
        seats = torch.arange(seat, seat + count, dtype=torch.int32)
        context = table[torch.from_numpy(chunks.request)]
        return DecodeRows.selecting(
            Contexts(context, int32(chunks.ends), seats),
            torch.empty(count * kv_heads, int(lens.max()), dtype=torch.int32),
            lengths=int32(lens.repeat(kv_heads)),
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
