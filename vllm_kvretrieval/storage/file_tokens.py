"""KV in a file, of which single tokens are recalled into slots; see :class:`TokenRecall`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from vllm_kvretrieval.kernels import DecodeRows, TokenLists, TokenRecall, cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.base import LayerPlace, Part, Ready
from vllm_kvretrieval.storage.file import FileFacts, FileLayer, FileStorage
from vllm_kvretrieval.storage.memory import InPlace, refuse_two_directions
from vllm_kvretrieval.tiers.home import DiskHome


class FileTokensLayer(FileLayer):
    """A retrieval layer; see :class:`FileLayer`.

    Tokens in slots do not change, and new ones are read from home: writes are not followed. Single
    tokens are not read ahead of the step that attends to them.

    Args:
        facts: The home.
        place: The layer.
    """

    slots: torch.Tensor
    """[S, kv_heads, capacity, 2 * head_size]."""

    def __init__(self, facts: FileFacts, place: LayerPlace) -> None:
        super().__init__(facts, place)
        _, kv_heads, _, width = place.kv_cache.shape
        capacity = facts.slots[place.name] // (facts.seats * kv_heads)
        self.slots = torch.empty(facts.seats, kv_heads, capacity, width, dtype=place.kv_cache.dtype)
        assert isinstance(facts.home, DiskHome), "rows are not encoded"
        memory = facts.home.scattered(self.reader.number)[: place.kv_cache.nbytes]
        self.home = memory.view(place.kv_cache.dtype).view(place.kv_cache.shape)
        self.counts = facts.counts
        self.own = cpu.TokenRecall([self.home], [self.slots], facts.counts, shared=False)
        self._shared: tuple[TokenRecall, int] | None = None
        self._held = torch.zeros(facts.seats, kv_heads, dtype=torch.int32)
        self._in_home, self._in_slots = self._units, self._as_units(self.slots)

    def join(self, recall: TokenRecall, number: int) -> None:
        """Join the layers that attend to the same tokens, which another layer announces.

        Args:
            recall: The recall of all these layers.
            number: This layer's place among them.
        """
        self._shared = recall, number

    def reach(self, rows: DecodeRows, lists: TokenLists, ready: Ready) -> Sequence[Part]:
        """Recall what is not there; of what is held, read the rest in home."""
        if ready is Ready.HELD:
            return self._reach_held(rows, lists)
        if ready is Ready.ANNOUNCED:
            assert self._shared is not None, "another layer announces"
            recall, number = self._shared
            recall.wait(number)
        else:
            self.own.recall(rows)
            self.own.wait(0)
        places = TokenLists(rows.lists, rows.lengths, 1, lists.kv_heads)
        return (Part(places, self._in_slots),)

    def hold(self, seat: int, head: int, pages: torch.Tensor, positions: torch.Tensor) -> None:
        """See :meth:`LayerStorage.hold`."""
        size = self.home.shape[2]
        held = self.home[pages[positions // size].long(), head, positions % size]
        self.slots[seat, head, : len(positions)] = held
        self._held[seat, head] = len(positions)

    def _reach_held(self, rows: DecodeRows, lists: TokenLists) -> Sequence[Part]:
        """Held tokens lie in slots in the order of the lists, and later tokens in home."""
        _, kv_heads, capacity, _ = self.slots.shape
        seats = rows.seats.long()
        held = self._held[seats].flatten()
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


class Announcing(InPlace):
    """A dense layer that announces what layers after it attend to.

    Args:
        layer: The layer's storage without announcements.
        recall: The recall of the layers after it.
    """

    def __init__(self, layer: InPlace, recall: TokenRecall) -> None:
        self._layer, self._recall = layer, recall

    def contexts(self, reads: Any) -> AbstractContextManager[object]:
        """See :meth:`LayerStorage.contexts`."""
        return self._layer.contexts(reads)

    def announce(self, rows: DecodeRows) -> None:
        """See :meth:`LayerStorage.announce`."""
        self._recall.recall(rows)


class FileTokens(FileStorage):
    """An engine's KV in a file, by tokens; see :class:`FileStorage`."""

    token_major = True

    def refuse_two_directions(self, config: RetrievalConfig) -> None:
        """See :meth:`Storage.refuse_two_directions`."""
        refuse_two_directions(config)

    def layer(self, place: LayerPlace) -> FileTokensLayer:
        """See :meth:`Storage.layer`."""
        layer = FileTokensLayer(self.facts, place)
        self.tokens.append(layer.own)
        return layer

    def share(self, layer: Any, following: Sequence[Any]) -> Announcing:
        """See :meth:`Storage.share`."""
        recall = cpu.TokenRecall(
            [follower.home for follower in following],
            [follower.slots for follower in following],
            self.facts.counts,
            shared=True,
        )
        self.tokens.append(recall)
        for number, follower in enumerate(following):
            follower.join(recall, number)
        return Announcing(layer, recall)
