"""Methods whose layers each score an index over the context (kvretrieval, freekv, quest, ...).

It also runs methods that select nothing beyond sink and window, or attend to everything.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_kvretrieval.kernels import (
    Chooser,
    DecodeRows,
    Ops,
    PromptLists,
    Remainder,
    Selection,
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
from vllm_kvretrieval.methods.page_chunks import PageSelector
from vllm_kvretrieval.retrieval.families import Method
from vllm_kvretrieval.retrieval.seats import SEAT_FIELDS
from vllm_kvretrieval.storage.base import Source


class Scored:
    """A group's rows of one method; see :class:`GroupMethod`."""

    def __init__(self, facts: GroupFacts, number: int, method: Method) -> None:
        self.facts, self.number = facts, number
        self.per_token = method.per_token
        self.even = method.name not in facts.requests.room.allotments and not method.remainder

    def plan(self, rows: StepRows) -> DecodePlan:
        """Rows that select in each layer."""
        return self.selecting(rows, self.facts.lists, self.facts.lengths)

    def selecting(self, rows: StepRows, lists: torch.Tensor, lengths: torch.Tensor) -> DecodePlan:
        """The same, with lists of the caller's.

        Args:
            rows: The rows.
            lists, lengths: See :class:`GroupFacts`.
        """
        facts, options = self.facts, rows.options
        units = facts.page_size if self.per_token else 1  # of selection, in a page
        count = len(rows.seats) * facts.kv_heads
        decode_rows = DecodeRows.selecting(
            rows.context,
            lists[:count],
            lengths=lengths[:count],
            sink=torch.from_numpy(options["sink"] * units),
            window=rows.window(facts.page_size // units, units),
            select=torch.from_numpy(options["select"] * units),
            numbers={
                known.column: torch.from_numpy(options[known.column].copy())
                for known in SEAT_FIELDS
            },
            spared=facts.requests.spared,
            fresh=torch.from_numpy(rows.fresh.astype(np.uint8)),
            corrected=facts.requests.corrected,
            per_token=self.per_token,
        )
        run = facts.page_size // units
        listed = TokenLists(
            decode_rows.lists,
            decode_rows.lengths,
            run,
            facts.kv_heads,
            starts=decode_rows.starts,
        )
        return DecodePlan(self.number, decode_rows, rows.index, listed)

    @property
    def sees(self) -> Sees:
        """See :attr:`GroupMethod.sees`."""
        return Sees.NOTHING

    def see(self, step: Step) -> Any:
        """Nothing is noted."""


class ScoredLayer:
    """A layer's rows of one method; see :class:`LayerMethod`.

    Args:
        chooser: The layer's.
        chunks: How it selects for chunks of prompts; None: it does not.
    """

    by_chooser = True
    source: Source | None = None

    def __init__(self, chooser: Chooser, chunks: PageSelector | None = None) -> None:
        self.chooser, self.chunks = chooser, chunks

    def choose(self, kernels: Ops, query: torch.Tensor, plan: DecodePlan) -> Remainder | None:
        """See :meth:`Ops.plan_decode`."""
        remainder = Remainder.empty(query) if self.chooser.remainder else None
        kernels.plan_decode(query, plan.rows, self.chooser, remainder)
        return remainder

    def weights(self, query: torch.Tensor) -> torch.Tensor | None:
        """The method does not ask."""
        return None

    def attended(self, plan: DecodePlan, weights: torch.Tensor) -> None:
        """Do nothing."""

    def prompt(self, kernels: Ops, query: torch.Tensor, chunks: Any) -> PromptLists | TokenLists:
        """Pages that the queries of chunks select."""
        assert self.chunks is not None, "prefill is exact"
        return self.chunks.select(kernels, query, chunks)


class DeviceScored:
    """A layer's rows of the family's methods on a device; see :class:`DeviceMethod`.

    Args:
        methods: The engine's.
        choosers: The layer's, by the number of the method.
        facts: The layer.
    """

    def __init__(
        self, methods: Sequence[Method], choosers: Sequence[Chooser], facts: DeviceFacts
    ) -> None:
        self._choosers = choosers
        self.per_token = any(method.per_token for method in methods)
        self._ahead = [number for number, method in enumerate(methods) if method.speculates]

    @property
    def selection(self) -> Selection:
        """See :attr:`DeviceMethod.selection`."""
        return self._choosers[0].selection

    def choose(
        self,
        ops: DeviceOps,
        query: torch.Tensor,
        rows: DeviceRows,
        requests: DeviceRequests,
        plan: DevicePlan,
    ) -> None:
        """See :meth:`DeviceOps.plan_decode` and :meth:`DeviceOps.plan_tokens`."""
        if self.per_token:
            ops.plan_tokens(query, rows, requests, dict(enumerate(self._choosers)), plan)
        else:
            ops.plan_decode(query, rows, requests, self._choosers, plan)

    @property
    def looks_ahead(self) -> bool:
        """See :attr:`DeviceMethod.looks_ahead`."""
        return bool(self._ahead)

    def choose_ahead(
        self, ops: DeviceOps, rows: DeviceRows, requests: DeviceRequests, room: ScoreRoom
    ) -> None:
        """See :meth:`DeviceOps.select_ahead`, for methods that speculate."""
        for number in self._ahead:
            ops.select_ahead(rows, requests, number, self._choosers[number], room)


group_method = Scored
device_method = DeviceScored


def layer_method(facts: LayerFacts, number: int, method: Method, chooser: Chooser) -> ScoredLayer:
    """See :meth:`Family.layer_method`."""
    if facts.chunks is None or method.prompts_select != "pages":
        return ScoredLayer(chooser)
    pooling = facts.requests.config.pools_chunks_by(method)
    return ScoredLayer(chooser, PageSelector(chooser, facts.chunks, pooling))


def connect(facts: EngineFacts, number: int, method: Method, layers: Mapping[int, Layer]) -> None:
    """Each layer selects for itself; see :meth:`Family.connect`."""


def scratch_bytes(methods: Sequence[Method], size: WorkSize) -> int:
    """Scores of pages or tokens; see :meth:`Family.scratch_bytes`."""
    scored = [
        size.tokens
        if method.per_token
        else -(-size.tokens * method.entry_pages // method.entry_tokens)
        for method in methods
        if method.index is not None
    ]
    if not scored:
        return 0
    scratch = size.scratch(max(scored) * size.heads, size.rows)
    if size.chunk_queries:
        asking = size.heads * size.chunk_queries
        scratch += size.scratch(max(scored) * asking, size.chunks)
        scratch += size.chunks * asking * size.head_size * size.dtype.itemsize
        # What is selected, what is attended to, and three copies where pages are laid out.
        lists = size.chunks * size.kv_heads * size.chunk_pages
        scratch += 5 * torch.int32.itemsize * lists
    return scratch
