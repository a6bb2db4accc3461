"""The interface of a place for KV to attention and the worker."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vllm_kvretrieval.kernels import Chooser, DecodeRows, Ops, TokenLists
from vllm_kvretrieval.options.engine import RetrievalConfig


class Part(NamedTuple):
    """A part of what rows attend to.

    Attributes:
        lists: The tokens of the part.
        units: [units, page_size, 2 * head_size]; the memory whose tokens the lists number.
        wait: To be called before the part is read; None: it is there.
    """

    lists: TokenLists
    units: torch.Tensor
    wait: Callable[[], None] | None = None


class Ready(Enum):
    """What has been done for rows before a layer reaches for what they attend to."""

    NOTHING = "nothing"
    HELD = "held"
    """The tokens of the rows have been brought by :meth:`LayerStorage.hold`."""
    ANNOUNCED = "announced"
    """A layer before has announced it, by :meth:`LayerStorage.announce`."""


class LayerPlace(NamedTuple):
    """A retrieval layer and its KV cache.

    Attributes:
        name: The layer's name in the model.
        kv_cache: [pages, kv_heads, page_size, 2 * head_size]; what vLLM allocated.
        layout: How it lays out keys: the name of vLLM's attention ``isa``, or ``rows``.
        kernels: Implementation of the ops.
    """

    name: str
    kv_cache: torch.Tensor
    layout: str
    kernels: Ops


@dataclass(frozen=True)
class StepContexts:
    """The contexts of a step, by which a storage finds out what to make ready.

    Attributes:
        requests: Ids, in batch order.
        before: int [R]; tokens of each context before the step.
        lens: int [R]; tokens of each context with the step.
        block_table: int32 [R, >= pages]; page ids in context order.
        whole: int [n]; places of the requests whose whole contexts retrieval layers read where they
            are; None: of all requests.
        laid_out: Pages that retrieval layers lay out in the staging buffer.
        most_pages: Pages of the largest budget.
    """

    requests: Sequence[str]
    before: np.ndarray
    lens: np.ndarray
    block_table: np.ndarray
    whole: np.ndarray | None
    laid_out: Sequence[torch.Tensor]
    most_pages: int


class LayerStorage(Protocol):
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
            reads: What :meth:`Storage.plan` returned for the step; None: nothing is planned.
        """
        ...

    def reach(self, rows: DecodeRows, lists: TokenLists, ready: Ready) -> Sequence[Part]:
        """Bring what rows attend to into fast memory.

        Args:
            rows: The rows of the step; their lists are void afterwards.
            lists: What they attend to, numbered as in the KV cache; over the rows' lists.
            ready: What has been done for these rows already.

        Returns:
            Parts of one softmax. A list may be empty in some of them, but not in all.
        """
        ...

    def ahead(self, rows: DecodeRows, chooser: Chooser) -> None:
        """Begin to bring what the rows' next step will probably attend to.

        Args:
            rows: The rows of :meth:`reach`.
            chooser: What it selected by.
        """
        ...

    def hold(self, seat: int, head: int, pages: torch.Tensor, positions: torch.Tensor) -> None:
        """Bring the tokens that a KV head keeps for good, before it reaches for them as ``HELD``.

        Args:
            seat: The request's seat.
            head: The KV head.
            pages: int32 [>= pages]; ids of the context's pages.
            positions: int64 [n]; positions of the tokens in the context, rising.
        """
        ...

    def announce(self, rows: DecodeRows) -> None:
        """Begin to bring what layers after this one will attend to.

        Args:
            rows: The rows whose lists say what it is. If it is brought, they get the places.
        """
        ...

    def lay_out(self, pages: torch.Tensor, target: torch.Tensor, layout: str) -> None:
        """Lay out pages as larger blocks; see :meth:`vllm_kvretrieval.kernels.Ops.stage_pages`."""
        ...


class Storage(Protocol):
    """Where the KV of an engine's layers is.

    The worker makes it when the KV cache has been allocated, and tells it about requests and steps.
    The metadata builder asks it what has to be made ready for a step.
    """

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

    def layer(self, place: LayerPlace) -> LayerStorage:
        """Make the storage of a retrieval layer; once for each, in the order of the model."""
        ...

    def dense_layer(self, name: str) -> LayerStorage:
        """The storage of a layer that attends to everything."""
        ...

    def share(self, layer: LayerStorage, following: Sequence[LayerStorage]) -> LayerStorage:
        """Let a dense layer announce what layers after it attend to.

        Args:
            layer: The dense layer's storage.
            following: The others' storages.

        Returns:
            The dense layer's storage from now on.
        """
        ...

    def plan(self, step: StepContexts) -> Any:
        """Find out what layers have to make ready; see :meth:`LayerStorage.contexts`."""
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

    def take_lost(self) -> set[int]:
        """Ids of vLLM's blocks that cannot be read any more."""
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
