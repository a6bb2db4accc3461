"""The interface of a method to attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from vllm_kvretrieval.kernels import (
    Chooser,
    Contexts,
    DecodeRows,
    Ops,
    PromptLists,
    Remainder,
    Selection,
    TokenLists,
)
from vllm_kvretrieval.kernels.device import DevicePlan, DeviceRequests, DeviceRows, ScoreRoom
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.capacity import Capacity
from vllm_kvretrieval.retrieval.roles import Role
from vllm_kvretrieval.storage.base import LayerStorage, Source, Storage

if TYPE_CHECKING:
    from vllm_kvretrieval.methods.kept_prompts import KeptPrompts
    from vllm_kvretrieval.methods.page_chunks import ChunkSelection, PromptReads

WHOLE = -1
"""The number of the method by which rows attend to whole contexts; the last of a layer's."""


@dataclass
class DecodePlan:
    """How rows of one method decode.

    Attributes:
        method: The method's number in the engine, or ``WHOLE``.
        rows: The requests, each of which decodes one token, or verifies drafts behind it.
        index: int64 [queries]; the tokens of the rows in the batch, None where each has one, and
            they are all that lead the batch with one.
        lists: The tokens of each (row, KV head); its entries are the rows' ``lists``.
        own: Further facts for the method's layers.
        schedule: How vLLM's kernel attends; None: ours does.
    """

    method: int
    rows: DecodeRows
    index: torch.Tensor | None
    lists: TokenLists
    own: Any = None
    schedule: Any = None

    def of(self, query: torch.Tensor) -> torch.Tensor:
        """[queries, heads, head_size]; the rows' queries among those of the batch."""
        return query[: len(self.rows)] if self.index is None else query[self.index]

    def asking(self, queries: torch.Tensor) -> torch.Tensor:
        """[R, heads, head_size]; those of the rows' queries by which they select."""
        starts = self.rows.starts
        return queries if starts is None else queries[starts[:-1]]


class Seats(Protocol):
    """The attributes of the table of running requests that methods use."""

    config: RetrievalConfig
    room: Capacity
    records: np.ndarray
    kept: "KeptPrompts | None"
    corrected: torch.Tensor
    spared: torch.Tensor
    prompt_reads: "PromptReads"

    def per_seat(self) -> np.ndarray:
        """A new array, int32 [seats]. An entry is reset to zero when its seat changes hands."""
        ...


