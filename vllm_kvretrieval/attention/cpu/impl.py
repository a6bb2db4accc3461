"""Attention of one layer."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_kvretrieval.attention.cpu.blocks import Blocks
from vllm_kvretrieval.attention.cpu.chunks import Chunks
from vllm_kvretrieval.attention.cpu.keeping import Keeper
from vllm_kvretrieval.attention.cpu.observation import LatestQueries
from vllm_kvretrieval.attention.cpu.plans import (
    DecodePlan,
    Full,
    Prefill,
    RetrievalMetadata,
    Schedule,
    Split,
    Whole,
)
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.attention.support import check_impl
from vllm_kvretrieval.kernels import (
    Chooser,
    ContextSelector,
    IndexStore,
    Merge,
    Ops,
    PromptLists,
    TokenLists,
)
from vllm_kvretrieval.kernels.cpu import ROWS
from vllm_kvretrieval.storage import IN_PLACE, LayerStorage, Part, Ready


class RetrievalAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention; decode rows of a retrieval layer attend to pages of their own.

    Attributes:
        choosers: How the layer selects pages, by the number of the method; empty in a dense layer.
            Set by the worker once the KV cache is allocated.
        block_choosers: The same for blocks of prompts; empty where prompts attend to everything.
        stores: The page indexes that these have, each once.
        selector: What the layer selects with for others (a filter layer), or what has selected for
            it (one that follows); None: it selects for itself.
        prefill_selector: The same for chunks of prompts; None: prefill is exact.
        keeper: What keeps tokens for methods that drop the others; None: no method does.
        storage: Where the layer's KV is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_impl(self)
        self.choosers: list[Chooser] = []
        self.block_choosers: dict[int, Chooser] = {}
        self.stores: list[IndexStore] = []
        self.selector: ContextSelector | None = None
        self.prefill_selector: ContextSelector | None = None
        self.latest: LatestQueries | None = None
        self.merge: Merge | None = None
        self.keeper: Keeper | None = None
        self.kernels: Ops
        self.staging: PrefillStaging | None = None
        self.storage: LayerStorage = IN_PLACE

    def attach(
        self,
        kernels: Ops,
        choosers: list[Chooser],
        kv_cache: torch.Tensor,
        staging: PrefillStaging | None,
        storage: LayerStorage,
    ) -> None:
        """Make this a retrieval layer.

        Args:
            kernels: Implementation of the ops.
            choosers: Freshly made, by the number of the method; one at least.
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
        self.kernels, self.choosers = kernels, choosers
        self.staging, self.storage = staging, storage
        kept = (c.store for c in choosers if c.store.records.numel())
        self.stores = list({id(store): store for store in kept}.values())

    def filter(
        self,
        kernels: Ops,
        selector: ContextSelector,
        latest: LatestQueries | None,
        prefill_selector: ContextSelector | None,
        merge: Merge | None = None,
    ) -> None:
        """Make this a filter layer, which selects for the layers after it.

        Args:
            kernels: Implementation of the ops.
            selector: What it selects with.
            latest: Where its latest queries are kept; None: it selects by the last one alone.
            prefill_selector: What it selects with for chunks of prompts; None: it does not.
            merge: Where other workers have heads of this layer, too; see ``Ops.select_context``.
        """
        self.merge = merge
        self.kernels, self.selector, self.latest = kernels, selector, latest
        self.prefill_selector = prefill_selector

    def follow(self, filter: "RetrievalAttentionImpl") -> None:
        """Let another layer select for this one."""
        self.selector, self.prefill_selector = filter.selector, filter.prefill_selector

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
        for store in self.stores:
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
            super().forward,
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
        if not isinstance(attn_metadata, RetrievalMetadata):
            return by_vllm()
        with self.storage.contexts(attn_metadata.reads):
            if pages := attn_metadata.loaded:
                # Where keys are in an unknown layout, bounds of a copied page stay too wide.
                for store in (store for store in self.stores if store.cache is not None):
                    self.kernels.index_pages(pages.ids, pages.lengths, store)
            if self.choosers and attn_metadata.split is not None:
                self._attend_in_parts(
                    layer, query, key, value, kv_cache, attn_metadata.split, output
                )
            elif attn_metadata.full is not None:
                self._attend_fully(layer, query, kv_cache, attn_metadata.full, output)
            else:
                by_vllm()
            if self.keeper is not None and attn_metadata.watches:
                self.keeper.observe(query, kv_cache, attn_metadata.watches)
            if self.selector is not None and not self.choosers:
                self._select_for_others(query, attn_metadata)
        return output

    def _select_for_others(self, query: torch.Tensor, metadata: RetrievalMetadata) -> None:
        """Of a filter layer: choose what the layers after it attend to in this step."""
        assert self.selector is not None
        if self.latest is not None and metadata.observed is not None:
            self.latest.take(query, metadata.observed)
        if metadata.split is None:
            return
        for plan in metadata.split.decode:
            if plan.weights is None:
                continue
            if self.latest is not None:
                queries = self.latest.of(plan.rows)
            else:
                queries = query if plan.index is None else query[plan.index]
            self.kernels.select_context(queries, plan.weights, plan.rows, self.selector, self.merge)
            self._list_selected(plan)
            self.storage.announce(plan.rows)
        for chunks in (part.chunks for part in metadata.split.prefill):
            if chunks is not None:
                assert self.prefill_selector is not None
                queries = query[chunks.queries]
                self.kernels.select_context(
                    queries, chunks.weights, chunks.rows, self.prefill_selector, self.merge
                )

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
            self._attend_to_pages(query, output, plan, self.choosers[plan.method])
        if split.whole is not None:
            self._attend_to_all(layer, query, key, value, kv_cache, split.whole, output)
        for part in split.prefill:
            if part.blocks is not None:
                self._select_for_blocks(query, part.blocks)
            context, new = self._stage(kv_cache, part), part.tokens
            if isinstance(part.by, PromptLists):
                self._attend_to_prompts(layer, query, context, part, output)
                continue
            super().forward(layer, query[new], key[new], value[new], context, part.by, output[new])

    def _select_for_blocks(self, query: torch.Tensor, blocks: Blocks) -> None:
        """List the pages that blocks of prompts attend to."""
        chooser = self.block_choosers[blocks.method]
        queries = blocks.grouped(query, self.num_kv_heads)
        self.kernels.plan_decode(queries, blocks.rows, chooser)

    def _attend_fully(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        full: Full,
        output: torch.Tensor,
    ) -> None:
        """The whole batch, over whole contexts, by our own kernels."""
        if full.rows is not None:
            self._attend_to_rows(layer, query, kv_cache, full.rows, output)
        if full.prompts is not None:
            self._attend_to_prompts(layer, query, kv_cache, full.prompts, output)

    def _attend_to_prompts(
        self,
        layer: Any,
        query: torch.Tensor,
        context: torch.Tensor,
        part: Prefill,
        output: torch.Tensor,
    ) -> None:
        """Prompts by our own kernel; ``context`` is the KV cache, or what is staged of it."""
        assert isinstance(part.by, PromptLists)
        in_cache = part.staged is None and part.chunks is None
        layout = self._layout(layer) if in_cache else layer.isa
        new = part.tokens
        self.kernels.attend_prompt(
            query[new],
            part.by,
            context,
            output[new],
            layout,
            self.scale,
            softcap=self.logits_soft_cap,
            sinks=self._sinks,
        )

    def _attend_to_rows(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        lists: TokenLists,
        output: torch.Tensor,
    ) -> None:
        """Rows of one token by our own kernel, over whole contexts in the KV cache."""
        units = kv_cache.view(-1, kv_cache.shape[2], 2 * self.head_size)
        self._attend(query, lists, units, output, self._layout(layer))

    def _attend(
        self,
        query: torch.Tensor,
        lists: TokenLists,
        units: torch.Tensor,
        output: torch.Tensor,
        layout: str,
        lse: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Rows of one token by our own kernel."""
        self.kernels.attend(
            query,
            lists,
            units,
            output,
            layout,
            self.scale,
            lse,
            weights,
            softcap=self.logits_soft_cap,
            sinks=self._sinks,
        )

    @property
    def _sinks(self) -> torch.Tensor | None:
        """float32 [num_heads]; the layer's learned attention sinks."""
        return None if self.sinks is None else self.sinks.detach().float()

    def _layout(self, layer: Any) -> str:
        """How the layer's KV cache holds keys."""
        return ROWS if self.storage.token_major else layer.isa

    def _stage(self, kv_cache: torch.Tensor, part: Prefill) -> torch.Tensor:
        """Where vLLM's kernel is to read the context of prompts."""
        if part.staged is None and part.chunks is None:
            return kv_cache
        assert self.staging is not None
        buffer, isa = self.staging.buffer, self.staging.isa
        if part.staged is not None:
            self.storage.lay_out(part.staged, buffer, isa)
        if part.chunks is not None:
            self._list_chunks(part.chunks)
            self.kernels.stage_tokens(kv_cache, part.chunks.lists, buffer, isa)
        return buffer

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
        """Rows of one token, over whole contexts."""
        index, by = whole.index, whole.by
        if isinstance(by, TokenLists):
            rows = slice(len(by.lengths) // by.kv_heads) if index is None else index
            attended = output[rows]
            self._attend_to_rows(layer, query[rows], kv_cache, by, attended)
        elif index is None:
            super().forward(layer, query, key, value, kv_cache, by, output)
            return
        else:
            attended = torch.empty(len(index), *output.shape[1:], dtype=output.dtype)
            # Keys and values are read from the cache.
            super().forward(layer, query[index], key, value, kv_cache, by, attended)
        if index is not None:
            output[index] = attended

    def _attend_to_pages(
        self, query: torch.Tensor, output: torch.Tensor, plan: DecodePlan, chooser: Chooser
    ) -> None:
        """Decode rows: every (row, KV head) has pages of its own."""
        rows, index = len(plan.rows), plan.index
        query = query[:rows] if index is None else query[index]
        attended = output[:rows] if index is None else torch.empty_like(query)
        if plan.kept is not None:
            self._attend_to_kept(query, attended, plan, chooser)
        else:
            self._attend_to_selected(query, attended, plan, chooser)
        if index is not None:
            output[index] = attended

    def _attend_to_selected(
        self, query: torch.Tensor, output: torch.Tensor, plan: DecodePlan, chooser: Chooser
    ) -> None:
        """What queries select, or filters for them."""
        ready = Ready.NOTHING
        if plan.weights is None:
            self.kernels.plan_decode(query, plan.rows, chooser)
        else:
            self._list_selected(plan)
            ready = Ready.ANNOUNCED
        self._attend_to_lists(query, output, plan, chooser, ready)

    def _attend_to_kept(
        self, query: torch.Tensor, output: torch.Tensor, plan: DecodePlan, chooser: Chooser
    ) -> None:
        """What their prompts' attention has left to rows."""
        kept, keeper = plan.kept, self.keeper
        assert kept is not None
        assert keeper is not None
        keeper.settle(kept, plan.method, plan.rows)
        self.kernels.plan_decode(query, plan.rows, chooser)
        weights = keeper.weights(query) if kept.drops else None
        ready = Ready.NOTHING if kept.drops else Ready.HELD
        self._attend_to_lists(query, output, plan, chooser, ready, weights)
        if weights is not None:
            keeper.drop(kept, plan.rows, weights)

    def _attend_to_lists(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        plan: DecodePlan,
        chooser: Chooser,
        ready: Ready,
        weights: torch.Tensor | None = None,
    ) -> None:
        """What the rows' lists say, wherever that is."""
        parts = self.storage.reach(plan.rows, plan.lists, ready)
        self.storage.ahead(plan.rows, chooser)
        layout = chooser.store.layout
        if plan.schedule is not None:
            ((lists, units),) = parts
            self._attend_by_vllm(query, lists, units, plan.schedule, output)
        elif len(parts) == 1:
            ((lists, units),) = parts
            self._attend(query, lists, units, output, layout, weights=weights)
        else:
            self._attend_to_several(query, parts, output, layout)

    def _attend_to_several(
        self, query: torch.Tensor, parts: Sequence[Part], output: torch.Tensor, layout: str
    ) -> None:
        """Parts of one softmax, merged by the logarithms of their sums."""
        merged = total = torch.empty(0)
        for number, (lists, units) in enumerate(parts):
            part, lse = torch.empty_like(query), torch.empty(query.shape[:2])
            self._attend(query, lists, units, part, layout, lse)
            attended = part.float()
            if number == 0:
                merged, total = attended, lse
                continue
            share = torch.sigmoid(total - lse)[..., None]
            merged = attended + share * (merged - attended)
            total = torch.logaddexp(total, lse)
        output[: len(query)] = merged.to(output.dtype)

    def _list_selected(self, plan: DecodePlan) -> None:
        """What a filter has selected is listed once: by the first of the layers that follow it, or
        by itself, where it recalls it for them."""
        assert self.selector is not None
        if plan.listed is not self.selector:
            self.kernels.list_context(plan.rows, self.selector, self.num_kv_heads)
            plan.listed = self.selector

    def _list_chunks(self, chunks: Chunks) -> None:
        """The same of chunks of prompts."""
        assert self.prefill_selector is not None
        if chunks.listed is not self.prefill_selector:
            self.kernels.list_context(chunks.rows, self.prefill_selector, self.num_kv_heads)
            chunks.listed = self.prefill_selector

    def _attend_by_vllm(
        self,
        query: torch.Tensor,
        lists: TokenLists,
        units: torch.Tensor,
        schedule: Schedule,
        output: torch.Tensor,
    ) -> None:
        """Where keys lie as AMX has them, which vLLM's kernel has, or as only that one knows.

        Every KV head is a sequence of its own then, so there are no sinks of single heads.
        """
        single_heads = units.view(len(units), 1, -1, self.head_size)
        keys, values = single_heads.chunk(2, dim=2)
        shape = (len(schedule.seq_lens), -1, self.head_size)
        ops.cpu_attention_with_kv_cache(
            query=query.reshape(shape),
            key_cache=keys,
            value_cache=values,
            output=output.view(shape),
            query_start_loc=schedule.query_start_loc,
            seq_lens=schedule.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=lists.entries,
            softcap=self.logits_soft_cap,
            scheduler_metadata=schedule.scheduler_metadata,
            s_aux=None,
        )
