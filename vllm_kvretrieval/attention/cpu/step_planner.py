"""How the requests of a step attend: rows of a single token, and prompts."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_kvretrieval.attention.cpu.plans import Prefill
from vllm_kvretrieval.attention.cpu.schedules import Schedules
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.kernels import Contexts, PromptLists
from vllm_kvretrieval.methods import (
    ChunkPlanner,
    DecodePlan,
    GroupFacts,
    Prompts,
    Sees,
    Step,
    StepRows,
    chunk_planner,
    group_methods,
    plan_whole,
)
from vllm_kvretrieval.methods.prompt_chunks import int32
from vllm_kvretrieval.retrieval.seats import even

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.requests import RequestTable


class Rows(NamedTuple):
    """How the rows of a step attend.

    Attributes:
        sparse: bool [R]; whether the row attends to a part of its context.
        sparsely: These rows by method: the method's number in the engine, and int64 [n], the rows,
            rising.
        whole: int64 [n]; the other rows, which attend to everything, as vLLM has it.
    """

    sparse: np.ndarray
    sparsely: list[tuple[int, np.ndarray]]
    whole: np.ndarray


def split_rows(options: np.ndarray, beyond: np.ndarray, decodes: np.ndarray) -> Rows:
    """Sort rows by how they attend.

    Args:
        options: :data:`SEAT` [R]; what each row's request asks for.
        beyond: bool [R]; whether a row's context is too long to be attended to in full.
        decodes: bool [R]; whether a row decodes. A step may compute a single token of a prompt,
            too.
    """
    sparse = beyond & decodes & ~options["exact"]
    sparsely = []
    for method in sorted(set(options["method"][sparse].tolist())):
        sparsely.append((method, np.flatnonzero(sparse & (options["method"] == method))))
    return Rows(sparse, sparsely, np.flatnonzero(~sparse))


class StepPlanner:
    """Plans steps for layers that share metadata.

    Args:
        requests: Table of the running requests.
        facts: The layers.
        schedules: Makes vLLM's schedules.
        staging: Where contexts are laid out.
        in_place: Whether whole contexts can be read where they are.
        attends: Whether our own kernel attends to lists; see
            :meth:`RetrievalMetadataBuilder.attach`.
        own: Whether it attends to whole contexts.

    Attributes:
        methods: The methods, by number.
        budget_pages: Pages of the largest admissible budget.
    """

    def __init__(
        self,
        requests: "RequestTable",
        facts: GroupFacts,
        schedules: Schedules,
        staging: PrefillStaging | None,
        in_place: bool,
        attends: bool,
        own: bool,
    ) -> None:
        self._requests, self.facts, self._schedules = requests, facts, schedules
        self._page_size, self._kv_heads = facts.page_size, facts.kv_heads
        self._staging, self._in_place = staging, in_place
        self.attends, self._own = attends, own
        # Our own kernel reads every layout, but in place only.
        self._lays_out = None if own and in_place else staging
        self.methods, self._chunks = group_methods(facts), chunk_planner(facts)
        self.budget_pages = requests.config.budget_limit // facts.page_size
        # Length of the context at a seat's last sparse decode step, without drafts and with them.
        self._last_len, self._last_end = requests.per_seat(), requests.per_seat()

    def see(self, dense: CPUAttentionMetadata, before: np.ndarray) -> dict[int, Any]:
        """See :attr:`RetrievalMetadata.seen`.

        Args:
            dense: vLLM's metadata of the batch.
            before: int [R]; tokens of each context before the step.
        """
        least = Sees.ALL if self._requests.foreseen.now else Sees.PROMPTS
        watching = [n for n, method in enumerate(self.methods) if method.sees >= least]
        if not watching:
            return {}
        seats, lens = self._requests.seats[: len(before)], dense.seq_lens.numpy()
        step = Step(seats, lens, before, dense.query_start_loc.numpy(), dense.block_table)
        return {number: self.methods[number].see(step) for number in watching}

    def verifying(self, before: np.ndarray, rows: int) -> np.ndarray:
        """The places of the requests with drafts that a step verifies, int64 [n], rising.

        Args:
            before: int [R]; tokens of each context before the step.
            rows: How many requests of a single token lead the batch.
        """
        if not self._requests.room.drafts:
            return np.arange(0)
        return rows + np.flatnonzero(before[rows:] >= self._requests.ends[self._seats[rows:]])

    @property
    def _seats(self) -> np.ndarray:
        return self._requests.seats

    def rows(
        self,
        common: CommonAttentionMetadata,
        dense: CPUAttentionMetadata,
        places: np.ndarray,
        apart: np.ndarray,
    ) -> tuple[list[DecodePlan], np.ndarray]:
        """How requests attend that decode, or of which a step computes a single token.

        Args:
            common: vLLM's description of the step.
            dense: vLLM's metadata of the batch.
            places: int64 [n]; the places of these requests, rising.
            apart: int64 [n]; places of those that are planned elsewhere.

        Returns:
            Plans for those that attend to parts of their contexts; and the places of the rest.
        """
        drafts = np.diff(dense.query_start_loc.numpy())[places] - 1
        lens = dense.seq_lens.numpy()[places] - drafts
        seats = self._seats[places]
        decodes = self._requests.decodes(seats, lens)
        batch = self._requests.records[seats]
        pages = -(-lens // self._page_size)
        whole_tokens = self._requests.whole_tokens(seats)
        found = split_rows(batch, lens > whole_tokens, decodes)
        reads = np.isin(places, apart) if len(apart) else np.zeros(len(places), dtype=bool)
        self._requests.count_steps(seats, lens, pages, found.sparse, decodes, reads)
        looks = any(m.sees is Sees.ALL for m in self.methods) or not self._in_place
        single = len(places) == common.num_reqs and not drafts.any()
        if not found.sparsely and single and decodes.all() and not looks:
            never = np.iinfo(np.int32).max
            steps = int(np.where(batch["exact"], never, whole_tokens - lens).min())
            self._requests.foreseen.foresee(self._requests.batch, steps)
        plans = [self._sparsely(dense, method, places[rows]) for method, rows in found.sparsely]
        whole = without(places[found.whole], apart)
        if not self._in_place:
            table, size = dense.seq_lens.numpy(), self._page_size
            fits = -(-table[whole] // size) <= self.budget_pages
            if fits.any():
                contexts, index = self.contexts_of(dense, whole[fits])
                plans.append(plan_whole(self.facts, contexts, index))
            whole = whole[~fits]
        return plans, whole

    def _sparsely(self, dense: CPUAttentionMetadata, number: int, places: np.ndarray) -> DecodePlan:
        """How rows of a method decode that attend to parts of their contexts.

        Args:
            dense: vLLM's metadata of the batch.
            number: The number of the method.
            places: The places of the rows' requests.
        """
        contexts, index = self.contexts_of(dense, places)
        seats, method = self._seats[places], self.methods[number]
        ends = contexts.seq_lens.numpy()
        drafts = np.diff(dense.query_start_loc.numpy())[places] - 1
        lens = ends - drafts
        # Some of the last step's drafts may have been accepted.
        fresh = (lens <= self._last_len[seats]) | (lens > self._last_end[seats] + 1)
        self._last_len[seats], self._last_end[seats] = lens, ends
        options = self._requests.records[seats]
        plan = method.plan(StepRows(seats, contexts, fresh, index, options, drafts))
        if contexts.starts is None and not self.attends and method.even and even(options):
            # Pages, of which the last is the tail page, partly filled.
            attended = options["total"] * self._page_size - (-lens % self._page_size)
            plan.schedule = self._schedules.of_lists(attended)
        return plan

    def contexts_of(
        self, dense: CPUAttentionMetadata, places: np.ndarray
    ) -> tuple[Contexts, torch.Tensor | None]:
        """The contexts of the requests with these places, and their tokens in the batch.

        See :attr:`DecodePlan.index`.
        """
        seats, first = torch.from_numpy(self._seats[places]), dense.query_start_loc.numpy()
        count = len(places)
        leads = first[count] == count and places[-1] == count - 1
        if leads and (count == len(first) - 1 or first[count + 1] > count + 1):
            return Contexts(dense.block_table[:count], dense.seq_lens[:count], seats), None
        new = np.diff(first)[places]
        ends = new.cumsum(dtype=np.int32)
        index = torch.from_numpy(np.arange(ends[-1]) + (first[places] - ends + new).repeat(new))
        starts = None if ends[-1] == count else torch.from_numpy(np.concatenate([[0], ends]))
        rows = torch.from_numpy(places)
        starts = None if starts is None else starts.int()
        return Contexts(dense.block_table[rows], dense.seq_lens[rows], seats, starts), index

    def reading(self, dense: CPUAttentionMetadata, rows: int) -> np.ndarray:
        """The places of the requests to plan, int64 [n], rising.

        A chunk of a prompt that retrieves may be a single token: that of a prompt's last token.

        Args:
            dense: vLLM's metadata of the batch.
            rows: How many requests of a single token lead it.
        """
        longer = np.arange(rows, len(dense.seq_lens))
        if self._chunks is None:
            return longer
        seats = self._requests.seats[:rows]
        reads = ~self._requests.decodes(seats, dense.seq_lens.numpy()[:rows])
        return np.append(
            np.flatnonzero(reads & self._requests.prefill_budgets(seats).any(0)), longer
        )

    def prompts(self, dense: CPUAttentionMetadata, places: np.ndarray) -> list[Prefill]:
        """Plan the requests with these places, as :meth:`reading` gives them."""
        if not len(places):
            return []
        if self._chunks is None:
            return [part for run in runs(places) for part in self._exactly(dense, run)]
        seats = self._seats[places]
        lens = dense.seq_lens.numpy()[places]
        new = np.diff(dense.query_start_loc.numpy())[places]
        reads = lens - new < self._requests.ends[seats]
        budgets = self._requests.prefill_budgets(seats) * reads
        sparse = budgets.any(0)
        pairs = new * (2 * lens.astype(np.int64) - new + 1) // 2
        sums = budgets.sum(0) * self._page_size
        shares = self._requests.prefill_shares(seats)
        division = self._chunks.divide(lens, new, sums, shares)
        ends = self._requests.ends[seats]
        skipped = self._chunks.skipped(division, budgets[:2], ends)
        read = pairs - np.where(sparse, skipped, 0).astype(np.int64)
        self._requests.count_prefill(seats[reads], lens[reads], pairs[reads], read[reads])
        sparse &= lens > self._chunks.exact
        methods = np.where(sparse, self._requests.records["method"][seats], -1)
        parts, selecting = list[Prefill](), 0
        borders = np.flatnonzero((np.diff(methods) != 0) | (np.diff(places) != 1)) + 1
        for begin, end in pairwise([0, *borders.tolist(), len(sparse)]):
            requests = slice(int(places[begin]), int(places[end - 1]) + 1)
            if not sparse[begin]:
                parts += self._exactly(dense, requests)
                continue
            of = slice(begin, end)
            prompts = Prompts(
                int(methods[begin]),
                division.of(of),
                budgets[:2, of],
                ends[of],
                dense.block_table[requests],
                int(dense.query_start_loc[requests.start]),
                selecting,
            )
            selecting += len(prompts.division.new)
            if self._chunks.gathers:
                parts += self._over_tokens(dense, prompts, self._chunks)
            else:
                parts += self._over_pages(dense, requests, prompts, self._chunks)
        return parts

    def in_cache(self, dense: CPUAttentionMetadata, requests: slice) -> Prefill:
        """Requests whose contexts are read where they are."""
        first = int(dense.query_start_loc[requests.start])
        return Prefill(first, self._part(dense, requests, dense.block_table[requests]))

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

    def _over_tokens(
        self, dense: CPUAttentionMetadata, prompts: Prompts, by: ChunkPlanner
    ) -> list[Prefill]:
        """Chunks that attend to tokens, which are laid out at once, or in turns, as they fit."""
        assert self._staging is not None, "what is selected is laid out"
        blocks = -(-prompts.division.attended // self._staging.block_size)
        parts = list[Prefill]()
        for turn in self._staging.turns(blocks):
            some = prompts.chunks(turn)
            starts = int32(np.concatenate([[0], some.division.new.cumsum()]))
            lens, table = int32(some.division.attended), self._staging.block_table(blocks[turn])
            lists = self._sequences(dense, starts, lens, table)
            parts.append(Prefill(some.start, lists, chunks=by.plan(some)))
        return parts

    def _over_pages(
        self, dense: CPUAttentionMetadata, requests: slice, prompts: Prompts, by: ChunkPlanner
    ) -> list[Prefill]:
        """Chunks that attend to pages, where they are or where contexts are laid out, in turns."""
        turns = [prompts]
        if not self._in_place:
            assert self._staging is not None, "what is not read in place is laid out"
            starts = dense.query_start_loc[requests.start : requests.stop + 1]
            staged = self._staging.plan(prompts.block_table, dense.seq_lens[requests], starts)
            turns = [prompts.of(part.requests, part.pages) for part in staged]
        planned = [(some, by.plan(some)) for some in turns]
        return [Prefill(some.start, chunks.lists, some.staged, chunks) for some, chunks in planned]

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
        if not self._own:
            return self._schedules.of_sequences(dense, query_start_loc, seq_lens, block_table)
        seen = seq_lens - query_start_loc.diff() + 1
        return PromptLists(block_table, query_start_loc, seen, self._kv_heads)


def without(places: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Those of some places that are not among others, int64 [n], rising."""
    return np.setdiff1d(places, others, assume_unique=True) if len(others) else places


def runs(places: np.ndarray) -> list[slice]:
    """Requests side by side in the batch.

    Args:
        places: int64 [n]; the places of some, rising.
    """
    if not len(places):
        return []
    borders = np.flatnonzero(np.diff(places, prepend=-2, append=-2) != 1)
    return [slice(int(places[i]), int(places[j - 1]) + 1) for i, j in pairwise(borders)]
