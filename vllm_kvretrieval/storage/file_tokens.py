"""KV in a file, from which tokens are recalled into slots; see :class:`TokenRecall`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from vllm_kvretrieval.kernels import DecodeRows, TokenLists, TokenRecall, cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.base import LayerCache, Part
from vllm_kvretrieval.storage.file import FileLayer, FileStorage
from vllm_kvretrieval.storage.mapped import DiskHome
from vllm_kvretrieval.storage.memory import refuse_two_directions


class FileTokensLayer(FileLayer):
    """A retrieval layer; see :class:`FileLayer`.

    Tokens in slots do not change, and new ones are read from home: writes are not followed. Single
    tokens are not read ahead of the step that attends to them.

    Args:
        storage: All layers.
        cache: The layer.
    """

    slots: torch.Tensor
    """[S, kv_heads, capacity, 2 * head_size]."""

    def __init__(self, storage: FileStorage, cache: LayerCache) -> None:
        super().__init__(storage, cache)
        _, kv_heads, _, width = cache.kv_cache.shape
        seats = storage.tiers.seats
        capacity = storage.slots[cache.name] // (seats * kv_heads)
        self.slots = torch.empty(seats, kv_heads, capacity, width, dtype=cache.kv_cache.dtype)
        assert isinstance(storage.home, DiskHome), "rows are not encoded"
        memory = storage.home.scattered(self.number)[: cache.kv_cache.nbytes]
        self.home = memory.view(cache.kv_cache.dtype).view(cache.kv_cache.shape)
        self.counts = cache.counts
        self.own = cpu.TokenRecall([self.home], [self.slots], self.counts, shared=False)
        self.in_slots = self._as_units(self.slots)
        self.held = Held(self.home, self.slots, self._units, self.in_slots)

    def reach(self, rows: DecodeRows, lists: TokenLists) -> Sequence[Part]:
        """Recall the missing tokens."""
        found = TokenLists.empty(rows, 1, lists.kv_heads)
        self.own.recall(rows, found)
        self.own.wait(0)
        return (Part(found, self.in_slots),)


class Held:
    """Tokens of a layer that are held in slots; see :class:`HeldTokens`.

    Args:
        home: [pages, kv_heads, page_size, 2 * head_size]; the layer's KV cache.
        slots: See :class:`FileTokensLayer`.
        in_home, in_slots: [units, page_size, 2 * head_size]; memory of both.
    """

    def __init__(
        self,
        home: torch.Tensor,
        slots: torch.Tensor,
        in_home: torch.Tensor,
        in_slots: torch.Tensor,
    ) -> None:
        self._home, self._slots, self._in_home, self._in_slots = home, slots, in_home, in_slots
        self._count = torch.zeros(*slots.shape[:2], dtype=torch.int32)

    def hold(self, seat: int, head: int, pages: torch.Tensor, positions: torch.Tensor) -> None:
        """See :meth:`HeldTokens.hold`."""
        size = self._home.shape[2]
        held = self._home[pages[positions // size].long(), head, positions % size]
        self._slots[seat, head, : len(positions)] = held
        self._count[seat, head] = len(positions)

    def reach(self, rows: DecodeRows, lists: TokenLists) -> Sequence[Part]:
        """Held tokens lie in slots in the order of the lists, and later tokens in home."""
        _, kv_heads, capacity, _ = self._slots.shape
        seats = rows.seats.long()
        held = self._count[seats].flatten()
        first = (seats[:, None] * kv_heads + torch.arange(kv_heads)).flatten() * capacity
        entries = first[:, None] + torch.arange(int(held.max()))
        behind = lists.lengths - held
        later = held[:, None] + torch.arange(int(behind.max()))
        later = later.clamp(max=lists.entries.shape[1] - 1)  # of a row with fewer: never read
        rest = lists.entries[: len(held)].gather(1, later.long())
        return (
            Part(TokenLists(entries.int(), held.contiguous(), 1, kv_heads), self._in_slots),
            Part(TokenLists(rest, behind, 1, kv_heads), self._in_home),
        )


class SharedTokens:
    """The recall of layers that attend to the same tokens; see :class:`SharedRecall`.

    Args:
        layers: The layers.
        recall: The recall of all of them.
    """

    def __init__(self, layers: Sequence[FileTokensLayer], recall: TokenRecall) -> None:
        self.recall, self._kv_heads = recall, layers[0].slots.shape[1]
        self.sources = [SharedLayer(self, i, layer.in_slots) for i, layer in enumerate(layers)]

    def announce(self, rows: DecodeRows) -> None:
        """See :meth:`SharedRecall.announce`."""
        self.lists = TokenLists.empty(rows, 1, self._kv_heads)
        self.recall.recall(rows, self.lists)


class SharedLayer(NamedTuple):
    """A layer's source of the tokens that have been announced; see :class:`Source`.

    Attributes:
        shared: It announces them.
        number: The layer's index there.
        in_slots: [units, page_size, 2 * head_size]; the layer's slots.
    """

    shared: SharedTokens
    number: int
    in_slots: torch.Tensor

    def reach(self, rows: DecodeRows, lists: TokenLists) -> Sequence[Part]:
        """See :meth:`Source.reach`."""
        self.shared.recall.wait(self.number)
        return (Part(self.shared.lists, self.in_slots),)


class FileTokens(FileStorage):
    """An engine's KV in a file, by tokens; see :class:`FileStorage`."""

    token_major = True

    def refuse_two_directions(self, config: RetrievalConfig) -> None:
        """See :meth:`Storage.refuse_two_directions`."""
        refuse_two_directions(config)

    def layer(self, cache: LayerCache) -> FileTokensLayer:
        """See :meth:`Storage.layer`."""
        layer = FileTokensLayer(self, cache)
        self.tokens.append(layer.own)
        return layer

    def share(self, layers: Sequence[Any]) -> SharedTokens:
        """See :meth:`Storage.share`."""
        homes, slots = [layer.home for layer in layers], [layer.slots for layer in layers]
        recall = cpu.TokenRecall(homes, slots, layers[0].counts, shared=True)
        self.tokens.append(recall)
        return SharedTokens(layers, recall)
