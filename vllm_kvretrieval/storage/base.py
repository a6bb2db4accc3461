"""The interface of a storage of KV to attention and the worker."""

import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vllm_kvretrieval.kernels import Chooser, DecodeRows, Ops, RecallCache, TokenLists
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.lost import Lost
from vllm_kvretrieval.storage.tier_sizes import Tiers


class Part(NamedTuple):
    """A part of the tokens that rows attend to.

    Attributes:
        lists: The tokens of the part.
        units: [units, page_size, 2 * head_size]; the memory whose tokens the lists number.
        wait: To be called before the part is read; None: it is there.
    """

    lists: TokenLists
    units: torch.Tensor
    wait: Callable[[], None] | None = None


class Source(Protocol):
    """It brings the tokens of rows into fast memory."""

    def reach(self, rows: DecodeRows, lists: TokenLists) -> Sequence[Part]:
        """Bring the tokens that rows attend to into fast memory.

        Args:
            rows: The rows.
            lists: Their tokens, numbered as in the KV cache; over the rows' lists.

        Returns:
            Parts of one softmax. A list may be empty in some of them, but not in all. Rows with
            drafts have a single part.
        """
        ...


class HeldTokens(Source, Protocol):
    """Tokens of a layer that are brought once, and stay."""

    def hold(self, seat: int, head: int, pages: torch.Tensor, positions: torch.Tensor) -> None:
        """Bring the tokens that a KV head keeps for good.

        Args:
            seat: The request's seat.
            head: The KV head.
            pages: int32 [>= pages]; ids of the context's pages.
            positions: int64 [n]; positions of the tokens in the context, rising.
        """
        ...


class SharedRecall(Protocol):
    """Brings tokens for several layers, which attend to the same ones."""

    @property
    def sources(self) -> Sequence[Source]:
        """A source for each of these layers, of the tokens that have been announced."""
        ...

    def announce(self, rows: DecodeRows) -> None:
        """Begin to bring the tokens that the layers will attend to.

        Args:
            rows: Their lists name the tokens.
        """
        ...


@dataclass(frozen=True)
class StorageFacts:
    """The engine that a storage is made for.

    Attributes:
        retrieving: Names of the retrieval layers, in the order of the model.
        tiers: The division of memory; None: all KV is in fast memory.
        block_size: Tokens of a block of vLLM's.
        stored: Returns the file of a store for so many layers; None: there is no store.
        groups: Numbers of vLLM's groups of layers that a slow home has.
    """

    retrieving: Sequence[str] = ()
    tiers: Tiers | None = None
    block_size: int = 0
    stored: Callable[[int], io.FileIO] | None = None
    groups: tuple[int, ...] = (0,)


class LayerCache(NamedTuple):
    """A retrieval layer and its KV cache.

    Attributes:
        name: The layer's name in the model.
        kv_cache: [pages, kv_heads, page_size, 2 * head_size]; what vLLM writes to.
        layout: How it lays out keys: the name of vLLM's attention ``isa``, or
            ``token_major``.
        kernels: Implementation of the ops.
        counts: int64 [S, 3]; units looked up, missed and recalled, by seat.
    """

    name: str
    kv_cache: torch.Tensor
    layout: str
    kernels: Ops
    counts: torch.Tensor


@dataclass(frozen=True)
class StepContexts:
    """The contexts of a step, from which a storage takes the pages to make ready.

    Attributes:
        requests: Ids, in batch order.
        seats: int [R]; their seats.
        before: int [R]; tokens of each context before the step.
        lens: int [R]; tokens of each context with the step.
        certain: int [R]; the same without drafts, which the step may reject.
        block_table: int32 [R, >= pages]; page ids in context order.
        whole: int [n]; batch indices of the requests whose whole contexts retrieval layers read
            where they are; None: of all requests.
        laid_out: Pages that retrieval layers lay out in the staging buffer.
        most_pages: Pages of the largest budget.
    """

    requests: Sequence[str]
    seats: np.ndarray
    before: np.ndarray
    lens: np.ndarray
    certain: np.ndarray
    block_table: np.ndarray
    whole: np.ndarray | None
    laid_out: Sequence[torch.Tensor]
    most_pages: int


