"""How a layer watches the attention of prompts, and keeps tokens by it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_kvretrieval.engine.prompts import AddUp, KeptPrompts, Watched
from vllm_kvretrieval.kernels import DecodeRows, KeptTokens, Ops, Selection, TokenLists
from vllm_kvretrieval.kernels.observe import context_keys, observe
from vllm_kvretrieval.retrieval.keeping import STAMPED, Keeping


class Watch(NamedTuple):
    """Queries of a step, of one prompt, whose attention counts.

    Attributes:
        tokens: Theirs, among the step's.
        first: Position of the first of them in the context.
        pages: int64 [n]; of the context up to the last of them.
        rule: Of the request's method.
        entropies: Whether the method goes by them, too.
        watched: What to add to.
    """

    tokens: slice
    first: int
    pages: torch.Tensor
    rule: Keeping
    entropies: bool
    watched: Watched


@dataclass
class KeptRows:
    """What rows of one method, which decode a token each, keep.

    Attributes:
        rule: The method's.
        drops: Whether each drops a token in this step.
        seats: int64 [R].
        new: Those whose prompts have just been read.
        tail: With a slow home, where nothing is dropped any more: the same rows, of which only what
            came after their prompts is listed; it is read in place, and what is kept in slots.
    """

    rule: Keeping
    drops: bool
    seats: torch.Tensor
    new: list[int]
    tail: DecodeRows | None = None


class Keeper:
    """Of one layer.

    Args:
        kernels: Implementation of the ops.
        prompts: Of the worker.
        number: Of the layer, among retrieval layers.
        selection: The layer's.
        scale: Softmax scale.
        most: Tokens; most that a KV head keeps, where some method drops one at each step; else 0.
        slots: [S, kv_heads, capacity, 2 * head_size]; fast memory, where the home is slow.
        home: [P, kv_heads, page_size, 2 * head_size]; that, as single tokens of it are read.
    """

    def __init__(
        self,
        kernels: Ops,
        prompts: KeptPrompts,
        number: int,
        selection: Selection,
        scale: float,
        most: int,
        slots: torch.Tensor | None = None,
        home: torch.Tensor | None = None,
    ) -> None:
        self._slots, self._home = slots, home
        self._prompts, self._number = prompts, number
        self._heads = prompts.heads.slices[number]
        self._kernels, self._scale = kernels, scale
        seats, heads, _ = selection.chosen.shape
        self._kept = KeptTokens(
            selection.chosen,
            torch.zeros(seats, heads, most),
            prompts.selected[:, self._heads],
            prompts.budgets[:, self._heads],
        )

    def _row(self, rule: Keeping) -> slice:
        """Of this layer in a :class:`Watched`."""
        return slice(self._number, self._number + 1) if rule.per_layer else self._heads

    def observe(self, query: torch.Tensor, cache: torch.Tensor, watches: list[Watch]) -> None:
        """Watch the queries of a step.

        Args:
            query: [tokens, heads, head_size]; the step's.
            cache: [P, kv_heads, page_size, 2 * head_size]; the layer's, with the step's keys.
            watches: Which of them.
        """
        for watch in watches:
            kv_heads, watched = cache.shape[1], watch.watched
            by_head = query[watch.tokens].chunk(kv_heads, dim=1)
            tokens = watch.first + len(by_head[0])
            mass = watched.mass[self._row(watch.rule), :tokens]
            stamped = STAMPED if watch.rule.rating == "stamp" else None
            for head, asked in enumerate(by_head):
                keys = context_keys(cache, watch.pages, tokens, head)
                received = mass if watch.rule.per_layer else mass[head : head + 1]
                entropy = observe(
                    asked, watch.first, keys, self._scale, received, watch.entropies, stamped
                )
                watched.entropies[self._number] += entropy / query.shape[1]

    def settle(self, kept: KeptRows, method: int, rows: DecodeRows) -> None:
        """Choose what is kept of prompts that have been read."""
        add_up = self._prompts.heads.add_up
        for row in kept.new:
            seat = int(kept.seats[row])
            mass = self._prompts.watched(seat, method).mass[self._row(kept.rule)]
            _all_workers(mass, kept.rule, add_up)
            counts = self._prompts.selected[seat, self._heads]
            for head, positions in enumerate(kept.rule.keep(mass, counts)):
                self._kept.chosen[seat, head, : len(positions)] = positions
                if kept.drops:
                    of_mass = min(head, len(mass) - 1)
                    self._kept.ratings[seat, head, : len(positions)] = mass[of_mass, positions]
                if kept.tail is not None:
                    self._pack(rows.block_table[row], seat, head, positions)

    def _pack(self, table: torch.Tensor, seat: int, head: int, positions: torch.Tensor) -> None:
        """Bring what a KV head keeps into fast memory."""
        assert self._home is not None
        assert self._slots is not None
        size = self._home.shape[2]
        pages = table[positions // size].long()
        self._slots[seat, head, : len(positions)] = self._home[pages, head, positions % size]

    def packed(self, kept: KeptRows) -> TokenLists:
        """Lists of what rows keep in slots."""
        assert self._slots is not None
        _, kv_heads, capacity, _ = self._slots.shape
        counts = self._prompts.selected[kept.seats, self._heads].flatten()
        first = (kept.seats[:, None] * kv_heads + torch.arange(kv_heads)).flatten() * capacity
        entries = first[:, None] + torch.arange(int(counts.max()))
        return TokenLists(entries.int(), counts.contiguous(), 1, kv_heads)

    def weights(self, query: torch.Tensor) -> torch.Tensor:
        """Room for what the tokens of lists weigh, float32 [R, heads, most of them and one]."""
        return torch.empty(*query.shape[:2], self._kept.ratings.shape[2] + 1)

    def drop(self, kept: KeptRows, rows: DecodeRows, weights: torch.Tensor) -> None:
        """Take each row's new token in, and drop the least attended one where there is no room.

        Args:
            kept: Of the rows.
            rows: They.
            weights: As :meth:`weights` made it; what the tokens of each head's list weigh; of
                each list the last is the new token.
        """
        by_set = weights.unflatten(1, (self._kept.chosen.shape[1], -1))
        if kept.rule.per_layer:
            by_set = weights.sum(1)[:, None, None]
            _all_workers(by_set, kept.rule, self._prompts.heads.add_up)
        self._kernels.drop_tokens(by_set, rows, self._kept, kept.rule)


def _all_workers(mass: torch.Tensor, rule: Keeping, add_up: AddUp | None) -> None:
    """What a whole layer keeps depends on heads of other workers, too."""
    if rule.per_layer and add_up is not None:
        add_up(mass)
