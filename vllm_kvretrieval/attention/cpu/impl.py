"""Attention of one layer."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_kvretrieval.attention.cpu.plans import (
    Observed,
    Pages,
    Prefill,
    RetrievalMetadata,
    Whole,
)
from vllm_kvretrieval.attention.cpu.schedules import Schedule
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.attention.refusals import check_impl
from vllm_kvretrieval.kernels import (
    Chooser,
    DecodeLayer,
    IndexRecords,
    Ops,
    PromptLists,
    Remainder,
    TokenLists,
    cpu,
)
from vllm_kvretrieval.methods import DecodePlan, LayerMethod, LayerWatcher
from vllm_kvretrieval.methods.base import WHOLE
from vllm_kvretrieval.storage.base import LayerStorage, Part
from vllm_kvretrieval.storage.memory import IN_PLACE

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.sources import LayerSources


class Durations:
    """How long the layers of a worker plan decode steps, and wait for what they have chosen.

    Attributes:
        planning: Nanoseconds in which layers chose what to attend to.
        waiting: Nanoseconds in which they brought what they had chosen to where it is read.
    """

    def __init__(self) -> None:
        self.planning = self.waiting = 0

    def note(self, began: int, planned: int) -> None:
        """Note a layer's step that ends now.

        Args:
            began: When it began to choose, by ``perf_counter_ns``.
            planned: When it had chosen.
        """
        self.planning += planned - began
        self.waiting += perf_counter_ns() - planned

    def take(self) -> dict[str, int]:
        """Microseconds since the last call, by the names of their metrics."""
        taken = {"planning_us": self.planning // 1000, "waiting_us": self.waiting // 1000}
        self.planning %= 1000
        self.waiting %= 1000
        return taken


class Halves:
    """Keys and values of a KV cache, as vLLM's kernels take them: views, made once per cache.

    A step that decodes a token spends more time on Python between two layers than on their kernels,
    since the weights have displaced its code and data from the processor's caches.
    """

    def __init__(self) -> None:
        self._cache: torch.Tensor | None = None
        self._halves: tuple[torch.Tensor, torch.Tensor]

    def of(self, cache: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its keys and its values, each [pages, heads, page_size, head_size].

        Args:
            cache: [pages, heads, page_size, 2 * head_size], or with one head [units, page_size,
                2 * head_size].
            heads: KV heads of a page.
        """
        if cache is not self._cache:
            pages = cache.view(len(cache), heads, -1, cache.shape[-1] // 2)
            keys, values = pages.chunk(2, dim=2)
            self._cache, self._halves = cache, (keys, values)
        return self._halves


class RetrievalAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention; decode rows of a retrieval layer attend to lists of their own.

    Attributes:
        kernels: Implementation of the ops.
        choosers: How the layer selects, by the number of the method; empty in a dense layer.
        indexes: The page indexes that these have, each once.
        methods: How the layer comes to what rows and chunks of prompts attend to, by the number of
            the method; empty in a dense layer.
        watchers: Methods that look at the layer's attention after it, by their numbers.
        staging: Where contexts of prompts are laid out; None: they are read where they are.
        storage: Where the layer's KV is.
        durations: How long decode steps take to choose and to bring what is attended to.
        sources: Takes note of what is attended to; None: nobody may ask.
    """

    kernels: Ops = cpu
    sources: "LayerSources | None" = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_impl(self)
        self.choosers: list[Chooser] = []
        self.indexes: list[IndexRecords] = []
        self._growing: list[IndexRecords] = []  # those whose records change with each key
        self.methods: list[LayerMethod] = []
        self.watchers: dict[int, LayerWatcher] = {}
        self.staging: PrefillStaging | None = None
        self.storage: LayerStorage = IN_PLACE
        self.durations = Durations()
        self._written, self._reached = Halves(), Halves()
        self._alone: DecodeLayer | None = None

    def attach(
        self,
        methods: list[LayerMethod],
        kv_cache: torch.Tensor,
        staging: PrefillStaging | None,
        storage: LayerStorage,
        durations: Durations,
    ) -> None:
        """Make this a retrieval layer.

        Args:
            methods: The methods in this layer, freshly made; see :func:`layer_methods`.
            kv_cache: [pages, kv_heads, page_size, 2 * head_size], as vLLM passes it to ``forward``.
            staging: What the metadata builder plans prefill with.
            storage: Where ``kv_cache`` is.
            durations: Those of all layers.

        Raises:
            ValueError: vLLM's pages are not those of a page index.
        """
        choosers = [method.chooser for method in methods[:WHOLE]]
        pages, kv_heads, page_size, _ = kv_cache.shape
        for store in (chooser.store for chooser in choosers):
            if (pages, kv_heads, page_size) != (store.pages, store.kv_heads, store.page_size):
                raise ValueError(
                    f"KV cache of {pages} pages, {kv_heads} heads, {page_size} tokens does not "
                    f"match a page index for {store.pages} of {store.kv_heads} and "
                    f"{store.page_size}"
                )
        self.choosers, self.methods = choosers, methods
        self.staging, self.storage, self.durations = staging, storage, durations
        for number, method in enumerate(methods):
            if isinstance(method, LayerWatcher):
                self.watchers[number] = method
        recorded = (c.store for c in choosers if c.store.records.numel())
        indexes = list({id(store): store for store in recorded}.values())
        self._growing = [s for s in indexes if s.index is not None and s.index.grows]
        if self.kv_sharing_target_layer_name is None:
            self.indexes = indexes  # else the layer that has the cache keeps them
            rule = self.scale, self.logits_soft_cap, self.learned_sinks
            layout, group = choosers[0].store.layout, self.num_queries_per_kv
            alone = DecodeLayer(kv_cache, layout, group, indexes, *rule)
            if not self.watchers and self.kernels.decodes(choosers, alone):
                self._alone = alone

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write a step's keys and values, and take them into the page indexes."""
        if self.storage.token_major:
            self.kernels.write_cache(key, value, slot_mapping, kv_cache, cpu.TOKEN_MAJOR)
        else:
            ops.cpu_attn_reshape_and_cache(
                key,
                value,
                *self._written.of(kv_cache, self.num_kv_heads),
                slot_mapping,
                layer.isa,
                layer._k_scale_float,
                layer._v_scale_float,
                self.kv_cache_dtype,
            )
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
        """See ``CPUAttentionBackendImpl.forward``; keys and values are written first."""
        if self._alone is not None and isinstance(attn_metadata, RetrievalMetadata):
            plan = attn_metadata.alone
            if plan is not None and self.methods[plan.method].by_chooser:
                slots = attn_metadata.slot_mapping
                self._attend_alone(query, key, value, slots, output, plan, self._alone)
                return output
        scales = output_scale, output_block_scale
        written = key is not None and self.kv_sharing_target_layer_name is None
        if written and attn_metadata is not None:  # else it is a warm-up
            slots = attn_metadata.slot_mapping
            if len(key) > len(slots):  # the rest of the batch is padding
                key, value = key[: len(slots)], value[: len(slots)]
            self.do_kv_cache_update(layer, key, value, kv_cache, slots)
        step = layer, query, key, value, kv_cache
        if not isinstance(attn_metadata, RetrievalMetadata):
            return super().forward(*step, attn_metadata, output, *scales)
        split, full = attn_metadata.split, attn_metadata.full
        drafted = attn_metadata.drafted
        with self.storage.contexts(attn_metadata.reads):
            if attn_metadata.loaded is not None:
                self._index(attn_metadata.loaded, self.indexes)
            if drafted is not None:
                self._index(drafted.selecting, self._growing)
            if self.choosers and split is not None:
                for plan in split.decode:
                    self._attend_to_plan(query, output, plan, self.methods[plan.method])
                if split.whole is not None:
                    self._attend_to_all(*step, split.whole, output)
                for part in split.prefill:
                    self._attend_to_part(*step, part, output)
            elif full is not None:
                if full.rows is not None:
                    self._attend_to_all(*step, full.rows, output)
                for part in full.prompts:
                    self._attend_to_prompts(layer, query, kv_cache, part, output)
            else:
                super().forward(*step, attn_metadata, output, *scales)
            for number, watcher in self.watchers.items():
                watcher.watch(query, kv_cache, attn_metadata.seen.get(number), split)
            if self.sources is not None and attn_metadata.observed is not None:
                self._observe(layer, query, kv_cache, attn_metadata.observed, self.sources)
            if drafted is not None and drafted.written is not None:
                self._index(drafted.written, self._growing)
        return output

    def _index(self, pages: Pages, stores: Sequence[IndexRecords]) -> None:
        """Build the records of pages from their keys."""
        for store in stores:
            if store.cache is not None:  # else bounds of a copied page stay too wide
                self.kernels.index_pages(pages.ids, pages.lengths, store)

    @property
    def learned_sinks(self) -> torch.Tensor | None:
        """float32 [num_heads]; the layer's learned attention sinks."""
        return None if self.sinks is None else self.sinks.detach().float()

    def _layout(self, layer: Any) -> str:
        """How the layer's KV cache holds keys."""
        return cpu.TOKEN_MAJOR if self.storage.token_major else layer.isa

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
        """Rows that decode, over whole contexts."""
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

    def _attend_to_part(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        part: Prefill,
        output: torch.Tensor,
    ) -> None:
        """Prompts, over their contexts up to each of their tokens."""
        if (chunks := part.chunks) is not None:
            lists = self.methods[chunks.method].prompt(self.kernels, query, chunks)
            if isinstance(lists, PromptLists):
                part = replace(part, by=lists)
        context, new = self._stage(kv_cache, part), part.tokens
        if isinstance(part.by, PromptLists):
            self._attend_to_prompts(layer, query, context, part, output)
        else:
            if key is not None and value is not None:  # else another layer has written them
                key, value = key[new], value[new]
            super().forward(layer, query[new], key, value, context, part.by, output[new])

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
        layout = self._layout(layer) if part.in_cache else layer.isa
        new = part.tokens
        self.kernels.attend_prompt(
            query[new],
            part.by,
            context,
            output[new],
            layout,
            self.scale,
            softcap=self.logits_soft_cap,
            sinks=self.learned_sinks,
        )

    def _stage(self, kv_cache: torch.Tensor, part: Prefill) -> torch.Tensor:
        """Where the context of prompts is read."""
        if part.in_cache:
            return kv_cache
        staging = self.staging
        assert staging is not None
        if part.gathered is not None:
            self.kernels.stage_tokens(kv_cache, part.gathered, staging.buffer, staging.isa)
            return staging.buffer
        assert part.staged is not None, "else it is in the cache"
        buffer = staging.buffer if part.chunks is None else staging.pages
        self.storage.lay_out(part.staged, buffer, staging.isa)
        return buffer

    def _attend_to_rows(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        lists: TokenLists,
        output: torch.Tensor,
    ) -> None:
        """Rows that decode by our own kernel, over whole contexts in the KV cache."""
        units = kv_cache.view(-1, kv_cache.shape[2], 2 * self.head_size)
        self._attend(query, Part(lists, units), output, self._layout(layer), self.learned_sinks)

    def _observe(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        observed: Observed,
        sources: "LayerSources",
    ) -> None:
        """Note what rows attend to that have attended to whole contexts, by attending once more."""
        units = kv_cache.view(-1, kv_cache.shape[2], 2 * self.head_size)
        part, layout = Part(observed.lists, units), self._layout(layer)
        weights = self._weights(query[observed.index], part, layout)
        sources.note(observed, observed.lists, weights)

    def _weights(self, query: torch.Tensor, part: Part, layout: str) -> torch.Tensor:
        """float32 [T, num_heads, longest list]; what queries attend to, by attending once more."""
        longest = int(part.lists.lengths.max())
        weights = torch.empty(*query.shape[:2], longest, dtype=torch.float32)
        nowhere = torch.empty_like(query)
        self._attend(query, part, nowhere, layout, self.learned_sinks, None, weights)
        return weights

    def _attend_alone(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        output: torch.Tensor,
        plan: DecodePlan,
        layer: DecodeLayer,
    ) -> None:
        """A step's rows of a single method, from their keys to the output, by one op."""
        chooser = self.methods[plan.method].chooser
        step = query, key, value, slot_mapping, output
        self.durations.planning += self.kernels.decode_layer(*step, plan.rows, chooser, layer)

    def _attend_to_plan(
        self, query: torch.Tensor, output: torch.Tensor, plan: DecodePlan, method: LayerMethod
    ) -> None:
        """Decode rows: every (row, KV head) has a list of its own."""
        query, index, starts = plan.of(query), plan.index, plan.rows.starts
        attended = output[: len(query)] if index is None else torch.empty_like(query)
        began = perf_counter_ns()
        remainder = method.choose(self.kernels, plan.asking(query), plan)
        if remainder is not None and starts is not None:
            remainder = remainder.shared(starts)
        planned = perf_counter_ns()
        parts = (method.source or self.storage).reach(plan.rows, plan.lists)
        self.durations.note(began, planned)
        self.storage.ahead(plan.rows, method.chooser)
        layout = method.chooser.store.layout
        asked = self.sources is not None and self.sources.asked(plan.rows.seats)
        if plan.schedule is not None:
            self._attend_by_vllm(query, parts[0], plan.schedule, attended)
            if self.sources is not None and asked and layout in cpu.LAYOUTS:
                weights = self._weights(query, parts[0], layout)
                self.sources.note(plan.rows, plan.lists, weights)
        else:
            weights = own = method.weights(query)
            if asked and own is None and len(parts) == 1:
                longest = int(plan.lists.lengths.max())
                weights = torch.empty(*query.shape[:2], longest, dtype=torch.float32)
            self._attend_to_reached(query, parts, attended, layout, weights, remainder)
            if self.sources is not None and asked and weights is not None:
                self.sources.note(plan.rows, plan.lists, weights)
            if own is not None:
                method.attended(plan, own)
        if index is not None:
            output[index] = attended

    def _attend_to_reached(
        self,
        query: torch.Tensor,
        parts: Sequence[Part],
        output: torch.Tensor,
        layout: str,
        weights: torch.Tensor | None = None,
        remainder: Remainder | None = None,
    ) -> None:
        """Rows that decode by our own kernel, over parts of one softmax.

        A part takes what was attended to before as its remainder, in float32, the first one that of
        the method.
        Learned sinks go with the first part. Weights are asked for of a single part only.
        """
        assert len(parts) == 1 or (weights is None and parts[0].lists.starts is None)
        sinks, (*before, last) = self.learned_sinks, parts
        for part in before:
            own, lse = torch.empty(query.shape), torch.empty(query.shape[:2])
            self._attend(query, part, own, layout, sinks, lse, None, remainder)
            sinks, remainder = None, Remainder(own, lse)
        self._attend(query, last, output, layout, sinks, None, weights, remainder)

    def _attend(
        self,
        query: torch.Tensor,
        part: Part,
        output: torch.Tensor,
        layout: str,
        sinks: torch.Tensor | None,
        lse: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        remainder: Remainder | None = None,
    ) -> None:
        """Rows that decode by our own kernel; see :meth:`Ops.attend`."""
        if part.wait is not None:
            part.wait()
        self.kernels.attend(
            query,
            part.lists,
            part.units,
            output,
            layout,
            self.scale,
            lse=lse,
            weights=weights,
            softcap=self.logits_soft_cap,
            sinks=sinks,
            remainder=remainder,
        )

    def _attend_by_vllm(
        self, query: torch.Tensor, part: Part, schedule: Schedule, output: torch.Tensor
    ) -> None:
        """Attend by vLLM's kernel, in layouts that only vLLM reads.

        Every KV head is a sequence of its own then, so there are no sinks of single heads.
        """
        keys, values = self._reached.of(part.units, 1)
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
            block_table=part.lists.entries,
            softcap=self.logits_soft_cap,
            scheduler_metadata=schedule.scheduler_metadata,
            s_aux=None,
        )
