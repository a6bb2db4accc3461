"""The metadata of a step, which is built once per step for all layers of a group."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_kvretrieval.attention.cpu.drafts import DraftedRecords
from vllm_kvretrieval.attention.cpu.plans import (
    Full,
    Observed,
    Pages,
    RetrievalMetadata,
    Split,
    Whole,
)
from vllm_kvretrieval.attention.cpu.schedules import Schedules, without_schedule
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.attention.cpu.step_planner import StepPlanner, runs, without
from vllm_kvretrieval.kernels import TokenLists
from vllm_kvretrieval.methods import DecodePlan, GroupFacts
from vllm_kvretrieval.storage.base import StepContexts, Storage
from vllm_kvretrieval.storage.memory import Memory

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.requests import RequestTable


class RetrievalMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds :class:`RetrievalMetadata` from the batch and the table of running requests."""

    # vLLM moves requests that decode a single token to the front of the batch.
    reorder_batch_threshold = 1

    drafts: DraftedRecords | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = self.num_heads // self.num_kv_heads
        self.requests: RequestTable | None = None
        self.storage: Storage = Memory()
        self.own = False

    def lay_out(self, layout: str) -> None:
        """Have the keys of the group's layers laid out for this variant of vLLM's kernel."""
        self.isa = layout
        self._set_isa_to_layers(self.layer_names)

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
            attends: Whether decode uses our own kernel. If false, vLLM's is used, except for
                methods whose lists differ in length: its schedule takes one length per step.
            own: Whether our own kernels attend to whole contexts; else vLLM's does.

        Raises:
            ValueError: vLLM's block tables are not in pages of this size.
        """
        if self.block_size != page_size:
            raise ValueError(f"block tables in blocks of {self.block_size}, pages of {page_size}")
        self.requests, self.storage, self.own = requests, storage, own
        most, heads = requests.capacity * self.num_kv_heads, self.num_kv_heads
        lists = torch.empty(most, requests.room.listed, dtype=torch.int32)
        lengths = torch.empty(most, dtype=torch.int32)
        facts = GroupFacts(requests, page_size, heads, lists, lengths)
        indexes = [method.index for method in requests.config.methods.values()]
        if requests.room.drafts and any(index is not None and index.grows for index in indexes):
            self.drafts = DraftedRecords(requests, page_size)
        self.schedules = Schedules(self, most)
        self.planner = StepPlanner(
            requests, facts, self.schedules, staging, storage.in_place, attends, own
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RetrievalMetadata | None:
        """See ``CPUAttentionMetadataBuilder.build``.

        Returns:
            None in vLLM's dummy runs, in which nothing is attended to: their rows are not those of
            requests.
        """
        requests = self.requests
        if requests is not None and not requests.in_step:
            return None
        if self.own and common_attn_metadata.causal is True:
            dense = without_schedule(common_attn_metadata)
        else:
            dense = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = RetrievalMetadata(**vars(dense))
        # Attention that is not causal, as in prefix-LM layers, is vLLM's own affair.
        if requests is None:
            return metadata
        if not dense.causal or dense.dynamic_causal is not None:
            self.storage.refuse_two_directions(requests.config)
            return metadata
        requests.set_batch(common_attn_metadata)
        lens, before = _lengths(dense)
        if self.own:
            metadata.full = self._full(dense, before)
        metadata.seen = self.planner.see(dense, before)
        if not requests.foreseen.now:
            metadata.split = self._split(common_attn_metadata, dense, before)
        elif self.storage.token_major and not self.own:
            everything = self._whole(dense, np.arange(len(lens)))
            metadata.split = Split(np.arange(0), [], everything, [])
        assert metadata.split is not None or self.storage.in_place, "nobody reads it"
        if requests.sources is not None and self.storage.in_place:
            metadata.observed = self._observed(requests, dense, metadata.split)
        contexts = self._contexts(requests, dense, lens, before, metadata.split)
        metadata.reads = self.storage.plan(contexts)
        if requests.arrived and self.storage.at_hand:
            table, size = dense.block_table, self.block_size
            metadata.loaded = loaded_pages(requests, lens, before, table, size)
        if self.drafts is not None and not requests.foreseen.now:
            metadata.drafted = self.drafts.plan(lens, before, dense.block_table)
        metadata.alone = self._alone(metadata)
        return metadata

    def _alone(self, metadata: RetrievalMetadata) -> DecodePlan | None:
        """See :attr:`RetrievalMetadata.alone`."""
        split, requests = metadata.split, self.requests
        rest = metadata.loaded, metadata.drafted, metadata.observed
        if split is None or not self.storage.at_hand or any(part is not None for part in rest):
            return None
        if len(split.decode) != 1 or split.whole is not None or split.prefill:
            return None
        plan, sources = split.decode[0], None if requests is None else requests.sources
        asked = sources is not None and len(sources.asking(plan.rows.seats.numpy())) > 0
        single = plan.index is None and plan.rows.starts is None
        return plan if single and not asked else None

    def _full(self, dense: CPUAttentionMetadata, before: np.ndarray) -> Full:
        """How the whole batch attends to whole contexts."""
        count = _leading(dense.query_start_loc)
        verifying = self.planner.verifying(before, count)
        rows = np.concatenate([np.arange(count), verifying])
        prompts = without(np.arange(count, len(dense.seq_lens)), verifying)
        parts = [self.planner.in_cache(dense, run) for run in runs(prompts)]
        return Full(self._whole(dense, rows) if len(rows) else None, parts)

    def _observed(
        self, requests: "RequestTable", dense: CPUAttentionMetadata, split: Split | None
    ) -> Observed | None:
        """Rows that decode over whole contexts, and whose requests ask what they attend to."""
        assert requests.sources is not None
        count = _leading(dense.query_start_loc)
        seats = requests.seats[:count]
        decodes = requests.decodes(seats, dense.seq_lens.numpy()[:count])
        rows = requests.sources.asking(seats)
        rows = rows[decodes[rows]]
        for plan in () if split is None else split.decode:
            planned = np.arange(len(plan.rows)) if plan.index is None else plan.index.numpy()
            rows = np.setdiff1d(rows, planned)
        if not len(rows):
            return None
        index = torch.from_numpy(rows)
        table, lens = dense.block_table[index], dense.seq_lens[index]
        return Observed(index, torch.from_numpy(seats[rows]), table, lens, self._pages(table, lens))

    def _contexts(
        self,
        requests: "RequestTable",
        dense: CPUAttentionMetadata,
        lens: np.ndarray,
        before: np.ndarray,
        split: Split | None,
    ) -> StepContexts:
        """The step, for the storage."""
        whole, laid_out = None, list[torch.Tensor]()
        if split is not None:
            laid_out = [part.staged for part in split.prefill if part.staged is not None]
            if split.decode:
                whole = split.prompts
                if split.whole is not None:
                    whole = np.concatenate([split.whole.places, whole])
        seats = requests.seats[: len(lens)]
        return StepContexts(
            requests=requests.batch[: len(lens)],
            seats=seats,
            before=before,
            lens=lens,
            certain=requests.certain(seats, before, lens),
            block_table=dense.block_table.numpy(),
            whole=whole,
            laid_out=laid_out,
            most_pages=self.planner.budget_pages,
        )

    def _split(
        self, common: CommonAttentionMetadata, dense: CPUAttentionMetadata, before: np.ndarray
    ) -> Split | None:
        rows = _leading(common.query_start_loc_cpu)
        prompts, verifying = self.planner.reading(dense, rows), self.planner.verifying(before, rows)
        places = np.concatenate([np.arange(rows), verifying])
        decode, others = self.planner.rows(common, dense, places, prompts[prompts < rows])
        rows_of_ours = self.storage.in_place and (self.own or self.storage.token_major)
        if not rows_of_ours:  # drafts of whole contexts are read as prompts are
            verifying, others = without(verifying, others), others[others < rows]
        prompts = without(prompts, verifying)
        prefill = self.planner.prompts(dense, prompts)
        if not self.storage.in_place:
            alone = [self.planner.row(dense, row) for row in others.tolist()]
            return Split(prompts, decode, None, alone + prefill)
        in_place = all(part.in_place for part in prefill)
        if not decode and in_place and (self.own or not self.storage.token_major):
            return None
        whole = self._whole(dense, others) if len(others) else None
        return Split(prompts, decode, whole, prefill)

    def _whole(self, dense: CPUAttentionMetadata, places: np.ndarray) -> Whole:
        """How the requests with these places attend to their whole contexts, where these are read
        in place."""
        (table, lens, _, starts), index = self.planner.contexts_of(dense, places)
        if not (self.own or self.storage.token_major):
            return Whole(places, index, self.schedules.of_rows(dense, lens, table))
        return Whole(places, index, self._pages(table, lens, starts))

    def _pages(
        self, table: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor | None = None
    ) -> TokenLists:
        """All pages of contexts."""
        size, heads = self.block_size, self.num_kv_heads
        lengths = lens.repeat_interleave(heads)
        return TokenLists(table, lengths, size, heads, per_head=False, starts=starts)


def _leading(query_start_loc: torch.Tensor) -> int:
    """How many requests with a single token lead the batch."""
    longer = np.flatnonzero(np.diff(query_start_loc.numpy()) != 1)
    return int(longer[0]) if len(longer) else len(query_start_loc) - 1


def _lengths(dense: CPUAttentionMetadata) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each request's context with this step, and before it."""
    lens = dense.seq_lens.numpy()
    return lens, lens - np.diff(dense.query_start_loc.numpy())


