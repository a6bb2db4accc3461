"""How a layer attends, once it is known to what: by our own kernels, or vLLM's."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_kvretrieval.attention.cpu.blocks import Blocks
from vllm_kvretrieval.attention.cpu.durations import Durations
from vllm_kvretrieval.attention.cpu.plans import Full, Prefill, Whole
from vllm_kvretrieval.attention.cpu.schedules import Schedule
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.kernels import Chooser, Ops, PromptLists, Remainder, TokenLists
from vllm_kvretrieval.kernels.cpu import ROWS
from vllm_kvretrieval.methods import DecodePlan, LayerMethod
from vllm_kvretrieval.storage import IN_PLACE, LayerStorage, Part


class AttendingLayer(CPUAttentionBackendImpl):
    """vLLM's CPU attention, beside our own.

    Attributes:
        kernels: Implementation of the ops.
        block_choosers: How the layer selects for blocks of prompts, by the number of the method;
            empty where prompts attend to everything.
        late: Whether the layer lies behind ``prefill_depth``.
        prompt_shares: float64 [ONE_IN, KV heads]; their shares in what blocks of prompts select;
            None: all are equal.
        methods: How the layer comes to what rows attend to, by the number of the method; empty in a
            dense layer.
        staging: Where contexts of prompts are laid out; None: they are read where they are.
        storage: Where the layer's KV is.
        durations: How long decode steps take to choose and to bring what is attended to.
    """

    kernels: Ops

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_choosers: dict[int, Chooser] = {}
        self.late = False
        self.prompt_shares: torch.Tensor | None = None
        self.methods: list[LayerMethod] = []
        self.staging: PrefillStaging | None = None
        self.storage: LayerStorage = IN_PLACE
        self.durations = Durations()

    @property
    def _sinks(self) -> torch.Tensor | None:
        """float32 [num_heads]; the layer's learned attention sinks."""
        return None if self.sinks is None else self.sinks.detach().float()

    def _layout(self, layer: Any) -> str:
        """How the layer's KV cache holds keys."""
        return ROWS if self.storage.token_major else layer.isa

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

    def _attend_to_part(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        part: Prefill,
        output: torch.Tensor,
    ) -> None:
        """Prompts, over their contexts up to each of their tokens."""
        if part.blocks is not None:
            blocks = part.blocks.of_layer(self.late)
            part = replace(part, by=self._select_for_blocks(query, blocks), blocks=blocks)
        context, new = self._stage(kv_cache, part), part.tokens
        if isinstance(part.by, PromptLists):
            self._attend_to_prompts(layer, query, context, part, output)
        else:
            super().forward(layer, query[new], key[new], value[new], context, part.by, output[new])

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
            sinks=self._sinks,
        )

    def _stage(self, kv_cache: torch.Tensor, part: Prefill) -> torch.Tensor:
        """Where the context of prompts is read."""
        if part.in_cache:
            return kv_cache
        assert self.staging is not None
        buffer = self.staging.buffer if part.blocks is None else self.staging.pages
        isa = self.staging.isa
        if part.staged is not None:
            self.storage.lay_out(part.staged, buffer, isa)
        if part.chunks is not None:
            self.methods[part.chunks.method].gather(self.kernels, part.chunks)
            self.kernels.stage_tokens(kv_cache, part.chunks.lists, buffer, isa)
        return buffer

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
        self._attend(query, Part(lists, units), output, self._layout(layer), self._sinks)

    def _select_for_blocks(self, query: torch.Tensor, blocks: Blocks) -> PromptLists:
        """List the pages that blocks of prompts attend to."""
        chooser = self.block_choosers[blocks.method]
        if self.prompt_shares is not None:
            counts = chooser.selection.counts
            assert counts is not None
            counts[: len(blocks.rows)] = blocks.counts(self.prompt_shares)
        queries = blocks.grouped(query, self.num_kv_heads)
        self.kernels.plan_decode(queries, blocks.rows, chooser)
        return blocks.listed()

    def _attend_to_plan(
        self, query: torch.Tensor, output: torch.Tensor, plan: DecodePlan, method: LayerMethod
    ) -> None:
        """Decode rows: every (row, KV head) has a list of its own."""
        count, index = len(plan.rows), plan.index
        query = query[:count] if index is None else query[index]
        attended = output[:count] if index is None else torch.empty_like(query)
        began = perf_counter_ns()
        remainder = method.choose(self.kernels, query, plan)
        planned = perf_counter_ns()
        parts = self.storage.reach(plan.rows, plan.lists, method.ready)
        self.durations.note(began, planned)
        self.storage.ahead(plan.rows, method.chooser)
        if plan.schedule is not None:
            self._attend_by_vllm(query, parts[0], plan.schedule, attended)
        else:
            weights = method.weights(query)
            layout = method.chooser.store.layout
            self._attend_to_reached(query, parts, attended, layout, weights, remainder)
            if weights is not None:
                method.attended(plan, weights)
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
        """Rows of one token by our own kernel, over parts of one softmax.

        A part takes what was attended to before as its remainder, in float32, the first one that of
        the method.
        Learned sinks go with the first part. Weights are asked for of a single part only.
        """
        assert weights is None or len(parts) == 1
        sinks, (*before, last) = self._sinks, parts
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
        """Rows of one token by our own kernel; see :meth:`Ops.attend`."""
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
        """Attend by vLLM's kernel: to keys laid out for AMX, and in layouts that only vLLM reads.

        Every KV head is a sequence of its own then, so there are no sinks of single heads.
        """
        units = part.units
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
            block_table=part.lists.entries,
            softcap=self.logits_soft_cap,
            scheduler_metadata=schedule.scheduler_metadata,
            s_aux=None,
        )
