"""Attention of one layer."""

import functools
from typing import Any

import torch

from vllm_kvretrieval.attention.cpu.attend import AttendingLayer
from vllm_kvretrieval.attention.cpu.plans import RetrievalMetadata, Split
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.attention.support import check_impl
from vllm_kvretrieval.kernels import Chooser, IndexRecords, Ops
from vllm_kvretrieval.methods import LayerMethod, LayerWatcher
from vllm_kvretrieval.storage import LayerStorage


class RetrievalAttentionImpl(AttendingLayer):
    """vLLM's CPU attention; decode rows of a retrieval layer attend to lists of their own.

    Attributes:
        choosers: How the layer selects, by the number of the method; empty in a dense layer. Set by
            the worker once the KV cache is allocated.
        indexes: The page indexes that these have, each once.
        watchers: Methods that look at the layer's attention after it, by their numbers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_impl(self)
        self.choosers: list[Chooser] = []
        self.indexes: list[IndexRecords] = []
        self.watchers: dict[int, LayerWatcher] = {}

    def attach(
        self,
        kernels: Ops,
        choosers: list[Chooser],
        methods: list[LayerMethod],
        kv_cache: torch.Tensor,
        staging: PrefillStaging | None,
        storage: LayerStorage,
    ) -> None:
        """Make this a retrieval layer.

        Args:
            kernels: Implementation of the ops.
            choosers: Freshly made, by the number of the method; one at least.
            methods: The methods in this layer; see :func:`layer_methods`.
            kv_cache: [pages, kv_heads, page_size, 2 * head_size], as vLLM passes it to ``forward``.
            staging: What the metadata builder plans prefill with.
            storage: Where ``kv_cache`` is.

        Raises:
            ValueError: vLLM's pages are not those of a page index.
        """
        pages, kv_heads, page_size, _ = kv_cache.shape
        for store in (chooser.store for chooser in choosers):
            if (pages, kv_heads, page_size) != (store.pages, store.kv_heads, store.page_size):
                raise ValueError(
                    f"KV cache of {pages} pages, {kv_heads} heads, {page_size} tokens does not "
                    f"match a page index for {store.pages} of {store.kv_heads} and "
                    f"{store.page_size}"
                )
        self.kernels, self.choosers, self.methods = kernels, choosers, methods
        self.staging, self.storage = staging, storage
        for number, method in enumerate(methods):
            if isinstance(method, LayerWatcher):
                self.watchers[number] = method
        recorded = (c.store for c in choosers if c.store.records.numel())
        self.indexes = list({id(store): store for store in recorded}.values())

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.storage.token_major:
            self.kernels.write_rows(key, value, slot_mapping, kv_cache)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        for store in self.indexes:
            self.kernels.update_index(key, slot_mapping, store)
        self.storage.written(slot_mapping)

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
        by_vllm = functools.partial(
            super().forward, layer, query, key, value, kv_cache, attn_metadata, output,
            output_scale, output_block_scale,
        )  # fmt: skip
        if not isinstance(attn_metadata, RetrievalMetadata):
            return by_vllm()
        split = attn_metadata.split
        with self.storage.contexts(attn_metadata.reads):
            if pages := attn_metadata.loaded:
                # Where keys are in an unknown layout, bounds of a copied page stay too wide.
                for store in (store for store in self.indexes if store.cache is not None):
                    self.kernels.index_pages(pages.ids, pages.lengths, store)
            if self.choosers and split is not None:
                self._attend_in_parts(layer, query, key, value, kv_cache, split, output)
            elif attn_metadata.full is not None:
                self._attend_fully(layer, query, kv_cache, attn_metadata.full, output)
            else:
                by_vllm()
            for number, watcher in self.watchers.items():
                watcher.watch(query, kv_cache, attn_metadata.seen.get(number), split)
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
        for plan in split.decode:
            self._attend_to_plan(query, output, plan, self.methods[plan.method])
        if split.whole is not None:
            self._attend_to_all(layer, query, key, value, kv_cache, split.whole, output)
        for part in split.prefill:
            self._attend_to_part(layer, query, key, value, kv_cache, part, output)
