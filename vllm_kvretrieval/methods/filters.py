"""Methods by which filter layers select tokens for the layers after them (omnikv).

A filter attends to whole contexts itself. What it selects is listed once for the layers after it,
and announced to their storage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from vllm_kvretrieval.kernels import (
    Chooser,
    ContextSelector,
    IndexRecords,
    Merge,
    Ops,
    TokenLists,
)
from vllm_kvretrieval.kernels.device import (
    DeviceOps,
    DevicePlan,
    DeviceRequests,
    DeviceRows,
    ScoreRoom,
)
from vllm_kvretrieval.methods.base import (
    DecodePlan,
    DeviceFacts,
    EngineFacts,
    GroupFacts,
    Layer,
    LayerFacts,
    Sees,
    Step,
    StepRows,
    WorkSize,
)
from vllm_kvretrieval.methods.observation import LatestQueries, Observation, Observed
from vllm_kvretrieval.methods.scored import Scored, ScoredLayer
from vllm_kvretrieval.methods.token_chunks import TokenChunkPlanner, TokenChunks
from vllm_kvretrieval.retrieval.families import FilterMethod, Method
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.roles import OBSERVATIONS, Filters, Follows
from vllm_kvretrieval.storage.base import SharedRecall


class Selectors(NamedTuple):
    """The state that a filter and the layers after it share.

    Attributes:
        rows: Its selector for rows that decode.
        chunks: Its selector for chunks of prompts; None: prefill is exact.
    """

    rows: ContextSelector
    chunks: ContextSelector | None


class Listed:
    """The tokens that are selected for rows of a step.

    Args:
        weights: float32 [R, n]; of the rows' n latest queries.

    Attributes:
        by: The filter whose selection the rows' lists hold; None: none's yet.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self.by: ContextSelector | None = None

    def list(self, kernels: Ops, plan: DecodePlan, selector: ContextSelector) -> None:
        """Write the lists, unless they hold this filter's selection already."""
        if self.by is not selector:
            kernels.list_context(plan.rows, selector, plan.lists.kv_heads)
            self.by = selector


class Filtered(Scored):
    """A group's rows of one method; see :class:`GroupMethod`."""

    def __init__(self, facts: GroupFacts, number: int, method: FilterMethod) -> None:
        super().__init__(facts, number, method)
        # What one filter has selected, until the next one has: other methods' rows have theirs.
        self._lists = torch.empty_like(facts.lists)
        self._lengths = torch.empty_like(facts.lengths)
        requests = facts.requests
        weights = OBSERVATIONS[method.observation]
        drafts = requests.room.drafts
        self.observation = Observation(weights, requests.per_seat(), requests.per_seat(), drafts)

    @property
    def sees(self) -> Sees:
        """All steps, where queries of earlier steps count."""
        return Sees.ALL if self.observation.keeps else Sees.NOTHING

    def plan(self, rows: StepRows) -> DecodePlan:
        """Rows whose lists filters write."""
        plan = self.selecting(rows, self._lists, self._lengths)
        plan.own = Listed(self.observation.weights_of(rows.seats, rows.lens - rows.drafts))
        return plan

    def see(self, step: Step) -> Observed:
        """Note the queries of the step that filters keep."""
        return self.observation.observe(step.seats, step.lens, step.starts)


class FilteredLayer(ScoredLayer):
    """A layer after a filter; see :class:`LayerMethod`.

    Attributes:
        selectors: The filter's; None: no filter is before the layer.
    """

    by_chooser = False
    selectors: Selectors | None = None

    def choose(self, kernels: Ops, query: torch.Tensor, plan: DecodePlan) -> None:
        """Take the tokens that the filter has selected."""
        assert self.selectors is not None, "the layer follows a filter"
        plan.own.list(kernels, plan, self.selectors.rows)

    def prompt(self, kernels: Ops, query: torch.Tensor, chunks: TokenChunks) -> TokenLists:
        """List the tokens that the filter has selected for chunks, once for all layers after it."""
        assert self.selectors is not None, "the layer follows a filter"
        selector = self.selectors.chunks
        assert selector is not None, "prefill is sparse"
        if chunks.listed is not selector:
            kernels.list_context(chunks.rows, selector, chunks.lists.kv_heads)
            chunks.listed = selector
        return chunks.lists


class Filter:
    """A filter layer; see :class:`LayerWatcher`.

    Args:
        kernels: Implementation of the ops.
        number: The number of the method.
        selectors: Its selectors.
        latest: Where its latest queries are kept; None: it selects by the last one alone.
        merge: Where heads of other workers count, too; see :meth:`Ops.select_context`.

    Attributes:
        shared: It brings the selected tokens for the layers after; None: they are in place.
    """

    shared: SharedRecall | None = None

    def __init__(
        self,
        kernels: Ops,
        number: int,
        selectors: Selectors,
        latest: LatestQueries | None,
        merge: Merge | None,
    ) -> None:
        self._kernels, self._number, self._merge = kernels, number, merge
        self.selectors, self.latest = selectors, latest

    def watch(
        self, query: torch.Tensor, kv_cache: torch.Tensor, seen: Observed | None, split: Any
    ) -> None:
        """Select the tokens that the layers after this one attend to in this step."""
        if self.latest is not None and seen is not None:
            self.latest.take(query, seen)
        if split is None:
            return
        for plan in split.decode:
            if plan.method == self._number:
                self._select(query, plan)
        for chunks in (part.chunks for part in split.prefill):
            if chunks is not None and chunks.method == self._number:
                assert self.selectors.chunks is not None
                queries = query[chunks.queries]
                self._kernels.select_context(
                    queries, chunks.weights, chunks.rows, self.selectors.chunks, self._merge
                )

    def _select(self, query: torch.Tensor, plan: DecodePlan) -> None:
        if self.latest is not None:
            queries = self.latest.of(plan.rows)
        else:
            queries = plan.asking(plan.of(query))
        selector = self.selectors.rows
        self._kernels.select_context(queries, plan.own.weights, plan.rows, selector, self._merge)
        plan.own.list(self._kernels, plan, selector)
        if self.shared is not None:
            self.shared.announce(plan.rows)