class GroupFacts(NamedTuple):
    """Layers that share metadata, and their common state.

    Attributes:
        requests: Table of the running requests.
        page_size: Tokens per page.
        kv_heads: KV heads of each layer.
        lists: int32 [seats * kv_heads, entries]; room for the lists of a step's rows.
        lengths: int32 [seats * kv_heads]; the same for their lengths.
    """

    requests: Seats
    page_size: int
    kv_heads: int
    lists: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class StepRows:
    """Rows of one method that attend to parts of their contexts.

    Attributes:
        seats: int32 [R].
        context: The rows' contexts.
        fresh: bool [R]; whether the previous step was no sparse decode step of the request.
        index: See :class:`DecodePlan`.
        options: :data:`SEAT` [R]; what their requests ask for.
        drafts: int32 [R]; draft tokens at the ends of the contexts.
    """

    seats: np.ndarray
    context: Contexts
    fresh: np.ndarray
    index: torch.Tensor | None
    options: np.ndarray
    drafts: np.ndarray

    def window(self, unit: int, per_page: int) -> torch.Tensor:
        """int32 [R]; units of the windows, which have all drafts beside what they have without.

        Args:
            unit: Tokens of a unit.
            per_page: Units of a page.
        """
        drafted = -(-self.lens // unit) + (self.drafts - self.lens) // unit
        return torch.from_numpy(self.options["window"] * per_page + drafted)

    @property
    def lens(self) -> np.ndarray:
        """int32 [R]; tokens of the contexts."""
        return self.context.seq_lens.numpy()


class Step(NamedTuple):
    """The whole batch of a step.

    Attributes:
        seats: int32 [R].
        lens: int32 [R]; tokens of each context with the step.
        before: int32 [R]; tokens of each context before it.
        starts: int32 [R + 1]; first token of each request in the step.
        block_table: int32 [R, >= pages]; page ids in context order.
    """

    seats: np.ndarray
    lens: np.ndarray
    before: np.ndarray
    starts: np.ndarray
    block_table: torch.Tensor


class Sees(IntEnum):
    """Steps that a method has to see beside those of its rows."""

    NOTHING = 0
    PROMPTS = 1
    """All but those in which all rows are known to decode within their budgets."""
    ALL = 2


class GroupMethod(Protocol):
    """One method, for layers that share metadata."""

    @property
    def even(self) -> bool:
        """Whether all lists of all layers have one length, and there is no remainder."""
        ...

    @property
    def sees(self) -> Sees:
        """The steps that the method has to see."""
        ...

    def plan(self, rows: StepRows) -> DecodePlan:
        """Say how rows decode; once a step."""
        ...

    def see(self, step: Step) -> Any:
        """Look at a step; returns the notes for the method's layers, None: nothing."""
        ...


class LayerFacts(NamedTuple):
    """A retrieval layer.

    Attributes:
        number: The layer's place among the worker's retrieval layers.
        kernels: Implementation of the ops.
        storage: Where the layer's KV is.
        requests: Table of the running requests.
        kv_heads: KV heads of the layer.
        scale: Softmax scale.
        chunks: Its state for chunks of prompts that select pages; None: these select none.
        softcap, sinks: See :func:`vllm_kvretrieval.kernels.observe.observe`.
    """

    number: int
    kernels: Ops
    storage: LayerStorage
    requests: Seats
    kv_heads: int
    scale: float
    chunks: "ChunkSelection | None" = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class LayerMethod(Protocol):
    """One method, in one layer."""

    chooser: Chooser

    @property
    def by_chooser(self) -> bool:
        """Whether rows attend to what :meth:`Ops.plan_decode` lists by the chooser, and the method
        does nothing else, so that :meth:`Ops.decode_layer` serves them."""
        ...

    @property
    def source(self) -> Source | None:
        """The source of the rows' tokens, where that is not the layer's storage."""
        ...

    def choose(self, kernels: Ops, query: torch.Tensor, plan: DecodePlan) -> Remainder | None:
        """Write the tokens or pages that the rows attend to into their lists.

        Args:
            kernels: Implementation of the ops.
            query: [R, heads, head_size]; theirs.
            plan: The plan of :meth:`GroupMethod.plan`.

        Returns:
            The rest that they attend to; None: nothing.
        """
        ...

    def weights(self, query: torch.Tensor) -> torch.Tensor | None:
        """Room for the weights of the tokens of the lists; None: the method does not ask.

        Args:
            query: See :meth:`choose`.

        Returns:
            float32 [R, heads, most tokens].
        """
        ...

    def attended(self, plan: DecodePlan, weights: torch.Tensor) -> None:
        """Take note of the weights of the tokens.

        Args:
            plan: See :meth:`choose`.
            weights: The room of :meth:`weights`, written.
        """
        ...

    def prompt(self, kernels: Ops, query: torch.Tensor, chunks: Any) -> PromptLists | TokenLists:
        """The pages or tokens that chunks of prompts attend to, where prefill is sparse.

        Args:
            kernels: Implementation of the ops.
            query: [tokens, heads, head_size]; the step's.
            chunks: The chunks of :meth:`ChunkPlanner.plan`.

        Returns:
            Pages; or tokens, which are to be laid out one after the other.
        """
        ...


class DeviceFacts(NamedTuple):
    """A retrieval layer of a device.

    Attributes:
        number: The layer's place among the worker's retrieval layers.
        is_last: Whether none of these comes after it.
        kept: The prompts of requests whose methods drop tokens; None: no method does.
        scale: Softmax scale.
        softcap, sinks: See :func:`vllm_kvretrieval.kernels.observe.observe`.
    """

    number: int
    is_last: bool
    kept: "KeptPrompts | None"
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class DeviceMethod(Protocol):
    """The methods of a family, in one layer of a device whose steps may be replays of a graph.

    The rows of a step are on the device, and so is the method of each. So a family looks at all
    rows and leaves those of other families alone.

    Attributes:
        per_token: Whether lists are of single tokens; else they are of pages.
    """

    per_token: bool

    @property
    def selection(self) -> Selection:
        """The selections of the layer's methods, by seat."""
        ...

    def choose(
        self,
        ops: Any,
        query: torch.Tensor,
        rows: DeviceRows,
        requests: DeviceRequests,
        plan: DevicePlan,
    ) -> None:
        """Write what the rows attend to into the lists of a plan, unless a filter has.

        Args:
            ops: The device's implementation of the ops that the family needs.
            query, rows, requests, plan: See :meth:`DeviceOps.plan_decode`.
        """
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether :meth:`choose_ahead` has anything to do, whatever the rows are."""
        ...

    def choose_ahead(
        self, ops: Any, rows: DeviceRows, requests: DeviceRequests, room: ScoreRoom
    ) -> None:
        """Select for the next step, beside attention and the layers after.

        Args:
            ops, rows, requests: As :meth:`choose` has left them.
            room: See :meth:`DeviceOps.select_ahead`.
        """
        ...


class DeviceFilter(Protocol):
    """A layer of a device that lists what the layers after it attend to."""

    def select(
        self,
        ops: Any,
        query: torch.Tensor,
        rows: DeviceRows,
        requests: DeviceRequests,
        plan: DevicePlan,
    ) -> None:
        """Write lists that hold until the next filter's, after the layer's attention.

        Args:
            ops, query, rows, requests, plan: See :meth:`DeviceMethod.choose`.
        """
        ...


@runtime_checkable
class LayerWeigher(Protocol):
    """A family that takes note of what the tokens of its lists get of a step's attention, in a
    layer of a device."""

    @property
    def weighs(self) -> bool:
        """Whether it does, with the engine's methods."""
        ...

    def attended(self, ops: Any, rows: DeviceRows, scores: torch.Tensor, lse: torch.Tensor) -> None:
        """Take note, after attention.

        Args:
            ops: See :meth:`DeviceMethod.choose`.
            rows: The rows, as ``prepare_rows`` has written them.
            scores, lse: As ``SlotOps.sparse_decode`` has written them of the lists.
        """
        ...


@runtime_checkable
class LayerWatcher(Protocol):
    """An object that looks at the attention of a layer after each step; on a device, after those
    in which there is something to see."""

    def watch(
        self, query: torch.Tensor, kv_cache: torch.Tensor, seen: Any, split: Any = None
    ) -> None:
        """Look at a step.

        Args:
            query: [tokens, heads, head_size]; the step's.
            kv_cache: [pages, kv_heads, page_size, 2 * head_size]; the layer's, with the step's.
            seen: The notes of :meth:`GroupMethod.see`.
            split: How the batch is split; None: it is not.
        """
        ...


class Layer(NamedTuple):
    """A layer with plain full attention.

    Attributes:
        impl: The layer's attention.
        kv_cache: [pages, kv_heads, page_size, 2 * head_size].
        layout: The name of vLLM's attention ``isa``.
    """

    impl: Any
    kv_cache: torch.Tensor
    layout: str


class EngineFacts(NamedTuple):
    """An engine's worker.

    Attributes:
        config: Options of the engine.
        kernels: Implementation of the ops.
        storage: Where the KV is.
        room: The units that requests get of each KV head.
        roles: Roles of the layers, by their numbers in the model, if layers differ in them.
        seats: Most requests that run at once.
        most_chunks: Most chunks of prompts in a step, where prefill is sparse.
        over_workers: Makes a function that reduces tensors over workers with other heads of the
            same layers, in place; None where there are none.
    """

    config: RetrievalConfig
    kernels: Ops
    storage: Storage
    room: Capacity
    roles: Mapping[int, Role]
    seats: int
    most_chunks: int
    over_workers: Callable[[Any], Callable[[torch.Tensor], object] | None]


class WorkSize(NamedTuple):
    """The largest work of a worker's layer.

    Attributes:
        tokens: Tokens of the longest context.
        heads: Query heads.
        kv_heads: KV heads.
        head_size, dtype: The head size and element type of keys and values.
        rows: Most requests that run at once.
        scratch: Bytes of the memory in which an op chooses: of so many numbers a task, and tasks.
        chunks: Most chunks of prompts in a step.
        chunk_queries: Queries by which each of them selects pages; 0: prompts select none.
        chunk_pages: Most pages before one of them that it attends to.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    scratch: Callable[[int, int], int]
    rows: int
    chunks: int
    chunk_queries: int
    chunk_pages: int


class Family(Protocol):
    """The functions that a file of this package provides; it takes methods of its own family."""

    def group_method(self, facts: GroupFacts, number: int, method: Any) -> GroupMethod:
        """The method with this number, for a group of layers."""
        ...

    def layer_method(
        self, facts: LayerFacts, number: int, method: Any, chooser: Chooser
    ) -> LayerMethod:
        """The method with this number, in a layer."""
        ...

    def connect(
        self, facts: EngineFacts, number: int, method: Any, layers: Mapping[int, Layer]
    ) -> None:
        """Let layers of an engine know of each other, once all are attached.

        Args:
            facts: The engine.
            number: The number of the method.
            method: The method.
            layers: By their numbers in the model.
        """
        ...

    def scratch_bytes(self, methods: Sequence[Any], size: WorkSize) -> int:
        """Bytes in which a layer chooses; one layer works at a time.

        Args:
            methods: The methods of this family, one at least.
            size: The largest work.
        """
        ...
