"""Attention of one layer."""

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_kvretrieval.attention.metadata import DecodePlan, RetrievalMetadata, Split, Whole
from vllm_kvretrieval.attention.staging import PrefillStaging
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import LayerState, Ops
from vllm_kvretrieval.tiers.layer import SlowLayer


class RetrievalAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention; decode rows of a retrieval layer attend to their own page lists.

    Attributes:
        state: The layer's page index and per-request memory, or None in a dense layer. Set by the
            worker once the KV cache is allocated.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = {
            "ALiBi": self.alibi_slopes is not None,
            "logits soft-capping": bool(self.logits_soft_cap),
            "learned attention sinks": self.sinks is not None,
            "cross-layer KV sharing": self.kv_sharing_target_layer_name is not None,
        }
        for what, present in unsupported.items():
            if present:
                raise RetrievalConfigError(
                    f"KV retrieval does not support {what}, which this model uses. Serve it "
                    "without --attention-backend."
                )
        self.state: LayerState | None = None
        self.kernels: Ops
        self.staging: PrefillStaging | None = None
        self.slow: SlowLayer | None = None
        # Keys and values of the cache, seen as single-head pages [pages * kv_heads, 1, tokens, d].
        self.page_keys = self.page_values = torch.empty(0)

    def attach(
        self,
        kernels: Ops,
        state: LayerState,
        kv_cache: torch.Tensor,
        staging: PrefillStaging | None,
        slow: SlowLayer | None,
    ) -> None:
        """Make this a retrieval layer.

        Args:
            kernels: Implementation of the ops.
            state: Freshly allocated.
            kv_cache: [pages, kv_heads, page_size, 2 * head_size], as vLLM passes it to ``forward``.
            staging: What the metadata builder plans prefill with.
            slow: Where ``kv_cache`` lies in a slow home, the way to read it.

        Raises:
            ValueError: vLLM's pages are not those of the state.
        """
        pages, kv_heads, page_size, _ = kv_cache.shape
        indexed = state.pages or pages  # a method that selects nothing has no index
        if (pages, kv_heads, page_size) != (indexed, state.kv_heads, state.page_size):
            raise ValueError(
                f"KV cache of {pages} pages, {kv_heads} heads, {page_size} tokens does not match "
                f"a page index for {state.pages} of {state.kv_heads} and {state.page_size}"
            )
        single_head = kv_cache.view(pages * kv_heads, 1, 2 * page_size, self.head_size)
        self.page_keys, self.page_values = single_head.chunk(2, dim=2)
        self.kernels, self.state, self.staging, self.slow = kernels, state, staging, slow

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self.state is not None and self.state.pages:
            self.kernels.update_index(key, slot_mapping, self.state)
        if self.slow is not None and self.slow.cache is not None:
            self.slow.cache.write(slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``CPUAttentionBackendImpl.forward``."""
        ours = isinstance(attn_metadata, RetrievalMetadata)
        slow = self.slow if ours else None
        if slow is not None and not slow.stage(attn_metadata.in_place):
            slow = None
        if self.state is not None and self.state.pages and ours and attn_metadata.loaded:
            pages = attn_metadata.loaded
            self.kernels.index_pages(kv_cache, pages.ids, pages.lengths, self.state, layer.isa)
        split = attn_metadata.split if ours else None
        if self.state is not None and split is not None:
            self._attend_in_parts(layer, query, key, value, kv_cache, split, output)
        else:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if slow is not None:
            slow.unmap()
        return output

    def _attend_in_parts(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        split: Split,
        output: torch.Tensor,
    ) -> None:
        """Decode rows, then prefill."""
        assert self.state is not None
        rows = split.rows
        if split.decode is not None:
            self._attend_to_pages(query, output, split.decode, self.state)
        if split.whole is not None:
            self._attend_to_all(layer, query, key, value, kv_cache, split.whole, output)
        if split.prefill is not None:
            if split.staged is not None:
                assert self.staging is not None
                self.kernels.stage_pages(kv_cache, split.staged, self.staging.buffer)
                kv_cache = self.staging.buffer
            super().forward(
                layer,
                query[rows:],
                key[rows:],
                value[rows:],
                kv_cache,
                split.prefill,
                output[rows:],
            )

    def _attend_to_all(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        whole: Whole,
        output: torch.Tensor,
    ) -> None:
        """Rows of one token, over whole contexts, as vLLM has it."""
        index = whole.index
        if index is None:
            super().forward(layer, query, key, value, kv_cache, whole.metadata, output)
            return
        attended = torch.empty(len(index), *output.shape[1:], dtype=output.dtype)
        # Keys and values are read from the cache.
        super().forward(layer, query[index], key, value, kv_cache, whole.metadata, attended)
        output[index] = attended

    def _attend_to_pages(
        self, query: torch.Tensor, output: torch.Tensor, plan: DecodePlan, state: LayerState
    ) -> None:
        """Decode rows: every (row, KV head) is a sequence of its own to vLLM's kernel."""
        rows, index = len(plan.rows), plan.index
        query = query[:rows] if index is None else query[index]
        attended = output[:rows] if index is None else torch.empty_like(query)
        self.kernels.plan_decode(query, plan.rows, state)
        keys, values = self.page_keys, self.page_values
        if self.slow is not None:
            assert self.slow.cache is not None, "retrieval layers have one"
            self.slow.cache.resolve(plan.rows)
            self.slow.cache.prefetch(plan.rows, state)
            keys, values = self.slow.keys, self.slow.values
        shape = (rows * state.kv_heads, state.group, state.head_size)
        ops.cpu_attention_with_kv_cache(
            query=query.reshape(shape),
            key_cache=keys,
            value_cache=values,
            output=attended.view(shape),
            query_start_loc=plan.query_start_loc,
            seq_lens=plan.attended_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=plan.rows.page_table,
            softcap=0.0,
            scheduler_metadata=plan.scheduler_metadata,
            s_aux=None,
        )
        if index is not None:
            output[index] = attended
