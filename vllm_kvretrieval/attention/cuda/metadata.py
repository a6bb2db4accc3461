"""The metadata of a step, which is built once per step for all layers of a group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.utils import torch_utils
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from vllm_kvretrieval.attention.cuda.far import FarTier
from vllm_kvretrieval.engine.cuda.requests import Attended, RunningRequests
from vllm_kvretrieval.kernels.device import DeviceOps, DeviceRequests, DeviceRows
from vllm_kvretrieval.methods.kept_prompts import Watch

UNIFORM = AttentionCGSupport.UNIFORM_BATCH
"""Graphs are of rows of one token each, or of one token and all drafts each."""
PER_ROW = (
    "seq_lens",
    "block_table_tensor",
    "is_prefilling",
    "seq_lens_cpu_upper_bound",
    "req_idx",
)
PER_TOKEN = "slot_mapping", "positions"
"""Fields of vLLM's metadata with an entry for every row, and for every token."""


@dataclass
class RetrievalMetadata(AttentionMetadata):
    """One step, for all layers of a group.

    Attributes:
        whole: The dense half's metadata, by which every row attends to its whole context.
        rest: The same of the rows that lead, but the contexts of those that attend to a selection
            are empty; None where no layer of the group retrieves, or no row leads.
        lead: How many rows that is: all, or where contexts are staged, those before the staged
            ones; see ``Staging.begin_step``; none where all attend to a selection.
        tokens: How many tokens these have; None: all.
        rows: Which rows these are, on the device.
        sparse: Whether there may be any. Said, as ``lead``, of steps that are no replay of a graph.
        watches: Queries of the step that decide what is kept of their prompts; no such step is a
            replay.
        loaded: int32 [n]; pages that a KV connector has filled, and that no index knows; None:
            there are none. No such step is a replay either.
    """

    whole: Any
    rest: Any = None
    lead: int = 0
    tokens: int | None = None
    rows: DeviceRows | None = None
    sparse: bool = False
    watches: Sequence[Watch] = ()
    loaded: torch.Tensor | None = None


