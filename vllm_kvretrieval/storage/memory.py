"""KV in fast memory, where attention reads it in place."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import Chooser, DecodeRows, TokenLists
from vllm_kvretrieval.kernels.cpu import TOKEN_MAJOR
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.base import HeldTokens, LayerCache, Part, StepContexts, Usage
from vllm_kvretrieval.storage.lost import Lost

_NOTHING = nullcontext()


class InPlace:
    """A layer whose KV needs no attention of ours: there is nothing to bring or to follow."""

    token_major = False
    held: HeldTokens | None = None

    def written(self, slot_mapping: torch.Tensor) -> None:
        """Do nothing."""

    def contexts(self, reads: Any) -> AbstractContextManager[object]:
        """Whole contexts are always ready."""
        return _NOTHING

    def reach(self, rows: DecodeRows, lists: TokenLists) -> Sequence[Part]:
        """A dense layer attends to whole contexts, and has no lists."""
        raise NotImplementedError("a dense layer reaches for nothing")

    def ahead(self, rows: DecodeRows, chooser: Chooser) -> None:
        """Do nothing."""

    def lay_out(self, pages: torch.Tensor, target: torch.Tensor, layout: str) -> None:
        """A dense layer is read where it is."""
        raise NotImplementedError("a dense layer is read where it is")


IN_PLACE = InPlace()


class MemoryLayer(InPlace):
    """A retrieval layer whose KV cache has addresses, from which it can be read.

    Args:
        cache: The layer.
    """

    def __init__(self, cache: LayerCache) -> None:
        self.token_major = cache.layout == TOKEN_MAJOR
        self._cache, self._kernels = cache.kv_cache, cache.kernels
        self._units = self._as_units(cache.kv_cache)

    def _as_units(self, memory: torch.Tensor) -> torch.Tensor:
        """Memory as [units, page_size, 2 * head_size], which are the KV cache's sizes."""
        return memory.view(-1, *self._cache.shape[2:])

    def reach(self, rows: DecodeRows, lists: TokenLists) -> Sequence[Part]:
        """All of it is there."""
        return (Part(lists, self._units),)

    def lay_out(self, pages: torch.Tensor, target: torch.Tensor, layout: str) -> None:
        """See :meth:`LayerStorage.lay_out`."""
        self._kernels.stage_pages(self._cache, pages, target, layout, self.token_major)


class Memory:
    """An engine's KV in fast memory.

    Args:
        token_major: See :attr:`LayerStorage.token_major`.
    """

    in_place = at_hand = True
    allocates = False
    slow_layers = encoded_pages = ()
    block_pages = 1

    def __init__(self, token_major: bool = False) -> None:
        self.token_major, self.lost = token_major, Lost()

    def allocate(self, names: Sequence[str], layer_bytes: int) -> NoReturn:
        """Refused, since vLLM allocates the KV cache in memory."""
        raise NotImplementedError("vLLM allocates the KV cache in memory")

    def refuse_two_directions(self, config: RetrievalConfig) -> None:
        """See :meth:`Storage.refuse_two_directions`."""
        if self.token_major:
            refuse_two_directions(config)

    def layer(self, cache: LayerCache) -> MemoryLayer:
        """See :meth:`Storage.layer`."""
        return MemoryLayer(cache)

    def dense_layer(self, name: str) -> InPlace:
        """See :meth:`Storage.dense_layer`."""
        return IN_PLACE

    def share(self, layers: Sequence[Any]) -> None:
        """All is there."""

    def plan(self, step: StepContexts) -> None:
        """Nothing has to be made ready."""

    def begin_step(self, scheduler_output: Any) -> None:
        """Do nothing."""

    def end_step(self, tokens: int) -> None:
        """Do nothing."""

    def leave(self, seats: Iterable[int], requests: Iterable[str]) -> None:
        """Do nothing."""

    def check(self) -> str:
        """There are no books."""
        return ""

    @property
    def usage(self) -> Usage:
        """There are no slots."""
        return Usage()


def refuse_two_directions(config: RetrievalConfig) -> NoReturn:
    """Refuse models that vLLM's kernel serves, which does not read a token-major cache."""
    raise RetrievalConfigError(
        f"{config.method} selects single tokens, and this model attends to some of its input in "
        "both directions. Use a method that selects pages."
    )