class ListingFilter:
    """A filter layer on a device; see :class:`DeviceFilter`.

    Args:
        methods: The engine's: one of this family, and others that select nothing.
        cache: [pages, kv_heads, page_size, 2 * head_size]; the layer's.
        layout: How that lays out keys.
        scale: Softmax scale.
    """

    def __init__(
        self, methods: Sequence[Method], cache: torch.Tensor, layout: str, scale: float
    ) -> None:
        numbers = range(len(methods))
        (self._number,) = (n for n in numbers if isinstance(methods[n], FilterMethod))
        self._others = [n for n in numbers if n != self._number]
        self._scale = scale
        pages, kv_heads, page_size, row = cache.shape
        self._store = IndexRecords.empty(
            Exact(),
            pages=pages,
            kv_heads=kv_heads,
            head_size=row // 2,
            page_size=page_size,
            dtype=cache.dtype,
            entry_tokens=1,
            cache=cache,
            layout=layout,
        )

    def select(
        self,
        ops: DeviceOps,
        query: torch.Tensor,
        rows: DeviceRows,
        requests: DeviceRequests,
        plan: DevicePlan,
    ) -> None:
        """See :meth:`DeviceOps.filter_tokens`."""
        ops.filter_tokens(
            query, rows, requests, self._number, self._others, self._store, self._scale, plan
        )


class DeviceFiltered:
    """A layer after a filter on a device, whose lists the filter has written; see
    :class:`DeviceMethod`.

    Args:
        methods: The engine's.
        choosers: The layer's, by the number of the method.
        facts: The layer.
    """

    per_token, looks_ahead = True, False

    def __init__(
        self, methods: Sequence[Method], choosers: Sequence[Chooser], facts: DeviceFacts
    ) -> None:
        self.selection = choosers[0].selection

    def choose(
        self,
        ops: DeviceOps,
        query: torch.Tensor,
        rows: DeviceRows,
        requests: DeviceRequests,
        plan: DevicePlan,
    ) -> None:
        """The lists are there."""

    def choose_ahead(
        self, ops: DeviceOps, rows: DeviceRows, requests: DeviceRequests, room: ScoreRoom
    ) -> None:
        """Nothing is selected here."""


group_method = Filtered
device_method = DeviceFiltered
device_filter = ListingFilter


def layer_method(facts: LayerFacts, number: int, method: Method, chooser: Chooser) -> FilteredLayer:
    """See :meth:`Family.layer_method`."""
    return FilteredLayer(chooser)


def connect(
    facts: EngineFacts, number: int, method: FilterMethod, layers: Mapping[int, Layer]
) -> None:
    """Let filter layers select, and the layers after them follow; see :meth:`Family.connect`."""
    selectors = {
        layer: _make_filter(facts, number, method, layers[layer])
        for layer, role in facts.roles.items()
        if isinstance(role, Filters)
    }
    following: dict[int, list[Any]] = {}
    for layer, role in facts.roles.items():
        if isinstance(role, Follows):
            layers[layer].impl.methods[number].selectors = selectors[role.filter]
            following.setdefault(role.filter, []).append(layers[layer].impl)
    for layer, impls in following.items():
        shared = facts.storage.share([impl.storage for impl in impls])
        if shared is not None:
            layers[layer].impl.watchers[number].shared = shared
            for impl, source in zip(impls, shared.sources, strict=True):
                impl.methods[number].source = source


def _make_filter(facts: EngineFacts, number: int, method: FilterMethod, layer: Layer) -> Selectors:
    """Make a dense layer a filter."""
    config, impl, kv_cache = facts.config, layer.impl, layer.kv_cache
    store = IndexRecords.empty(
        Exact(),
        pages=kv_cache.shape[0],
        kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        page_size=config.page_size,
        dtype=kv_cache.dtype,
        cache=kv_cache,
        layout=layer.layout,
    )
    chosen = torch.zeros(facts.seats, max(facts.room.filtered, 1), dtype=torch.int32)
    selector = ContextSelector(
        store,
        chosen,
        impl.num_queries_per_kv,
        impl.scale,
        impl.logits_soft_cap,
        impl.learned_sinks,
    )
    window = len(OBSERVATIONS[method.observation])
    latest = None
    if window > 1:
        heads = impl.num_kv_heads * impl.num_queries_per_kv
        latest = LatestQueries(
            facts.seats, window, heads, impl.head_size, kv_cache.dtype, facts.room.drafts
        )
    selectors = Selectors(selector, _chunk_selector(facts, selector))
    merge = None if config.filter_heads == "own" else facts.over_workers(ReduceOp.MAX)
    impl.watchers[number] = Filter(facts.kernels, number, selectors, latest, merge)
    return selectors


def _chunk_selector(facts: EngineFacts, selector: ContextSelector) -> ContextSelector | None:
    """A filter's selector for chunks of prompts; None: prefill is exact."""
    if facts.config.prefill_budget is None:
        return None
    by = TokenChunkPlanner(facts.config, selector.store.kv_heads)
    chosen = torch.zeros(facts.most_chunks, by.select, dtype=torch.int32)
    return replace(selector, chosen=chosen, handle=None)


def scratch_bytes(methods: Sequence[Method], size: WorkSize) -> int:
    """Scores of tokens; see :meth:`Family.scratch_bytes`."""
    return size.scratch(size.tokens * size.heads, size.rows)