def loaded_pages(
    requests: "RequestTable",
    lens: np.ndarray,
    before: np.ndarray,
    block_table: torch.Tensor,
    page_size: int,
) -> Pages | None:
    """Pages that requests have brought into a step and whose indexes are to be built.

    A KV connector has filled some. And a context that ends within a page may end in a copy, whose
    index covers all that its source holds.

    Args:
        requests: Table of the running requests.
        lens: int32 [R]; tokens of each context with the step.
        before: int32 [R]; tokens of each context before it.
        block_table: int32 [R, >= pages]; page ids in context order.
        page_size: Tokens per page.
    """
    arrived = [r in requests.arrived for r in requests.batch[: len(lens)]]
    rows = np.flatnonzero(arrived & (before > 0))
    if not len(rows):
        return None
    table = block_table.numpy()[rows]
    position = np.arange(table.shape[1]) * page_size
    row, place = np.nonzero(position < before[rows][:, None])
    unindexed = position[place] + page_size > before[rows][row]
    if requests.loaded is not None:
        unindexed |= requests.loaded.among(table[row, place])
    row, place = row[unindexed], place[unindexed]
    if not len(row):
        return None
    ids, first = np.unique(table[row, place], return_index=True)
    lengths = np.minimum(lens[rows][row] - position[place], page_size)[first]
    return Pages(torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32)))
