"""What a step looks like to the layers: built once per step, shared by all layers of a group."""

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_kvretrieval.attention.cpu.blocks import BlockPlanner
from vllm_kvretrieval.attention.cpu.chunks import ChunkPlanner
from vllm_kvretrieval.attention.cpu.keeping import KeptRows, Watch
from vllm_kvretrieval.attention.cpu.observation import Observation
from vllm_kvretrieval.attention.cpu.plans import (
    DecodePlan,
    Full,
    Pages,
    Prefill,
    RetrievalMetadata,
    Schedule,
    Split,
    Whole,
)
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.attention.parts import split_rows
from vllm_kvretrieval.kernels import Contexts, DecodeRows, PromptLists, TokenLists
from vllm_kvretrieval.retrieval.roles import OBSERVATIONS
from vllm_kvretrieval.storage import Memory, StepContexts, Storage

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.prompts import KeptPrompts
    from vllm_kvretrieval.engine.requests import RequestTable


class RetrievalMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds :class:`RetrievalMetadata` from the batch and the table of running requests."""

    # vLLM moves requests that decode a single token to the front of the batch.
    reorder_batch_threshold = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = self.num_heads // self.num_kv_heads
        self.requests: RequestTable | None = None
        self.staging: PrefillStaging | None = None
        self.sparse_prefill: ChunkPlanner | BlockPlanner | None = None
        self.storage: Storage = Memory()
        self.attends = self.own = False

    def attach(
        self,
        requests: "RequestTable",
        page_size: int,
        staging: PrefillStaging | None,
        storage: Storage,
        attends: bool = False,
        own: bool = False,
    ) -> None:
        """Switch retrieval on, once the worker has allocated the layers' state.

        Args:
            requests: Table of the running requests.
            page_size: Tokens per page of the layers' state.
            staging: Where prefill reads its context from; None: the cache itself.
            storage: Where the KV of the group's layers is. If vLLM's kernel does not read it, there
                is ``staging``, and our own kernel attends.
            attends: Whether our own kernel attends to pages; else vLLM's does, but for methods of
                lists of different lengths, which no schedule of a step says.
            own: Whether our own kernels attend to whole contexts; else vLLM's does.

        Raises:
            ValueError: vLLM's block tables are not in pages of this size.
        """
        if self.block_size != page_size:
            raise ValueError(f"block tables in blocks of {self.block_size}, pages of {page_size}")
        seats, heads = requests.capacity, self.num_kv_heads
        self.requests, self.staging = requests, staging
        self.storage, self.attends, self.own = storage, attends, own
        methods = requests.config.methods.values()
        self.per_token = [method.per_token for method in methods]
        self.shares = [method.shares for method in methods]
        self.by_head = [method.schedule.by_head for method in methods]
        self.uneven = [name in requests.room.allotments for name in requests.config.methods]
        # Of all admissible budgets; a context within it is in fast memory for its own sake.
        self.budget_pages = requests.config.budget_limit // page_size
        # Length of the context at a seat's last sparse decode step.
        self.last_len = requests.per_seat()
        self.lists = torch.empty(seats * heads, requests.room.listed, dtype=torch.int32)
        self.lengths = torch.empty(seats * heads, dtype=torch.int32)
        self.observation: Observation | None = None
        if any(self.shares):
            # What one filter has selected, until the next one has: other methods' rows have theirs.
            self.shared_lists = torch.empty_like(self.lists)
            self.shared_lengths = torch.empty_like(self.lengths)
            weights = OBSERVATIONS[requests.config.observation or "last"]
            self.observation = Observation(weights, requests.per_seat(), requests.per_seat())
        self.one_token_starts = torch.arange(seats * heads + 1, dtype=torch.int32)
        self.sparse_prefill = None
        if requests.config.prefill_budget is not None and requests.config.own.shares:
            self.sparse_prefill = ChunkPlanner(requests.config)
        elif requests.config.prefill_budget is not None:
            self.sparse_prefill = BlockPlanner(requests.config, heads)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RetrievalMetadata:
        """See ``CPUAttentionMetadataBuilder.build``."""
        if self.own and common_attn_metadata.causal is True:
            dense = _without_schedule(common_attn_metadata)
        else:
            dense = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = RetrievalMetadata(**vars(dense))
        # Attention that is not causal, as in prefix-LM layers, is vLLM's own affair.
        if self.requests is None:
            return metadata
        if not dense.causal or dense.dynamic_causal is not None:
            self.storage.refuse_two_directions(self.requests.config)
            return metadata
        if self.own:
            metadata.full = self._full(dense)
        if self.observation is not None and self.observation.keeps:
            lens, starts = dense.seq_lens.numpy(), dense.query_start_loc.numpy()
            seats = self.requests.seats(len(lens))
            metadata.observed = self.observation.observe(seats, lens, starts)
        if self.requests.kept is not None and not self.requests.calm:
            metadata.watches = self._watches(self.requests, self.requests.kept, dense)
        if not self.requests.calm:
            metadata.split = self._split(common_attn_metadata, dense)
        elif self.storage.token_major and not self.own:
            everything = self._all_pages(dense.seq_lens, dense.block_table)
            metadata.split = Split(len(dense.seq_lens), [], Whole(None, everything), [])
        assert metadata.split is not None or self.storage.in_place, "nobody reads it"
        metadata.reads = self.storage.plan(self._contexts(self.requests, dense, metadata.split))
        if self.requests.arrived and self.storage.at_hand:
            metadata.loaded = self._loaded(self.requests, dense)
        return metadata

    def _full(self, dense: CPUAttentionMetadata) -> Full:
        """How the whole batch attends to whole contexts."""
        count = _leading(dense.query_start_loc)
        rows = prompts = None
        if count:
            rows = self._all_pages(dense.seq_lens[:count], dense.block_table[:count])
        if count < len(dense.seq_lens):
            prompts = self._in_cache(dense, slice(count, len(dense.seq_lens)))
        return Full(rows, prompts)

    def _in_cache(self, dense: CPUAttentionMetadata, requests: slice) -> Prefill:
        """Requests that read prompts whose contexts are read where they are."""
        first = int(dense.query_start_loc[requests.start])
        return Prefill(first, self._part(dense, requests, dense.block_table[requests]), None)

    def _loaded(self, requests: "RequestTable", dense: CPUAttentionMetadata) -> Pages | None:
        """Pages that requests have brought into this step and whose indexes are to be built.

        A KV connector has filled some. And a context that ends within a page may end in a copy,
        whose index covers all that its source holds.
        """
        lens, before = _lengths(dense)
        arrived = [r in requests.arrived for r in requests.runner.input_batch.req_ids[: len(lens)]]
        rows = np.flatnonzero(arrived & (before > 0))
        if not len(rows):
            return None
        table = dense.block_table.numpy()[rows]
        position = np.arange(table.shape[1]) * self.block_size
        row, place = np.nonzero(position < before[rows][:, None])
        unindexed = position[place] + self.block_size > before[rows][row]
        if requests.loaded is not None:
            unindexed |= requests.loaded.among(table[row, place])
        row, place = row[unindexed], place[unindexed]
        if not len(row):
            return None
        ids, first = np.unique(table[row, place], return_index=True)
        lengths = np.minimum(lens[rows][row] - position[place], self.block_size)[first]
        return Pages(torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32)))

    def _watches(
        self, requests: "RequestTable", kept: "KeptPrompts", dense: CPUAttentionMetadata
    ) -> list[Watch]:
        """Queries of this step that decide what is kept of their prompts."""
        lens, before = _lengths(dense)
        seats = requests.seats(len(lens))
        starts, methods = dense.query_start_loc.numpy(), requests.select(seats).method
        watches = []
        for row in np.flatnonzero(kept.keeps[seats] & (before < kept.ends[seats])).tolist():
            seat, method, length = int(seats[row]), int(methods[row]), int(lens[row])
            rule = kept.rules[method]
            first = max(int(before[row]), rule.first_observed(int(kept.ends[seat])))
            if first >= length:
                continue
            tokens = slice(int(starts[row]) + first - int(before[row]), int(starts[row + 1]))
            pages = dense.block_table[row, : -(-length // self.block_size)].long()
            entropies = kept.methods[method].budget_shares.entropy is not None
            watched = kept.watched(seat, method)
            watches.append(Watch(tokens, first, pages, rule, entropies, watched))
        return watches

    def _contexts(
        self, requests: "RequestTable", dense: CPUAttentionMetadata, split: Split | None
    ) -> StepContexts:
        """The step, for the storage."""
        lens, before = _lengths(dense)
        whole, laid_out = None, list[torch.Tensor]()
        if split is not None:
            laid_out = [part.staged for part in split.prefill if part.staged is not None]
            if split.decode:
                whole = np.arange(split.rows, len(lens))
                if split.whole is not None:
                    assert split.whole.index is not None, "others are in plans"
                    whole = np.concatenate([split.whole.index.numpy(), whole])
        return StepContexts(
            requests=requests.runner.input_batch.req_ids[: len(lens)],
            before=before,
            lens=lens,
            block_table=dense.block_table.numpy(),
            whole=whole,
            laid_out=laid_out,
            most_pages=self.budget_pages,
        )

    def _split(self, common: CommonAttentionMetadata, dense: CPUAttentionMetadata) -> Split | None:
        rows = _leading(common.query_start_loc_cpu)
        decode, others = self._plan(common, dense, rows)
        prefill = self._prefill(dense, rows) if rows < common.num_reqs else []
        if not self.storage.in_place:
            alone = [self._staged_row(dense, row) for row in others.tolist()]
            return Split(rows, decode, None, alone + prefill)
        in_place = all(part.in_place for part in prefill)
        if not decode and in_place and (self.own or not self.storage.token_major):
            return None
        whole = None
        if not decode and rows:
            whole = Whole(None, self._whole(dense, slice(0, rows)))
        elif len(others):
            index = torch.from_numpy(others)
            whole = Whole(index, self._whole(dense, index))
        return Split(rows, decode, whole, prefill)

    def _whole(
        self, dense: CPUAttentionMetadata, rows: "slice | torch.Tensor"
    ) -> CPUAttentionMetadata | TokenLists:
        """How rows of one token attend to their whole contexts."""
        lens, table = dense.seq_lens[rows], dense.block_table[rows]
        if self.storage.token_major or self.own:
            return self._all_pages(lens, table)
        return self._with_schedule(dense, self.one_token_starts[: len(lens) + 1], lens, table)

    def _all_pages(self, seq_lens: torch.Tensor, block_table: torch.Tensor) -> TokenLists:
        lengths = seq_lens.repeat_interleave(self.num_kv_heads)
        return TokenLists(block_table, lengths, self.block_size, self.num_kv_heads, per_head=False)

    def _staged_row(self, dense: CPUAttentionMetadata, row: int) -> Prefill:
        """A row of one token that attends to a whole context, read as prompts are."""
        assert self.staging is not None, "what is not read in place is laid out"
        alone = slice(row, row + 1)
        starts = dense.query_start_loc[row : row + 2]
        (staged,) = self.staging.plan(dense.block_table[alone], dense.seq_lens[alone], starts)
        return Prefill(row, self._part(dense, alone, staged.block_table), staged.pages)

    def _prefill(self, dense: CPUAttentionMetadata, rows: int) -> list[Prefill]:
        """The requests behind the rows."""
        everything = slice(rows, len(dense.seq_lens))
        if self.sparse_prefill is None:
            return self._prefill_exactly(dense, everything)
        assert self.requests is not None
        seats = self.requests.seats(everything.stop)[rows:]
        budgets = self.requests.prefill_budgets(seats)
        sparse = budgets.any(0)
        lens = dense.seq_lens.numpy()[rows:]
        new = np.diff(dense.query_start_loc.numpy()[rows:])
        pairs = new * (2 * lens.astype(np.int64) - new + 1) // 2
        tokens = budgets.sum(0) * self.block_size
        skipped = np.where(sparse, self.sparse_prefill.skipped(lens, new, tokens), 0)
        self.requests.count_prefill(seats, lens, pairs, pairs - skipped)
        sparse &= lens > self.sparse_prefill.exact
        methods = np.where(sparse, self.requests.select(seats).method, -1)
        parts = list[Prefill]()
        borders = np.flatnonzero(np.diff(methods)) + 1
        for begin, end in pairwise([0, *borders.tolist(), len(sparse)]):
            requests = slice(rows + begin, rows + end)
            if not sparse[begin]:
                parts += self._prefill_exactly(dense, requests)
            elif isinstance(self.sparse_prefill, BlockPlanner):
                of = budgets[:, begin:end]
                by, method = self.sparse_prefill, int(methods[begin])
                parts.append(self._prefill_blocks(dense, requests, by, method, of))
            else:
                parts += self._prefill_sparsely(dense, requests, self.sparse_prefill, parts)
        return parts

    def _prefill_exactly(self, dense: CPUAttentionMetadata, requests: slice) -> list[Prefill]:
        first, starts = requests.start, dense.query_start_loc[requests.start : requests.stop + 1]
        lens, table = dense.seq_lens[requests], dense.block_table[requests]
        staging = None if self.own and self.storage.in_place else self.staging
        staged = staging.plan(table, lens, starts) if staging else []
        if not staged:
            return [self._in_cache(dense, requests)]
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

    @staticmethod
    def _prefill_blocks(
        dense: CPUAttentionMetadata,
        requests: slice,
        by: BlockPlanner,
        method: int,
        budgets: np.ndarray,
    ) -> Prefill:
        """Requests whose prompts are divided into blocks that select pages."""
        starts = dense.query_start_loc[requests.start : requests.stop + 1].numpy()
        division = by.divide(dense.seq_lens[requests].numpy(), np.diff(starts))
        first = int(starts[0])
        blocks = by.plan(method, division, budgets, dense.block_table[requests], first)
        return Prefill(first, blocks.lists, None, blocks=blocks)

    def _prefill_sparsely(
        self,
        dense: CPUAttentionMetadata,
        requests: slice,
        by: ChunkPlanner,
        earlier: list[Prefill],
    ) -> list[Prefill]:
        """Requests whose prompts are divided into chunks, after those of this step before them."""
        assert self.staging is not None, "a cache of rows has one"
        starts = dense.query_start_loc[requests.start : requests.stop + 1].numpy()
        division = by.divide(dense.seq_lens[requests].numpy(), np.diff(starts))
        seat = sum(len(part.chunks.rows) for part in earlier if part.chunks is not None)
        planned = by.plan(
            division,
            dense.block_table[requests],
            int(starts[0]),
            self.staging,
            self.num_kv_heads,
            seat,
        )
        parts = list[Prefill]()
        for chunks in planned:
            lens = chunks.lists.lengths[:: self.num_kv_heads].contiguous()
            lists = self._prompts(dense, chunks.query_start_loc, lens, chunks.block_table)
            parts.append(Prefill(chunks.start, lists, None, chunks))
        return parts

    def _plan(
        self, common: CommonAttentionMetadata, dense: CPUAttentionMetadata, count: int
    ) -> tuple[list[DecodePlan], np.ndarray]:
        """How the first ``count`` requests, of one token each, attend.

        Returns:
            Plans for those that attend to parts of their contexts; and the places of the rest.
        """
        assert self.requests is not None
        lens = dense.seq_lens.numpy()[:count]
        assert common.is_prefilling is not None, "vLLM's V1 model runner provides this"
        decodes = ~common.is_prefilling.numpy()[:count]
        seats = self.requests.seats(count)
        batch = self.requests.select(seats)
        if self.requests.kept is not None:  # the last chunk of a prompt is perhaps a single token
            decodes &= ~(self.requests.kept.keeps[seats] & (lens <= self.requests.kept.ends[seats]))
        pages = -(-lens // self.block_size)
        parts = split_rows(batch, pages, decodes)
        self.requests.count_steps(seats, lens, pages, parts.sparse, decodes)
        keeps = self.observation is not None and self.observation.keeps
        looks = keeps or not self.storage.in_place
        if not parts.sparsely and count == common.num_reqs and decodes.all() and not looks:
            room = batch.total_pages * self.block_size - lens
            never = np.iinfo(np.int32).max
            self.requests.expect_calm(int(np.where(batch.exact, never, room).min()))
        plans = []
        for method, rows in parts.sparsely:
            index = slice(None) if rows is None else rows
            place = None if rows is None else torch.from_numpy(rows)
            plans.append(self._decode_plan(dense, method, seats[index], place))
        whole = parts.whole
        if not self.storage.in_place:
            fits = pages[whole] <= self.budget_pages
            if fits.any():
                plans.append(self._whole_by_lists(dense, seats[whole[fits]], whole[fits]))
            whole = whole[~fits]
        return plans, whole

    def _whole_by_lists(
        self, dense: CPUAttentionMetadata, seats: np.ndarray, places: np.ndarray
    ) -> DecodePlan:
        """Rows that attend to whole contexts within budget, and reach for them as others do."""
        assert self.requests is not None
        rows, heads, index = len(seats), self.num_kv_heads, torch.from_numpy(places)
        context = Contexts(dense.block_table[index], dense.seq_lens[index], torch.from_numpy(seats))
        decode_rows = DecodeRows.whole(
            context, self.lists[: rows * heads], lengths=self.lengths[: rows * heads]
        )
        lists = TokenLists(decode_rows.lists, decode_rows.lengths, self.block_size, heads)
        return DecodePlan(0, decode_rows, index, lists, None)

    def _decode_plan(
        self,
        dense: CPUAttentionMetadata,
        method: int,
        seats: np.ndarray,
        index: torch.Tensor | None,
    ) -> DecodePlan:
        assert self.requests is not None
        rows, heads = len(seats), self.num_kv_heads
        seq_lens, block_table = (
            tensor[:rows] if index is None else tensor[index]
            for tensor in (dense.seq_lens, dense.block_table)
        )
        lens = seq_lens.numpy()
        fresh = self.last_len[seats] != lens - 1
        self.last_len[seats] = lens
        kept = self.requests.kept
        if kept is not None and method in kept.methods:
            return self._kept_plan(kept, method, seq_lens, block_table, seats, index, fresh)
        batch = self.requests.select(seats)
        per_token, shares = self.per_token[method], self.shares[method]
        units = self.block_size if per_token else 1  # of selection, in a page
        context = Contexts(block_table, seq_lens, torch.from_numpy(seats))
        sink, window = (torch.from_numpy(p) for p in (batch.sink_pages, batch.window_pages))
        new = torch.from_numpy(fresh.astype(np.uint8))
        if self.by_head[method]:
            # What heads attend to is known: it is no selection, and may be everything.
            pages = -(-int(lens.max()) // self.block_size)
            lists_of = torch.empty(rows * heads, pages, dtype=torch.int32)
            decode_rows = DecodeRows.given(context, lists_of, sink=sink, window=window, fresh=new)
        else:
            decode_rows = DecodeRows.selecting(
                context,
                (self.shared_lists if shares else self.lists)[: rows * heads],
                lengths=(self.shared_lengths if shares else self.lengths)[: rows * heads],
                sink=sink * units,
                window=window * units,
                select=torch.from_numpy(batch.select_pages * units),
                threshold=torch.from_numpy(batch.threshold),
                fresh=new,
                corrected=self.requests.corrected,
                per_token=per_token,
            )
        run = self.block_size // units
        lists = TokenLists(decode_rows.lists, decode_rows.lengths, run, heads)
        schedule = None
        if not self.attends and not (self.uneven[method] or self.by_head[method]):
            # Pages, of which the last is the tail page, partly filled.
            attended = batch.total_pages * self.block_size - (-lens % self.block_size)
            lengths = torch.from_numpy(np.repeat(attended.astype(np.int32), heads))
            starts = self.one_token_starts[: rows * heads + 1]
            schedule = Schedule(lengths, starts, self._schedule(lengths, starts, self.group, 1))
        weights = self.observation.weights_of(seats) if self.observation and shares else None
        return DecodePlan(method, decode_rows, index, lists, schedule, weights)

    def _kept_plan(
        self,
        kept: "KeptPrompts",
        method: int,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        seats: np.ndarray,
        index: torch.Tensor | None,
        fresh: np.ndarray,
    ) -> DecodePlan:
        """Rows that attend to what they keep of their prompts, and to what came after."""
        assert self.requests is not None
        rows, heads = len(seats), self.num_kv_heads
        new = np.flatnonzero(fresh).tolist()
        for row in new:
            kept.settle(int(seats[row]), method)
        window = kept.step(seats, method, seq_lens.numpy())
        most = min(self.requests.room.most_chosen() + int(window.max()), int(seq_lens.max()))
        context = Contexts(block_table, seq_lens, torch.from_numpy(seats))
        beside = torch.from_numpy(window.astype(np.int32))
        room = torch.empty(rows * heads, most, dtype=torch.int32)
        decode_rows = DecodeRows.given(
            context,
            room,
            sink=0,
            window=beside,
            fresh=torch.from_numpy(fresh.astype(np.uint8)),
            per_token=True,
        )
        lists = TokenLists(decode_rows.lists, decode_rows.lengths, 1, heads)
        index_of_seats = torch.from_numpy(seats).long()
        drops = kept.methods[method].schedule.drops
        keeps = KeptRows(kept.rules[method], drops, index_of_seats, new)
        return DecodePlan(method, decode_rows, index, lists, None, kept=keeps)

    def _part(
        self, dense: CPUAttentionMetadata, requests: slice, block_table: torch.Tensor
    ) -> CPUAttentionMetadata | PromptLists:
        """How some of the requests attend, their tokens counted from the first of them."""
        starts = dense.query_start_loc[requests.start : requests.stop + 1]
        lens = dense.seq_lens[requests]
        return self._prompts(dense, starts - starts[0], lens, block_table)

    def _prompts(
        self,
        dense: CPUAttentionMetadata,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> CPUAttentionMetadata | PromptLists:
        """How sequences of queries attend to the contexts that end with them."""
        if not self.own:
            return self._with_schedule(dense, query_start_loc, seq_lens, block_table)
        seen = seq_lens - query_start_loc.diff() + 1
        return PromptLists(block_table, query_start_loc, seen, self.num_kv_heads)

    def _with_schedule(
        self,
        dense: CPUAttentionMetadata,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> CPUAttentionMetadata:
        return replace(
            dense,
            num_actual_tokens=int(query_start_loc[-1]),
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            scheduler_metadata=self._schedule(
                seq_lens, query_start_loc, self.num_heads, self.num_kv_heads
            ),
        )

    def _schedule(
        self,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
    ) -> torch.Tensor:
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=seq_lens.shape[0],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=seq_lens,
            dtype=self.dtype,
            query_start_loc=query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )


def _without_schedule(common: CommonAttentionMetadata) -> CPUAttentionMetadata:
    """vLLM's metadata of a step, but for the schedule, which its kernel alone reads."""
    return CPUAttentionMetadata(
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        query_start_loc=common.query_start_loc,
        max_seq_len=common.max_seq_len,
        seq_lens=common.seq_lens,
        block_table=common.block_table_tensor,
        slot_mapping=common.slot_mapping,
        scheduler_metadata=None,
    )


def _leading(query_start_loc: torch.Tensor) -> int:
    """How many requests with a single token lead the batch."""
    longer = np.flatnonzero(np.diff(query_start_loc.numpy()) != 1)
    return int(longer[0]) if len(longer) else len(query_start_loc) - 1


def _lengths(dense: CPUAttentionMetadata) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each request's context with this step, and before it."""
    lens = dense.seq_lens.numpy()
    return lens, lens - np.diff(dense.query_start_loc.numpy())
