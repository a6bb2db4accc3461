"""Prefill reads its context in blocks of vLLM's own size, not in the smaller pages of retrieval."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig

BLOCK_SIZE = 128
"""vLLM's own choice for the CPU; larger pages are blocks of their own.

Its kernel takes 7 to 12 % longer over blocks of 32 tokens.
"""

ISAS = ("vec", "vec16")
"""Variants of vLLM's kernel, by its own names, whose pages the copy lays out as blocks."""

ISAS_OF_ROWS = (*ISAS, "amx")
"""Variants for which the copy can lay out pages of rows."""

WORTHWHILE_QUERIES = 128
"""Copying the context pays for itself from about this many queries on."""


def blocks_for(tokens: int, page_size: int) -> tuple[int, int]:
    """How many blocks hold so many tokens, and the tokens of a block."""
    size = max(page_size, BLOCK_SIZE)
    return -(-tokens // size), size


class StagedContext(NamedTuple):
    """The context of some of a step's prefilling requests, laid out one after the other.

    Attributes:
        requests: Which of those that prefill.
        pages: int32 [n]; the pages to copy, in order. Of an encoded home int64, and -1 for none.
        block_table: int32 [requests, blocks]; where each request's context then lies.
    """

    requests: slice
    pages: torch.Tensor
    block_table: torch.Tensor


class PrefillStaging:
    """Room for one layer's context of the longest request, used by one layer after the other.

    Args:
        page_size: Tokens per page, a power of two.
        kv_heads, head_size, dtype: Sizes of the KV cache.
        max_tokens: Tokens of the longest context.
        isa: Variant of vLLM's kernel that reads it.
        rows: Whether the KV cache has rows, which that kernel does not read.
        encoded: Whether its pages are encoded, which it does not read either.
    """

    def __init__(
        self,
        page_size: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        max_tokens: int,
        isa: str = "vec",
        rows: bool = False,
        encoded: bool = False,
    ) -> None:
        blocks, self.block_size = blocks_for(max_tokens, page_size)
        self.pages_per_block = self.block_size // page_size
        self.page_size, self.isa = page_size, isa
        self.rows, self.encoded = rows, encoded
        self.buffer = torch.empty(blocks, kv_heads, self.block_size, 2 * head_size, dtype=dtype)

    @property
    def pages(self) -> torch.Tensor:
        """[pages, kv_heads, page_size, 2 * head_size]; the same memory, for pages as they are."""
        _, kv_heads, _, width = self.buffer.shape
        return self.buffer.view(-1, kv_heads, self.page_size, width)

    def plan(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> list[StagedContext]:
        """How to stage these requests' context: all of it at once, or in turns, as it fits.

        Args:
            block_table: int32 [requests, >= pages]; page ids in context order.
            seq_lens: int32 [requests]; tokens of context, those of this step included.
            query_start_loc: int32 [requests + 1]; first token of each request in the step.

        Returns:
            Nothing where the KV cache itself is to be read, since copying would not pay, or since
            what could be does not fit at once.
        """
        lens = seq_lens.numpy().astype(np.int64)
        blocks = -(-lens // self.block_size)
        table = block_table.numpy()
        if self.rows or self.encoded:
            return [self._lay_out(table, lens, blocks, turn) for turn in self.turns(blocks)]
        queries = np.diff(query_start_loc.numpy())
        if blocks.sum() > len(self.buffer) or lens @ queries < WORTHWHILE_QUERIES * lens.sum():
            return []
        return [self._lay_out(table, lens, blocks, slice(0, len(blocks)))]

    def turns(self, blocks: np.ndarray) -> list[slice]:
        """Adjacent contexts of so many blocks, as many together as fit; one does."""
        firsts, room = list[int](), 0
        for request, count in enumerate(blocks.tolist()):
            if count > room:
                firsts.append(request)
                room = len(self.buffer)
            room -= count
        return [slice(*pair) for pair in pairwise([*firsts, len(blocks)])]

    def _lay_out(
        self, table: np.ndarray, lens: np.ndarray, blocks: np.ndarray, requests: slice
    ) -> StagedContext:
        table, lens, blocks = table[requests], lens[requests], blocks[requests]
        counts = -(-lens // self.page_size)
        # A last block is filled up with the last page: nobody attends to it there.
        pages = [
            table[request, np.minimum(np.arange(some * self.pages_per_block), counts[request] - 1)]
            for request, some in enumerate(blocks)
        ]
        if self.encoded:  # nor has it to be read
            for own, count in zip(pages, counts, strict=True):
                own[count:] = -1
        return StagedContext(
            requests,
            torch.from_numpy(np.concatenate(pages)).to(
                torch.int64 if self.encoded else torch.int32
            ),
            self.block_table(blocks),
        )

    def block_table(self, blocks: np.ndarray) -> torch.Tensor:
        """int32 [n, >= blocks]; where contexts of so many blocks lie, one after the other."""
        starts = np.cumsum(blocks) - blocks
        staged = starts[:, None] + np.arange(blocks.max())
        return torch.from_numpy(np.minimum(staged, len(self.buffer) - 1).astype(np.int32))


def staging_for(
    shape: tuple[int, int, torch.dtype],
    isa: str,
    config: RetrievalConfig,
    encoded: bool,
    model: str,
    max_tokens: int,
) -> PrefillStaging | None:
    """Room for layers of one shape; None where vLLM's kernel reads their pages as well.

    Args:
        shape: KV heads, head size and dtype of the KV cache.
        isa: Variant of vLLM's kernel that reads it.
        config: Options of the engine.
        encoded: Whether the pages are encoded.
        model: The model's name, for messages.
        max_tokens: Tokens of the longest context.

    Raises:
        RetrievalConfigError: The layout that vLLM chose cannot be encoded.
    """
    page_size, rows = config.page_size, config.rows
    if isa not in (ISAS_OF_ROWS if rows else ISAS):
        if encoded:
            raise RetrievalConfigError(
                f"kv_retrieval.codec={config.codec} cannot encode pages of {model}, whose keys "
                f"vLLM lays out for {isa}; use codec=raw."
            )
        return None
    if page_size >= BLOCK_SIZE and not (rows or encoded):
        return None
    return PrefillStaging(page_size, *shape, max_tokens, isa, rows, encoded)
