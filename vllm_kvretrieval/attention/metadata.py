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

from vllm_kvretrieval.kernels import DecodeRows

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.requests import RequestTable


@dataclass
class DecodePlan:
    """A step in which at least one request's context exceeds its budget.

    Attributes:
        rows: The requests that decode one token; they lead the batch.
        attended_lens: int32 [rows * kv_heads]; tokens that each (row, KV head) attends to.
        query_start_loc: int32 [rows * kv_heads + 1]; 0, 1, 2, ...
        scheduler_metadata: vLLM's kernel schedule for these single-head sequences.
        rest: Metadata of the prefilling requests behind the rows, their tokens counted from the end
            of the rows; None in a step that only decodes.
    """

    rows: DecodeRows
    attended_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scheduler_metadata: torch.Tensor
    rest: CPUAttentionMetadata | None


@dataclass
class RetrievalMetadata(CPUAttentionMetadata):
    """vLLM's metadata of the whole batch, for dense layers and contexts within budget.

    Attributes:
        plan: How retrieval layers attend; None where all contexts are within their budgets, and
            every layer takes vLLM's own path.
    """

    plan: DecodePlan | None = None


class RetrievalMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds :class:`RetrievalMetadata` from the batch and the table of running requests."""

    # vLLM moves requests that decode a single token to the front of the batch.
    reorder_batch_threshold = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = self.num_heads // self.num_kv_heads
        self.requests: RequestTable | None = None

    def attach(self, requests: "RequestTable", page_size: int) -> None:
        """Switch retrieval on, once the worker has allocated the layers' state.

        Args:
            requests: Table of the running requests.
            page_size: Tokens per page of the layers' state.

        Raises:
            ValueError: vLLM's block tables are not in pages of this size.
        """
        if self.block_size != page_size:
            raise ValueError(f"block tables in blocks of {self.block_size}, pages of {page_size}")
        slots = requests.capacity
        heads = self.num_kv_heads
        max_pages = -(-self.vllm_config.model_config.max_model_len // page_size)
        self.requests = requests
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
        if self.requests is not None:
            metadata.plan = self._plan(common_attn_metadata, dense)
        return metadata

    def _plan(
        self, common: CommonAttentionMetadata, dense: CPUAttentionMetadata
    ) -> DecodePlan | None:
        assert self.requests is not None
        starts = common.query_start_loc_cpu.numpy()
        longer = np.flatnonzero(np.diff(starts) != 1)
        count = int(longer[0]) if len(longer) else common.num_reqs
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
            self._rest(dense, count),
        )

    def _rest(self, dense: CPUAttentionMetadata, rows: int) -> CPUAttentionMetadata | None:
        tokens = dense.num_actual_tokens - rows
        if tokens == 0:
            return None
        query_start_loc = dense.query_start_loc[rows:] - rows
        seq_lens = dense.seq_lens[rows:]
        return CPUAttentionMetadata(
            num_actual_tokens=tokens,
            max_query_len=dense.max_query_len,
            query_start_loc=query_start_loc,
            max_seq_len=dense.max_seq_len,
            seq_lens=seq_lens,
            block_table=dense.block_table[rows:],
            slot_mapping=dense.slot_mapping[rows:],
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
