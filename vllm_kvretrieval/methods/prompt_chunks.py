"""The division of prompts into chunks, each attending to a part of the tokens before it."""

from dataclasses import dataclass
from math import ceil
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from vllm_kvretrieval.kernels import DecodeRows, PromptLists, TokenLists
from vllm_kvretrieval.options.engine import RetrievalConfig

Lists = TypeVar("Lists", PromptLists, TokenLists)


@dataclass
class Chunks(Generic[Lists]):
    """Adjacent chunks of a step that select by one method; each is a row.

    Attributes:
        method: The method's number among those of the engine.
        queries: int64; places of queries that select among the step's tokens.
        rows: Their selections. The window of a row ends with the chunk itself.
        lists: The same for attention, their own tokens at the end: pages; or tokens, which are laid
            out one after the other.
    """

    method: int
    queries: torch.Tensor
    rows: DecodeRows
    lists: Lists


class Division(NamedTuple):
    """Prompts of a step, divided into chunks; int64 [C] each, in the order of the step's tokens.

    Attributes:
        request: Which one of the prompts.
        ends: Tokens of its context up to the chunk's end.
        new: Tokens of the chunk.
        sparse: bool; whether it attends to a part of the tokens before it.
        attended: Tokens that it attends to, its own included.
    """

    request: np.ndarray
    ends: np.ndarray
    new: np.ndarray
    sparse: np.ndarray
    attended: np.ndarray

    def of(self, prompts: slice) -> "Division":
        """The chunks of adjacent prompts, which are counted from the first of these."""
        first, end = np.searchsorted(self.request, (prompts.start, prompts.stop))
        part = self.chunks(slice(first, end))
        return part._replace(request=part.request - prompts.start)

    def chunks(self, some: slice) -> "Division":
        """Some of the chunks."""
        return Division(*(of_each[some] for of_each in self))

    def skipped(self, prompts: int) -> np.ndarray:
        """int64 [prompts]; pairs of tokens that are left out of each prompt."""
        pairs = (self.ends - self.attended) * self.new
        return np.bincount(self.request, pairs, prompts).astype(np.int64)


class Prompts(NamedTuple):
    """Adjacent prompts of a step, or some of their chunks, that select by one method.

    Attributes:
        method: The method's number among those of the engine.
        division: Their chunks.
        always: int [2, prompts]; pages of sink, and of the window before a chunk.
        tokens: int [prompts]; see :attr:`Note.tokens`.
        block_table: int32 [prompts, >= pages]; theirs.
        start: The first token of the chunks in the step.
        first: The number of the first chunk among those of the step that select.
        staged: int64 [n]; the pages that are laid out to be read, in order, -1 for none; None: they
            are read where they are, or what is selected of them is laid out.
    """

    method: int
    division: Division
    always: np.ndarray
    tokens: np.ndarray
    block_table: torch.Tensor
    start: int
    first: int
    staged: torch.Tensor | None = None

    def of(self, prompts: slice, staged: torch.Tensor) -> "Prompts":
        """The chunks of some of the prompts, whose pages are laid out."""
        borders = np.searchsorted(self.division.request, (prompts.start, prompts.stop))
        return self.chunks(slice(*borders.tolist()))._replace(staged=staged)

    def chunks(self, some: slice) -> "Prompts":
        """Some of the chunks."""
        return self._replace(
            division=self.division.chunks(some),
            start=self.start + int(self.division.new[: some.start].sum()),
            first=self.first + some.start,
        )


class ChunkPlanner:
    """Divides prompts into chunks, and plans the chunks that select pages or tokens.

    Chunks begin at multiples of their length, wherever a step begins, so that the same tokens
    mostly are one in any company. Those that begin within the budget are one chunk, which is exact.

    Args:
        config: Options of the engine, with a ``prefill_budget``.

    Attributes:
        gathers: Whether chunks list tokens, which are then laid out one after the other. If false,
            they list pages.
    """

    gathers = False

    def __init__(self, config: RetrievalConfig) -> None:
        assert config.prefill_budget is not None
        assert config.prefill_chunk is not None
        assert config.prefill_share is not None
        self.budget, self.chunk = config.prefill_budget, config.prefill_chunk
        self.share, self.page_size = config.prefill_share, config.page_size
        self.exact = config.exact_prefill
        """Tokens at the start of a prompt that attend to everything before them."""

    def most(self, tokens: int, requests: int) -> int:
        """Most chunks in a step of so many tokens and requests."""
        return tokens // self.chunk + 2 * requests

    def most_attended(self, longest: int, highest: float = 1.0) -> int:
        """Most pages before a chunk that a KV head attends to.

        Args:
            longest: Tokens of the longest context.
            highest: The largest share of a KV head in what is selected.
        """
        begins, budgets, shares = (np.array([each]) for each in (longest, self.budget, self.share))
        pages = int(self._before(begins, budgets, shares)[0]) // self.page_size
        return pages if highest <= 1 else min(ceil(pages * highest), -(-longest // self.page_size))

    def _before(self, begins: np.ndarray, budgets: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Tokens before chunks that these attend to, int64 [C].

        Args:
            begins: int [C]; first tokens of the chunks. One that begins within a chunk, behind a
                prefix in the cache, counts as that chunk.
            budgets: int [C]; the least.
            shares: float [C]; of the tokens before the chunk, rounded up to pages.
        """
        pages = shares * (begins // self.chunk * self.chunk) / self.page_size
        pages = np.ceil(pages - 1e-9)  # a product such as 0.07 * 3200 is above the whole number
        return np.maximum(budgets, pages.astype(np.int64) * self.page_size)

    def divide(
        self,
        lens: np.ndarray,
        new: np.ndarray,
        budgets: np.ndarray | None = None,
        shares: np.ndarray | None = None,
    ) -> Division:
        """Divide prompts.

        Args:
            lens: int [n]; tokens of each context, those of the step included.
            new: int [n]; tokens of the step.
            budgets: int [n]; tokens before a chunk that it attends to; None: those of the engine,
                which are the most.
            shares: float [n]; of all tokens before a chunk, where they are more; None: as above.
        """
        request, ends, begins = list[int](), list[int](), list[int]()
        for r, (end, count) in enumerate(zip(lens.tolist(), new.tolist(), strict=True)):
            begin = end - count
            while begin < end:
                border = max((begin // self.chunk + 1) * self.chunk, self.exact)
                request.append(r)
                begins.append(begin)
                ends.append(min(border, end))
                begin = border
        to, first = np.array(ends, dtype=np.int64), np.array(begins, dtype=np.int64)
        of, sparse = np.array(request, dtype=np.int64), first >= self.exact
        least = np.full(len(lens), self.budget) if budgets is None else budgets
        share = np.full(len(lens), self.share) if shares is None else shares
        before = self._before(first, least[of], share[of])
        return Division(of, to, to - first, sparse, np.where(sparse, before + to - first, to))

    def plan(self, prompts: Prompts) -> Chunks[Any]:
        """Plan the selection of chunks, for all layers that share metadata."""
        raise NotImplementedError

    def skipped(self, division: Division, always: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Pairs of tokens that KV heads leave out of each prompt, on average.

        Args:
            division: How the prompts are divided.
            always, tokens: See :class:`Prompts`.
        """
        return division.skipped(len(tokens))


def int32(values: np.ndarray) -> torch.Tensor:
    """Whole numbers as the ops take them."""
    return torch.from_numpy(values.astype(np.int32))
