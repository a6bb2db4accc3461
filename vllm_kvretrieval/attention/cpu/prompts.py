"""How the requests of a step that read their prompts attend."""

from itertools import pairwise

import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_kvretrieval.attention.cpu.blocks import BlockPlanner
from vllm_kvretrieval.attention.cpu.chunks import ChunkPlanner
from vllm_kvretrieval.attention.cpu.division import Division
from vllm_kvretrieval.attention.cpu.plans import Prefill
from vllm_kvretrieval.attention.cpu.schedules import Scheduler
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.engine.requests import RequestTable
from vllm_kvretrieval.kernels import PromptLists


class PromptPlanner:
    """Plans prompts for layers that share metadata.

    Args:
        requests: Table of the running requests.
        scheduler: Makes vLLM's schedules; None: our own kernel attends to whole contexts.
        staging: Where contexts are laid out.
        in_place: Whether contexts can be read where they are.
        kv_heads: KV heads of each layer.
    """

    def __init__(
        self,
        requests: RequestTable,
        scheduler: Scheduler | None,
        staging: PrefillStaging | None,
        in_place: bool,
        kv_heads: int,
    ) -> None:
        self._requests, self._scheduler, self._kv_heads = requests, scheduler, kv_heads
        self._staging, self._in_place = staging, in_place
        # Our own kernel reads every layout, but in place only.
        self._lays_out = None if scheduler is None and in_place else staging
        self._page_size = requests.config.page_size
        self._sparse: ChunkPlanner | BlockPlanner | None = None
        if requests.config.prefill_queries is not None:
            highest = requests.prompt_reads.highest
            self._sparse = BlockPlanner(requests.config, kv_heads, highest)
        elif requests.config.prefill_budget is not None:
            self._sparse = ChunkPlanner(requests.config)

    def places(self, dense: CPUAttentionMetadata, rows: int) -> np.ndarray:
        """The places of the requests to plan, int64 [n], rising.

        A chunk of a prompt that retrieves may be a single token: that of a prompt's last token.

        Args:
            dense: vLLM's metadata of the batch.
            rows: How many requests of a single token lead it.
        """
        longer = np.arange(rows, len(dense.seq_lens))
        if self._sparse is None:
            return longer
        seats = self._requests.seats[:rows]
        reads = ~self._requests.decodes(seats, dense.seq_lens.numpy()[:rows])
        return np.append(
            np.flatnonzero(reads & self._requests.prefill_budgets(seats).any(0)), longer
        )

    def plan(self, dense: CPUAttentionMetadata, places: np.ndarray) -> list[Prefill]:
        """Plan the requests with these places, as :meth:`places` gives them."""
        if not len(places):
            return []
        if self._sparse is None:
            return self._exactly(dense, slice(int(places[0]), len(dense.seq_lens)))
        seats = self._requests.seats[places]
        budgets = self._requests.prefill_budgets(seats)
        sparse = budgets.any(0)
        lens = dense.seq_lens.numpy()[places]
        new = np.diff(dense.query_start_loc.numpy())[places]
        pairs = new * (2 * lens.astype(np.int64) - new + 1) // 2
        sums = budgets.sum(0) * self._page_size
        shares = self._requests.prefill_shares(seats)
        division = self._sparse.divide(lens, new, sums, shares)
        ends = self._requests.ends[seats]
        skipped = self._skipped(self._sparse, division, budgets[:2], ends)
        read = pairs - np.where(sparse, skipped, 0).astype(np.int64)
        self._requests.count_prefill(seats, lens, pairs, read)
        sparse &= lens > self._sparse.exact
        methods = np.where(sparse, self._requests.records["method"][seats], -1)
        parts = list[Prefill]()
        borders = np.flatnonzero((np.diff(methods) != 0) | (np.diff(places) != 1)) + 1
        for begin, end in pairwise([0, *borders.tolist(), len(sparse)]):
            requests = slice(int(places[begin]), int(places[end - 1]) + 1)
            divided = division.of(slice(begin, end))
            if not sparse[begin]:
                parts += self._exactly(dense, requests)
            elif isinstance(self._sparse, BlockPlanner):
                of = slice(begin, end)
                by = self._sparse, int(methods[begin]), divided, budgets[:2, of], ends[of]
                parts += self._blocks(dense, requests, *by)
            else:
                parts += self._chunks(dense, requests, self._sparse, divided, parts)
        return parts

    def _skipped(
        self,
        by: ChunkPlanner | BlockPlanner,
        division: Division,
        always: np.ndarray,
        tokens: np.ndarray,
    ) -> np.ndarray:
        """Pairs of tokens that KV heads leave out of each prompt, on average."""
        count = len(tokens)
        if isinstance(by, ChunkPlanner):
            return division.skipped(count)
        reads = self._requests.prompt_reads
        skipped = by.skipped(division, always, reads, count)
        if reads.late:
            skipped += reads.late * by.late(division, always, tokens).skipped(count)
        return skipped

    def in_cache(self, dense: CPUAttentionMetadata, requests: slice) -> Prefill:
        """Requests whose contexts are read where they are."""
        first = int(dense.query_start_loc[requests.start])
        return Prefill(first, self._part(dense, requests, dense.block_table[requests]), None)

    def row(self, dense: CPUAttentionMetadata, row: int) -> Prefill:
        """A row of one token that attends to a whole context, read as prompts are."""
        assert self._staging is not None, "what is not read in place is laid out"
        alone = slice(row, row + 1)
        starts = dense.query_start_loc[row : row + 2]
        (staged,) = self._staging.plan(dense.block_table[alone], dense.seq_lens[alone], starts)
        return Prefill(row, self._part(dense, alone, staged.block_table), staged.pages)

    def _exactly(self, dense: CPUAttentionMetadata, requests: slice) -> list[Prefill]:
        first, starts = requests.start, dense.query_start_loc[requests.start : requests.stop + 1]
        lens, table = dense.seq_lens[requests], dense.block_table[requests]
        staged = self._lays_out.plan(table, lens, starts) if self._lays_out else []
        if not staged:
            return [self.in_cache(dense, requests)]
        return [
            Prefill(
                int(starts[part.requests.start]),
                self._part(
                    dense,
                    slice(first + part.requests.start, first + part.requests.stop),
                    part.block_table,
                ),
                part.pages,
            )
            for part in staged
        ]

    def _chunks(
        self,
        dense: CPUAttentionMetadata,
        requests: slice,
        by: ChunkPlanner,
        division: Division,
        earlier: list[Prefill],
    ) -> list[Prefill]:
        """Requests whose prompts are divided into chunks, after those of this step before them."""
        assert self._staging is not None, "chunks are laid out"
        seat = sum(len(part.chunks.rows) for part in earlier if part.chunks is not None)
        planned = by.plan(
            division,
            dense.block_table[requests],
            int(dense.query_start_loc[requests.start]),
            self._staging,
            self._kv_heads,
            seat,
        )
        parts = list[Prefill]()
        for chunks in planned:
            lens = chunks.lists.lengths[:: self._kv_heads].contiguous()
            lists = self._sequences(dense, chunks.query_start_loc, lens, chunks.block_table)
            parts.append(Prefill(chunks.start, lists, None, chunks))
        return parts

    def _blocks(
        self,
        dense: CPUAttentionMetadata,
        requests: slice,
        by: BlockPlanner,
        method: int,
        division: Division,
        always: np.ndarray,
        tokens: np.ndarray,
    ) -> list[Prefill]:
        """Requests whose prompts are divided into blocks that select pages by a method."""
        starts = dense.query_start_loc[requests.start : requests.stop + 1]
        lens, table = dense.seq_lens[requests], dense.block_table[requests]
        whole = slice(0, len(lens))
        turns: list[tuple[slice, torch.Tensor | None]] = [(whole, None)]
        if not self._in_place:
            assert self._staging is not None, "what is not read in place is laid out"
            staged = self._staging.plan(table, lens, starts)
            turns = [(part.requests, part.pages) for part in staged]
        parts = list[Prefill]()
        for own, pages in turns:
            first = int(starts[own.start])
            of_own = division.of(own), always[:, own], table[own]
            blocks = by.plan(method, *of_own, first, tokens[own], pages)
            parts.append(Prefill(first, blocks.lists, pages, blocks=blocks))
        return parts

    def _part(
        self, dense: CPUAttentionMetadata, requests: slice, block_table: torch.Tensor
    ) -> CPUAttentionMetadata | PromptLists:
        """How some of the requests attend, their tokens counted from the first of them."""
        starts = dense.query_start_loc[requests.start : requests.stop + 1]
        lens = dense.seq_lens[requests]
        return self._sequences(dense, starts - starts[0], lens, block_table)

    def _sequences(
        self,
        dense: CPUAttentionMetadata,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> CPUAttentionMetadata | PromptLists:
        """How sequences of queries attend to the contexts that end with them."""
        if self._scheduler is not None:
            return self._scheduler.of_sequences(dense, query_start_loc, seq_lens, block_table)
        seen = seq_lens - query_start_loc.diff() + 1
        return PromptLists(block_table, query_start_loc, seen, self._kv_heads)
