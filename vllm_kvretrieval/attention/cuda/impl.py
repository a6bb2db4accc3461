"""Attention of one layer."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl

from vllm_kvretrieval.attention.cuda.far import FarLayer
from vllm_kvretrieval.attention.cuda.metadata import RetrievalMetadata
from vllm_kvretrieval.attention.cuda.side import SideWork
from vllm_kvretrieval.attention.cuda.workspace import Workspace
from vllm_kvretrieval.attention.refusals import check_impl, refuse_of_model
from vllm_kvretrieval.kernels.device import DeviceRequests, DeviceRows, ScoreRoom
from vllm_kvretrieval.kernels.types import Chooser, IndexRecords
from vllm_kvretrieval.methods import DeviceFilter, DeviceMethod, LayerWatcher, LayerWeigher


class RetrievalAttentionImpl(AttentionImpl):
    """Whole contexts are attended to by the dense half; selections of pages by our own kernels.

    Both look at all rows of a step. To the dense half rows that attend to a selection are empty,
    and our kernels leave all others alone. So nothing is decided on the host, and a step may be
    the replay of a graph whatever its rows are.

    Attributes:
        dense: vLLM's backend for whole contexts.
        half: The dense half's implementation.
        methods: How rows come to what they attend to; empty in a dense layer.
        weighers: Those among them that take note of what listed tokens get of the attention.
        choosers: What the layer selects with, by the number of the method.
        indexes: The page indexes that these have, each once.
        filter: What lists tokens for the layers after this one, if it is a filter; it is dense.
    """

    dense: ClassVar[type[AttentionBackend]]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.half = self.dense.get_impl_cls()(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            *args,
            **kwargs,
        )
        check_impl(self.half)
        sharing = self.half.kv_sharing_target_layer_name is not None
        refuse_of_model({"cross-layer KV sharing": sharing})
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.group = self.num_heads // self.num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.detach()

    def get_impl_variants(self) -> tuple[Any, ...]:
        """The implementations that vLLM asks what its own backend serves."""
        return (self.half,)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.half.process_weights_after_loading(act_dtype)

    def detach(self) -> None:
        """Make this a dense layer, as it is at first, which holds on to no tensor."""
        self.ops: Any = None
        self.methods: Sequence[DeviceMethod] = ()
        self.weighers: Sequence[LayerWeigher] = ()
        self.choosers: Sequence[Chooser] = ()
        self.indexes: list[IndexRecords] = []
        self.requests: DeviceRequests | None = None
        self.workspace: Workspace | None = None
        self.side: SideWork | None = None
        self.is_last = False
        self.units: torch.Tensor | None = None
        self.far: FarLayer | None = None
        self.filter: DeviceFilter | None = None

    def attach(
        self,
        ops: Any,
        methods: Sequence[DeviceMethod],
        choosers: Sequence[Chooser],
        cache: torch.Tensor,
        requests: DeviceRequests,
        workspace: Workspace,
        side: SideWork,
        far: FarLayer | None = None,
        *,
        is_last: bool,
    ) -> None:
        """Make this a retrieval layer.

        Args:
            ops: Implementation of :class:`DeviceOps` and of ``SlotOps.sparse_decode``.
            methods: The families of the engine's methods, in this layer; one at least.
            choosers: Freshly made, by the number of the method.
            cache: [pages, kv_heads, page_size, 2 * head_size], as vLLM passes it to ``forward``.
            requests: The requests of the layer's group.
            workspace: The workspace that layers of this shape share.
            side: Runs what is beside the model.
            far: What serves the layer where its cache is in host memory.
            is_last: Whether no layer of the worker that retrieves comes after this one.
        """
        pages, kv_heads, page_size, row = cache.shape
        for store in (chooser.store for chooser in choosers):
            assert (pages, kv_heads, page_size) == (store.pages, store.kv_heads, store.page_size)
        self.ops, self.methods, self.choosers, self.requests = ops, methods, choosers, requests
        self.weighers = [m for m in methods if isinstance(m, LayerWeigher) and m.weighs]
        self.workspace, self.side, self.far = workspace, side, far
        self.is_last = is_last
        tokens = any(method.per_token for method in methods)
        self.units = cache.view(-1, 1 if tokens else page_size, row)
        kept = (c.store for c in choosers if c.store.records.numel())
        self.indexes = list({id(store): store for store in kept}.values())

    def attach_filter(
        self, ops: Any, by: DeviceFilter, requests: DeviceRequests, workspace: Workspace
    ) -> None:
        """Let this dense layer list what the layers after it attend to.

        Args:
            ops: Implementation of :class:`DeviceOps`.
            by: It.
            requests: The requests of the layer's group.
            workspace: The workspace of the layers that follow.
        """
        self.ops, self.filter, self.requests, self.workspace = ops, by, requests, workspace

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values to the cache, and take them into the layer's indexes."""
        if self.methods:
            assert self.workspace is not None
            drafted = self.workspace.queries > 1
            if self.far is not None:
                self.far.home.write(key, value, slot_mapping, self.indexes, drafted=drafted)
            else:
                self.ops.write_kv(key, value, slot_mapping, kv_cache, self.indexes, drafted=drafted)
        else:
            self.half.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: RetrievalMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionImpl.forward``; ``query`` and ``output``: [tokens, heads, head_size]."""
        scales, step = (output_scale, output_block_scale), attn_metadata
        if step is None or step.rows is None or not self.methods:
            whole = None if step is None else step.whole
            self.half.forward(layer, query, key, value, kv_cache, whole, output, *scales)
            if self.filter is not None and step is not None:
                self._filter(query, step)
            return output
        if self.far is not None:
            self.far.begin(key, value, step.rows, self.indexes)
        if step.loaded is not None:
            self._index_loaded(key, value, kv_cache, step.rows, step.loaded)
        if step.lead:
            own = [tensor[: step.tokens] for tensor in (query, key, value, output)]
            self.half.forward(layer, *own[:3], kv_cache, step.rest, own[3], *scales)
        # After the dense half, which writes something for the rows that it takes for empty.
        if step.sparse:
            self._attend_to_selection(query, key, value, step.rows, output)
        if self.far is not None:
            self.far.attend_to_prompts(
                self.half, layer, query, key, value, step.rows, output, *scales
            )
        if step.watches:
            for method in self.methods:
                if isinstance(method, LayerWatcher):
                    method.watch(query, kv_cache, step.watches)
        if self.is_last:  # the next step reads what is done beside this one
            assert self.side is not None
            self.side.wait()
        return output

    def _index_loaded(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        rows: DeviceRows,
        pages: torch.Tensor,
    ) -> None:
        """Index pages that a connector has filled, which may have come after the step's tokens.

        So entries of these tokens are built anew, of all keys before them.
        """
        for store in self.indexes:
            self.ops.index_pages(pages, store)
        self.ops.write_kv(key, value, rows.slot_mapping, kv_cache, self.indexes, drafted=True)

    def _filter(self, query: torch.Tensor, step: RetrievalMetadata) -> None:
        assert self.filter is not None
        assert self.workspace is not None
        assert self.requests is not None
        if step.rows is not None and step.sparse:
            plan = self.workspace.of(len(step.rows))[0]
            self.filter.select(self.ops, query, step.rows, self.requests, plan)

    def _attend_to_selection(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: DeviceRows,
        output: torch.Tensor,
    ) -> None:
        assert self.workspace is not None
        assert self.requests is not None
        assert self.side is not None
        plan, partial, lse = self.workspace.of(len(rows))
        requests, room = self.requests, self.workspace.ahead(len(rows))
        pairs = len(lse)
        scores = plan.scores[:pairs] if self.weighers else None
        rules = self._of_queries(rows) | {"scores": scores}
        if self.far is not None:
            self.far.attend_to_selection(
                query,
                key,
                value,
                rows,
                requests,
                self.methods,
                plan,
                room,
                partial,
                lse,
                self.scale,
                output,
                **rules,
            )
        else:
            for method in self.methods:
                method.choose(self.ops, query, rows, requests, plan)
            if any(method.looks_ahead for method in self.methods):
                self.side.submit(lambda: self._look_ahead(rows, requests, room))
            lists, lengths = plan.lists[:pairs], plan.lengths[:pairs]
            of_lists = lists, lengths, self.scale, output, lse, partial
            self.ops.sparse_decode(query, self.units, *of_lists, **rules)
        for weigher in self.weighers:
            weigher.attended(self.ops, rows, scores, lse)

    def _look_ahead(self, rows: DeviceRows, requests: DeviceRequests, room: ScoreRoom) -> None:
        for method in self.methods:
            if method.looks_ahead:
                method.choose_ahead(self.ops, rows, requests, room)

    def _of_queries(self, rows: DeviceRows) -> dict[str, Any]:
        """Whose the queries are, and the model's own rules; see ``SlotOps.sparse_decode``."""
        assert self.workspace is not None
        rules = {"sinks": self.half.sinks, "softcap": self.half.logits_soft_cap or 0.0}
        return rules | {"starts": rows.query_start, "queries": self.workspace.queries}
