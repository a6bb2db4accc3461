"""Prefill reads its context in blocks of vLLM's own size, not in the smaller pages of retrieval."""

from typing import NamedTuple

import numpy as np
import torch

BLOCK_SIZE = 128
"""vLLM's own choice for the CPU. Its kernel takes 7 to 12 % longer over blocks of 32 tokens."""

ISAS = ("vec", "vec16")
"""Variants of vLLM's kernel, by its own names, whose layout of a block the copy knows."""

WORTHWHILE_QUERIES = 128
"""Copying the context pays for itself from about this many queries on."""


class StagedContext(NamedTuple):
    """The context of a step's prefilling requests, laid out one after the other.

    Attributes:
        pages: int32 [n]; the pages to copy, in order.
        block_table: int32 [requests, blocks]; where each request's context then lies.
    """

    pages: torch.Tensor
    block_table: torch.Tensor


class PrefillStaging:
    """Room for one layer's context of the longest request, used by one layer after the other.

    Args:
        page_size: Tokens per page; must divide ``BLOCK_SIZE``.
        kv_heads, head_size, dtype: Of the KV cache.
        max_tokens: Tokens of the longest context.
    """

    def __init__(
        self, page_size: int, kv_heads: int, head_size: int, dtype: torch.dtype, max_tokens: int
    ) -> None:
        blocks = -(-max_tokens // BLOCK_SIZE)
        self.pages_per_block = BLOCK_SIZE // page_size
        self.buffer = torch.empty(blocks, kv_heads, BLOCK_SIZE, 2 * head_size, dtype=dtype)

    def plan(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> StagedContext | None:
        """How to stage these requests' context; None where it does not fit or would not pay.

        Args:
            block_table: int32 [requests, >= pages]; page ids in context order.
            seq_lens: int32 [requests]; tokens of context, those of this step included.
            query_start_loc: int32 [requests + 1]; first token of each request in the step.
        """
        lens = seq_lens.numpy().astype(np.int64)
        queries = np.diff(query_start_loc.numpy())
        blocks = -(-lens // BLOCK_SIZE)
        if blocks.sum() > len(self.buffer) or lens @ queries < WORTHWHILE_QUERIES * lens.sum():
            return None
        table = block_table.numpy()
        last = table.shape[1] - 1
        # A last block is filled up with whatever page comes next: nobody attends to it.
        pages = [
            table[request, np.minimum(np.arange(count * self.pages_per_block), last)]
            for request, count in enumerate(blocks)
        ]
        starts = np.cumsum(blocks) - blocks
        staged = starts[:, None] + np.arange(blocks.max())
        return StagedContext(
            torch.from_numpy(np.concatenate(pages)),
            torch.from_numpy(np.minimum(staged, len(self.buffer) - 1).astype(np.int32)),
        )