class LayerStorage(Source, Protocol):
    """Where one layer's KV is."""

    @property
    def token_major(self) -> bool:
        """Whether the KV cache holds each token's key before its value; else as vLLM has it."""
        ...

    def written(self, slot_mapping: torch.Tensor) -> None:
        """Follow a write to the KV cache.

        Args:
            slot_mapping: int64 [T]; the tokens just written, as ``page * page_size + offset``,
                negative for padding.
        """
        ...

    def contexts(self, reads: Any) -> AbstractContextManager[object]:
        """Make whole contexts ready to be read while the layer attends.

        Args:
            reads: The plan of :meth:`Storage.plan` for the step; None: nothing is planned.
        """
        ...

    def ahead(self, rows: DecodeRows, chooser: Chooser) -> None:
        """Begin to bring the tokens that the rows' next step will probably attend to.

        Args:
            rows: The rows of :meth:`reach`.
            chooser: The layer's, which selected them.
        """
        ...

    @property
    def held(self) -> HeldTokens | None:
        """Tokens that are brought once; None: there is no need to hold any."""
        ...

    def lay_out(self, pages: torch.Tensor, target: torch.Tensor, layout: str) -> None:
        """Lay out pages as larger blocks; see :meth:`vllm_kvretrieval.kernels.Ops.stage_pages`."""
        ...


class Storage(Protocol):
    """Where the KV of an engine's layers is.

    The worker makes it before the KV cache, and tells it about requests and steps. The metadata
    builder asks it what has to be made ready for a step.
    """

    @property
    def allocates(self) -> bool:
        """Whether :meth:`allocate` makes the KV cache; else vLLM does."""
        ...

    @property
    def slow_layers(self) -> Sequence[str]:
        """Names of the layers whose KV is not in fast memory, in the order of the model."""
        ...

    def allocate(
        self, names: Sequence[str], layer_bytes: int
    ) -> Sequence[tuple[Sequence[str], torch.Tensor]]:
        """Make the KV cache.

        Args:
            names: The layers' names, in the order of the model.
            layer_bytes: Bytes of each layer.

        Returns:
            Names of layers, and int8 memory for them, one after another.

        Raises:
            RetrievalConfigError: The system refuses what is needed.
        """
        ...

    @property
    def token_major(self) -> bool:
        """See :attr:`LayerStorage.token_major`."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether whole contexts are read where they are.

        If false, prompts are laid out, and rows that attend to everything reach for it as others
        do; the storage has to be asked about each step.
        """
        ...

    @property
    def at_hand(self) -> bool:
        """Whether keys that something else has brought can be read at once."""
        ...

    def refuse_two_directions(self, config: RetrievalConfig) -> None:
        """Called for models that attend to some of their input in both directions.

        Raises:
            RetrievalConfigError: vLLM's kernel, which serves them, does not read this storage.
        """
        ...

    def layer(self, cache: LayerCache) -> LayerStorage:
        """Make the storage of a retrieval layer; once for each, in the order of the model."""
        ...

    def dense_layer(self, name: str) -> LayerStorage:
        """The storage of a layer that attends to everything."""
        ...

    def share(self, layers: Sequence[LayerStorage]) -> SharedRecall | None:
        """Let layers that attend to the same tokens have them brought at once; None: no need."""
        ...

    def plan(self, step: StepContexts) -> Any:
        """Find the pages that layers have to make ready; see :meth:`LayerStorage.contexts`."""
        ...

    def begin_step(self, scheduler_output: Any) -> None:
        """Follow vLLM's scheduler before a step."""
        ...

    def end_step(self, tokens: int) -> None:
        """Follow a step that has computed so many tokens."""
        ...

    def leave(self, seats: Iterable[int], requests: Iterable[str]) -> None:
        """Forget requests that have ended or are interrupted.

        Args:
            seats: The seats that they had.
            requests: The requests' ids; some may have had no seat.
        """
        ...

    @property
    def lost(self) -> Lost:
        """Takes note of vLLM's blocks that can no longer be read."""
        ...

    @property
    def encoded_pages(self) -> Sequence[RecallCache]:
        """Recall caches that encode pages; none if pages are stored as they are written."""
        ...

    @property
    def block_pages(self) -> int:
        """Pages of a block of vLLM's, as numbered by ``encoded_pages``."""
        ...

    def check(self) -> str:
        """The first error in the bookkeeping, or difference from home, in words; empty if there is
        none. For tests."""
        ...

    @property
    def usage(self) -> "Usage":
        """The part of the fast memory in front of the storage that is in use."""
        ...


class Usage(NamedTuple):
    """Slots in front of a storage.

    Attributes:
        slots: Number of slots, of all layers.
        used: Number of slots that hold something.
        bytes_per_read: Bytes that filling one of them reads.
    """

    slots: int = 0
    used: int = 0
    bytes_per_read: int = 0
