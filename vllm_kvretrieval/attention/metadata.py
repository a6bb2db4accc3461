"""What a step looks like to the layers: built once per step, shared by all layers of a group."""

from dataclasses import dataclass
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

from vllm_kvretrieval.attention.staging import PrefillStaging
from vllm_kvretrieval.kernels import DecodeRows
from vllm_kvretrieval.tiers.home import page_runs

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.requests import RequestTable


@dataclass
class DecodePlan:
    """How decode rows attend where at least one request's context exceeds its budget.

    Attributes:
        rows: The requests that decode one token; they lead the batch.
        attended_lens: int32 [rows * kv_heads]; tokens that each (row, KV head) attends to.
        query_start_loc: int32 [rows * kv_heads + 1]; 0, 1, 2, ...
        scheduler_metadata: vLLM's kernel schedule for these single-head sequences.
        in_place: Whether pages are read where they are also in a slow home: some row attends to a
            context that no recall cache has slots for.
    """

    rows: DecodeRows
    attended_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scheduler_metadata: torch.Tensor
    in_place: bool


@dataclass
class Split:
    """A step whose requests do not all take vLLM's own path: decode rows first, then prefill.

    Attributes:
        rows: Requests that decode one token; they lead the batch.
        decode: How they attend: to selected pages, or as vLLM has it; None where there are none.
        prefill: The other requests, their tokens counted from the end of the rows; None in a step
            that only decodes.
        staged: int32 [n]; the pages to copy into the staging buffer, which ``prefill`` then reads;
            None where it reads the cache itself.
    """

    rows: int
    decode: DecodePlan | CPUAttentionMetadata | None
    prefill: CPUAttentionMetadata | None
    staged: torch.Tensor | None


@dataclass
class RetrievalMetadata(CPUAttentionMetadata):
    """vLLM's metadata of the whole batch, for dense layers and contexts within budget.

    Attributes:
        split: How retrieval layers attend; None where they take vLLM's own path too.
        in_place: With a slow home, the :func:`page_runs` of the requests that read it in place, if
            one of these is longer than the budget.
    """

    split: Split | None = None
    in_place: np.ndarray | None = None


class RetrievalMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds :class:`RetrievalMetadata` from the batch and the table of running requests."""

    # vLLM moves requests that decode a single token to the front of the batch.
    reorder_batch_threshold = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = self.num_heads // self.num_kv_heads
        self.requests: RequestTable | None = None
        self.staging: PrefillStaging | None = None
        self.home_page_bytes = 0

    def attach(
        self,
        requests: "RequestTable",
        page_size: int,
        staging: PrefillStaging | None,
        home_page_bytes: int = 0,
    ) -> None:
        """Switch retrieval on, once the worker has allocated the layers' state.

        Args:
            requests: Table of the running requests.
            page_size: Tokens per page of the layers' state.
            staging: Where prefill reads its context from; None: the cache itself.
            home_page_bytes: Bytes of a layer's page in a slow home; 0: the home is fast memory.

        Raises:
            ValueError: vLLM's block tables are not in pages of this size.
        """
        if self.block_size != page_size:
            raise ValueError(f"block tables in blocks of {self.block_size}, pages of {page_size}")
        slots = requests.capacity
        heads = self.num_kv_heads
        max_pages = -(-self.vllm_config.model_config.max_model_len // page_size)
        self.requests, self.staging = requests, staging
        self.home_page_bytes = home_page_bytes
        self.budget_pages = requests.config.page_budget().total
        # Length of the context at a slot's last sparse decode step.
        self.last_len = requests.per_slot()
        self.page_table = torch.empty(slots * heads, max_pages, dtype=torch.int32)
        self.one_token_starts = torch.arange(slots * heads + 1, dtype=torch.int32)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RetrievalMetadata:
        """See ``CPUAttentionMetadataBuilder.build``."""
        dense = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = RetrievalMetadata(**vars(dense))
        if self.requests is not None and not self.requests.calm:
            metadata.split = self._split(common_attn_metadata, dense)
        if self.home_page_bytes:
            metadata.in_place = self._in_place(dense, metadata.split)
        return metadata

    def _in_place(self, dense: CPUAttentionMetadata, split: Split | None) -> np.ndarray | None:
        """See :attr:`RetrievalMetadata.in_place`."""
        first = 0
        if split is not None and isinstance(split.decode, DecodePlan) and not split.decode.in_place:
            first = split.rows
        pages = -(-dense.seq_lens.numpy()[first:] // self.block_size)
        if not (pages > self.budget_pages).any():
            return None
        table = dense.block_table.numpy()[first:]
        used = table[np.arange(table.shape[1]) < pages[:, None]]
        return page_runs(used, self.home_page_bytes)

    def _split(self, common: CommonAttentionMetadata, dense: CPUAttentionMetadata) -> Split | None:
        longer = np.flatnonzero(np.diff(common.query_start_loc_cpu.numpy()) != 1)
        rows = int(longer[0]) if len(longer) else common.num_reqs
        plan = self._plan(common, dense, rows)
        staged = None
        if self.staging is not None and rows < common.num_reqs:
            starts = dense.query_start_loc[rows:]
            staged = self.staging.plan(dense.block_table[rows:], dense.seq_lens[rows:], starts)
        if plan is None and staged is None:
            return None
        decode = prefill = None
        if rows:
            decode = plan or self._part(dense, slice(0, rows), dense.block_table[:rows])
        if rows < common.num_reqs:
            table = staged.block_table if staged else dense.block_table[rows:]
            prefill = self._part(dense, slice(rows, common.num_reqs), table)
        return Split(rows, decode, prefill, staged.pages if staged else None)

    def _plan(
        self, common: CommonAttentionMetadata, dense: CPUAttentionMetadata, count: int
    ) -> DecodePlan | None:
        assert self.requests is not None
        lens = dense.seq_lens.numpy()[:count]
        # A prompt's last chunk may be a single token; prefill is exact.
        assert common.is_prefilling is not None, "vLLM's V1 model runner provides this"
        decodes = ~common.is_prefilling.numpy()[:count]
        slots = self.requests.slots(count)
        batch = self.requests.select(slots)
        pages = -(-lens // self.block_size)
        sparse = decodes & ~batch.exact & (pages > batch.total_pages)
        self.requests.count_steps(slots, lens, pages, sparse, decodes)
        if not sparse.any():
            if count == common.num_reqs and decodes.all():
                room = batch.total_pages * self.block_size - lens
                never = np.iinfo(np.int32).max
                self.requests.expect_calm(int(np.where(batch.exact, never, room).min()))
            return None
        fresh = self.last_len[slots] != lens - 1
        self.last_len[slots[sparse]] = lens[sparse]
        tail = (lens - 1) % self.block_size + 1
        attended = np.where(sparse, (batch.total_pages - 1) * self.block_size + tail, lens)
        select = np.where(sparse, batch.select_pages, -1).astype(np.int32)
        heads = self.num_kv_heads
        rows = DecodeRows(
            block_table=dense.block_table[:count],
            seq_lens=dense.seq_lens[:count],
            slots=torch.from_numpy(slots),
            sink_pages=torch.from_numpy(batch.sink_pages),
            window_pages=torch.from_numpy(batch.window_pages),
            select_pages=torch.from_numpy(select),
            threshold=torch.from_numpy(batch.threshold),
            fresh=torch.from_numpy(fresh.astype(np.uint8)),
            corrected=self.requests.corrected,
            page_table=self.page_table[: count * heads],
        )
        attended_lens = torch.from_numpy(np.repeat(attended.astype(np.int32), heads))
        query_start_loc = self.one_token_starts[: count * heads + 1]
        return DecodePlan(
            rows,
            attended_lens,
            query_start_loc,
            self._schedule(attended_lens, query_start_loc, self.group, 1),
            in_place=bool((~sparse & (pages > batch.total_pages)).any()),
        )

    def _part(
        self, dense: CPUAttentionMetadata, requests: slice, block_table: torch.Tensor
    ) -> CPUAttentionMetadata:
        """vLLM's metadata for some of the requests, their tokens counted from the first of them."""
        starts = dense.query_start_loc[requests.start : requests.stop + 1]
        query_start_loc = starts - starts[0]
        seq_lens = dense.seq_lens[requests]
        return CPUAttentionMetadata(
            num_actual_tokens=int(query_start_loc[-1]),
            max_query_len=dense.max_query_len,
            query_start_loc=query_start_loc,
            max_seq_len=dense.max_seq_len,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=dense.slot_mapping,
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
