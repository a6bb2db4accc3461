"""Prompts that retrieve: the queries of each chunk select pages by the index of the method."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.kernels import Chooser, Contexts, DecodeRows, Ops, PromptLists, Selection
from vllm_kvretrieval.methods.prompt_chunks import ChunkPlanner, Chunks, Division, Prompts, int32
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.pooling import Pooling
from vllm_kvretrieval.retrieval.prompt_shares import ONE_IN, nearest

AT_ONCE = 8
"""Chunks whose queries are compared together, so that little memory is taken."""


class PromptReads(NamedTuple):
    """How the KV heads of a worker's retrieval layers read prompts that retrieve.

    Attributes:
        late: The part of those in layers behind ``prefill_depth``.
        shares: float64 [heads, ONE_IN]; shares of the others in what is selected, see
            :meth:`~vllm_kvretrieval.retrieval.prompt_shares.PromptShares.of`.
    """

    late: float = 0.0
    shares: np.ndarray = np.ones((1, len(ONE_IN)))

    @property
    def highest(self) -> float:
        """The largest of these shares."""
        return float(self.shares.max())


@dataclass
class PageChunks(Chunks[PromptLists]):
    """Chunks that select pages. One that attends to its whole context is all window.

    Attributes:
        queries: [R, n or more].
        samples: n; how many queries of a chunk select. Where there are more, those do, per query
            head, that are least like the mean of all.
        shares: int64 [R]; which of its shares a KV head has, a place in ``ONE_IN``.
        places: int32 [>= pages]; where each page is laid out; None: pages are read where they are.
        late: The same chunks in layers behind ``prefill_depth``; None: there are none.
    """

    samples: int
    shares: torch.Tensor
    places: torch.Tensor | None
    late: "PageChunks | None" = None

    def of_layer(self, late: bool) -> "PageChunks":
        """These chunks, as a layer reads them.

        Args:
            late: Whether it lies behind ``prefill_depth``.
        """
        return self.late if late and self.late is not None else self

    def grouped(self, query: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """The queries that select, as one token per chunk whose KV heads have more query heads.

        Args:
            query: [tokens, num_heads, head_size]; the step's.
            kv_heads: KV heads of the layer.

        Returns:
            [R, kv_heads * n * group, head_size].
        """
        if self.queries.shape[1] == self.samples:
            sampled = query[self.queries]
        else:
            again = self.queries == self.queries.roll(1, dims=1)
            again[:, 0] = False
            parts = zip(self.queries.split(AT_ONCE), again.split(AT_ONCE), strict=True)
            sampled = torch.cat([_dissimilar(query[of], mask, self.samples) for of, mask in parts])
        return sampled.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(1, 3)

    def counts(self, shares: torch.Tensor) -> torch.Tensor:
        """int32 [R, KV heads]; pages that each head selects, if the context has as many.

        Args:
            shares: float64 [ONE_IN, KV heads]; of a layer.
        """
        return (self.rows.select[:, None] * shares[self.shares]).round().int()

    def listed(self) -> PromptLists:
        """The pages that a layer attends to, once they are selected."""
        heads, entries = self.lists.kv_heads, self.lists.entries
        if self.places is not None:
            # Behind the end of a list is anything.
            pages = (entries // heads).clamp_(0, len(self.places) - 1)
            entries.copy_(self.places[pages] * heads + entries % heads)
        before = self.lists.starts.diff() - 1
        return replace(self.lists, seen=self.rows.lengths - before.repeat_interleave(heads))


class PageChunkPlanner(ChunkPlanner):
    """Plans chunks of prompts, which attend to pages that some of their queries select.

    Args:
        config: Options of the engine, with a ``prefill_budget``.
        kv_heads: KV heads of a layer.
        reads: How all heads of the worker read prompts.
    """

    def __init__(
        self, config: RetrievalConfig, kv_heads: int, reads: PromptReads | None = None
    ) -> None:
        super().__init__(config)
        assert config.prefill_queries is not None
        self.kv_heads, self.samples = kv_heads, config.prefill_queries
        self.reads = reads or PromptReads()
        assert config.prefill_depth is not None
        self.all_layers = config.prefill_depth == 1
        # How many queries of a chunk its samples are chosen from.
        self.among = self.samples if config.prefill_sampling != "dissimilar" else self.chunk

    def _before(self, begins: np.ndarray, budgets: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """A chunk that begins within a page attends to all of the page, too."""
        return super()._before(begins, budgets, shares) + begins % self.page_size

    def plan(self, prompts: Prompts) -> PageChunks:
        """See :meth:`ChunkPlanner.plan`.

        A chunk selects the pages that it attends to beside sink, window and its own.
        """
        method, division, always, tokens, block_table, start, _, staged = prompts
        new, laid_out = division.new, None if staged is None else _places(staged)
        rows, lists = self._rows(division, always, block_table)
        shares = torch.from_numpy(self._shares(division, always, rows.select.numpy()))
        # The last query of each of as many equal parts; a short chunk takes some more than once.
        steps = np.arange(1, self.among + 1)
        places = np.maximum(steps * new[:, None] // self.among, 1) - 1
        queries = start + lists.starts[:-1, None] + torch.from_numpy(places)
        chunks = PageChunks(method, queries, rows, lists, self.samples, shares, laid_out)
        if not self.all_layers:
            late = self._rows(self.late(division, always, tokens), always, block_table)
            chunks.late = PageChunks(method, queries, *late, self.samples, shares, laid_out)
        return chunks

    def late(self, division: Division, always: np.ndarray, tokens: np.ndarray) -> Division:
        """The same tokens in layers behind ``prefill_depth``; see :meth:`skipped`.

        Their chunks attend to sink and window, but for the last ones of prompts, whose last query
        gives the first token of the answer.
        """
        least = always.sum(0)[division.request] * self.page_size
        least += (division.ends - division.new) % self.page_size + division.new
        cut = division.sparse & (division.ends < tokens[division.request])
        return division._replace(attended=np.where(cut, least, division.attended))

    def skipped(self, division: Division, always: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """See :meth:`ChunkPlanner.skipped`; float64 [prompts]."""
        count, by_late = len(tokens), self.reads.late
        between, select = self._between(division, always)
        shares = self.reads.shares[:, self._shares(division, always, select)]
        more = np.minimum(np.rint(select * shares), between).mean(0) - select
        left = division.ends - division.attended - more * self.page_size
        skipped = (1 - by_late) * np.bincount(division.request, left * division.new, count)
        if by_late:
            skipped += by_late * self.late(division, always, tokens).skipped(count)
        return skipped

    def _shares(self, division: Division, always: np.ndarray, select: np.ndarray) -> np.ndarray:
        """int64 [C]; by which of its shares a KV head selects, a place in ``ONE_IN``.

        A chunk that begins behind a prefix in the cache selects as a whole one does.

        Args:
            division: How the prompts are divided.
            always: See :meth:`skipped`.
            select: int [C]; pages that a head selects on average.
        """
        begins = (division.ends - division.new) // self.chunk * self.chunk
        return nearest(begins // self.page_size - always.sum(0)[division.request], select)

    def _between(self, division: Division, always: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pages between sink and window of chunks, and how many of them are selected, int64 [C]."""
        begins, sparse = division.ends - division.new, division.sparse
        apart = always.sum(0)[division.request]
        select = ((division.attended - division.new) // self.page_size - apart) * sparse
        return (begins // self.page_size - apart) * sparse, select

    def _rows(
        self, division: Division, always: np.ndarray, block_table: torch.Tensor
    ) -> tuple[DecodeRows, PromptLists]:
        """The rows of the plan, and their lists for attention, of KV heads with equal shares."""
        ends, new, sparse = division.ends, division.new, division.sparse
        pages, before = -(-ends // self.page_size), (ends - new) // self.page_size
        sink, window = always[:, division.request] * sparse
        between, select = self._between(division, always)
        window = np.where(sparse, window + pages - before, pages)
        longest = np.minimum(np.ceil(select * self.reads.highest).astype(np.int64), between)
        width = int((sink + np.maximum(select, longest) + window).max())
        count = len(ends)
        tables = block_table[torch.from_numpy(division.request)]
        rows = DecodeRows.selecting(
            Contexts(tables, int32(ends), torch.arange(count, dtype=torch.int32)),
            torch.empty(count * self.kv_heads, width, dtype=torch.int32),
            sink=int32(sink),
            window=int32(window),
            select=int32(select),
            corrected=torch.zeros(count, dtype=torch.int64),
        )
        starts = np.concatenate([[0], new.cumsum()])
        seen = int32(division.attended - new + 1).repeat_interleave(self.kv_heads)
        return rows, PromptLists(rows.lists, int32(starts), seen, self.kv_heads, per_head=True)


class ChunkSelection(NamedTuple):
    """The state by which a layer selects for chunks of prompts, by any method.

    Attributes:
        selection: A row per chunk; layers of one shape share it.
        late: Whether the layer lies behind ``prefill_depth``.
        shares: float64 [ONE_IN, KV heads]; their shares in what is selected; None: all are equal.
    """

    selection: Selection
    late: bool
    shares: torch.Tensor | None


class PageSelector:
    """How a layer selects for chunks of prompts by one method.

    Args:
        chooser: Of the method, for rows that decode.
        selection: Its selections for chunks.
        pooling: How the scores of a chunk's queries become one.
    """

    def __init__(self, chooser: Chooser, selection: ChunkSelection, pooling: Pooling) -> None:
        self.late, self._shares = selection.late, selection.shares
        self._chooser = Chooser(
            chooser.store, selection.selection, pooling, chooser.scale, outliers=chooser.outliers
        )

    def select(self, kernels: Ops, query: torch.Tensor, chunks: PageChunks) -> PromptLists:
        """See :meth:`LayerMethod.prompt`."""
        chooser, chunks = self._chooser, chunks.of_layer(self.late)
        if self._shares is not None:
            counts = chooser.selection.counts
            assert counts is not None
            counts[: len(chunks.rows)] = chunks.counts(self._shares)
        queries = chunks.grouped(query, chooser.store.kv_heads)
        kernels.plan_decode(queries, chunks.rows, chooser)
        return chunks.listed()


def is_late(config: RetrievalConfig, number: int, layers: int) -> bool:
    """Whether a layer lies behind ``prefill_depth``.

    Args:
        config: Options of the engine.
        number: The layer's.
        layers: How many the model has.
    """
    depth = config.prefill_depth
    return depth is not None and number >= round(depth * layers)


def _dissimilar(query: torch.Tensor, again: torch.Tensor, samples: int) -> torch.Tensor:
    """The queries of chunks that are least like the mean of all, by cosine (QuoKA, section 3).

    Args:
        query: [R, n, num_heads, head_size].
        again: bool [R, n]; the queries that repeat the one before, in a short chunk. They do not
            count in the mean, and are taken after all others.
        samples: How many to take per chunk and query head.

    Returns:
        [R, samples, num_heads, head_size]; each head's own.
    """
    wide, counted = query.float(), (~again).sum(1)
    mean = wide.masked_fill(again[..., None, None], 0).sum(1) / counted[:, None, None]
    cosines = torch.cosine_similarity(wide, mean[:, None], dim=-1) + 4.0 * again[..., None]
    chosen = cosines.topk(samples, dim=1, largest=False).indices
    return query.gather(1, chosen[..., None].expand(-1, -1, -1, query.shape[-1]))


def _places(staged: torch.Tensor) -> torch.Tensor:
    """int32; where each page is among those that are laid out."""
    places = torch.zeros(int(staged.max()) + 1, dtype=torch.int32)
    used = torch.where(staged >= 0)[0]
    places[staged[used]] = used.int()
    return places