class RetrievalMetadataBuilder(AttentionMetadataBuilder[RetrievalMetadata]):
    """Builds the dense half's metadata twice, and finds out on the device which rows are sparse.

    A CUDA graph replays what was captured over the tensors of that time. So whatever layers read
    stays where it is: vLLM's own buffers, and those made here; this runs before every step.
    """

    dense: ClassVar[type[AttentionBackend]]
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._of = kv_cache_spec, layer_names, vllm_config, device
        # One for each: some keep what they have planned in a buffer of their own.
        self.whole, self.rest = self.make_dense(), self.make_dense()
        self.page_size = kv_cache_spec.block_size
        self.ops: DeviceOps | None = None

    def make_dense(self) -> Any:
        """A builder of the dense half's metadata.

        It may ask for vLLM's configuration, which is current while vLLM makes builders, and not in
        a step that finds out that it needs another one.
        """
        with set_current_vllm_config(self._of[2]):
            return self.dense.get_builder_cls()(*self._of)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        dense = cls.dense.get_builder_cls().get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(dense, UNIFORM, key=lambda support: support.value)

    def attach(
        self,
        ops: DeviceOps,
        requests: RunningRequests,
        page_size: int,
        tier: FarTier | None = None,
    ) -> None:
        """Switch retrieval on, once the runner has allocated the KV cache.

        Args:
            ops: Implementation of the ops.
            requests: The requests that run.
            page_size: Tokens per page of the layers' indexes.
            tier: What the layers that retrieve share where their home is host memory.

        Raises:
            ValueError: vLLM's block tables are not in pages of this size.
        """
        if self.page_size != page_size:
            raise ValueError(f"block tables in blocks of {self.page_size}, pages of {page_size}")
        self.ops, self.requests, self.tier = ops, requests, tier
        # Of its own: a group looks at a step once.
        self.table: DeviceRequests = requests.device_table()
        shape = requests.capacity, self.device
        seats = torch.empty(2, shape[0], dtype=torch.int32, device=shape[1])
        written = torch.empty(4, shape[0], dtype=torch.int32, device=shape[1])
        self._seats, self._written = seats, written

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RetrievalMetadata:
        """See ``AttentionMetadataBuilder.build``."""
        return self._build("build", common_attn_metadata, common_prefix_len=0)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> RetrievalMetadata:
        """See ``AttentionMetadataBuilder.build_for_cudagraph_capture``."""
        return self._build("build_for_cudagraph_capture", common_attn_metadata)

    def _build(
        self, method: str, common: CommonAttentionMetadata, **options: Any
    ) -> RetrievalMetadata:
        build_whole, build_rest = (getattr(half, method) for half in (self.whole, self.rest))
        if self.ops is None:
            return RetrievalMetadata(build_whole(common_attn_metadata=common, **options))
        self._describe()
        rows = self._rows(common)
        far, least = self.tier is not None, self.requests.least
        self.ops.prepare_rows(rows, self.table, self.page_size, least=least, far=far)
        lead = common.num_reqs
        if self.tier is not None:
            new = np.diff(common.query_start_loc_cpu.numpy()[: lead + 1])
            lead = self.tier.begin_step(
                common,
                self.requests.staged(new),
                self.requests.seats(lead),
                self.requests.opened(),
                reads_written=self.requests.may_read_written(),
            )
        masked = first_rows(common, lead).replace(seq_lens=rows.dense_lens[:lead])
        whole = build_whole(common_attn_metadata=common, **options)
        attended = self.requests.attended()
        # Also where no row leads after all: the step may be the replay of a graph that reads it.
        rest = build_rest(common_attn_metadata=masked, **options) if lead else None
        tokens = None if lead == common.num_reqs else masked.num_actual_tokens
        if attended is Attended.SELECTIONS:
            lead = tokens = 0
        return RetrievalMetadata(
            whole,
            rest,
            lead,
            tokens,
            rows,
            attended is not Attended.WHOLE,
            self.requests.watches(common.query_start_loc_cpu.numpy(), rows.block_table),
            self._loaded(),
        )

    def _loaded(self) -> torch.Tensor | None:
        pages = self.requests.loaded_pages
        return torch_utils.async_tensor_h2d(pages, device=self.device) if len(pages) else None

    def _describe(self) -> None:
        """Tell the device whose the rows are, and which read prompts.

        The runner says it, and not vLLM's metadata: of models with state-space layers these have
        no requests in them, and take a prompt's last token for one that is generated.
        """
        batch = self.requests.batch
        described = np.zeros((2, self.requests.capacity), dtype=np.int32)
        described[0] = -1
        count = len(batch.seats)
        described[0, :count], described[1, :count] = batch.seats, batch.prefilling
        torch_utils.async_tensor_h2d(described, out=self._seats)

    def _rows(self, common: CommonAttentionMetadata) -> DeviceRows:
        count = common.num_reqs
        seats, prefilling = self._seats[:, :count]
        choosers, fresh, dense_lens, certain = self._written[:, :count]
        return DeviceRows(
            seats=seats,
            prefilling=prefilling,
            query_start=common.query_start_loc,
            seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            choosers=choosers,
            fresh=fresh,
            dense_lens=dense_lens,
            certain=certain,
            drafts=self.requests.drafts,
        )


def first_rows(common: CommonAttentionMetadata, count: int) -> CommonAttentionMetadata:
    """The first rows of a step; all of them as they are."""
    if count == common.num_reqs:
        return common
    starts = common.query_start_loc_cpu[: count + 1]
    tokens = int(starts[-1])
    parts = dict.fromkeys(PER_ROW, count) | dict.fromkeys(PER_TOKEN, tokens)
    given = {name: getattr(common, name) for name in parts}
    return common.replace(
        num_reqs=count,
        num_actual_tokens=tokens,
        max_query_len=max(starts.diff().tolist(), default=1),
        query_start_loc=common.query_start_loc[: count + 1],
        query_start_loc_cpu=starts,
        **{name: field[: parts[name]] for name, field in given.items() if field is not None},
    )
