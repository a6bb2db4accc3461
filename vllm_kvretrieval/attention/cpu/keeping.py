"""How a layer watches the attention of prompts, and keeps tokens by it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_kvretrieval.engine.prompts import AddUp, KeptPrompts, Watched
from vllm_kvretrieval.kernels import DecodeRows, KeptTokens, Ops, Selection
from vllm_kvretrieval.kernels.observe import context_keys, observe
from vllm_kvretrieval.retrieval.keeping import STAMPED, Keeping
from vllm_kvretrieval.storage import LayerStorage


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
    """

    rule: Keeping
    drops: bool
    seats: torch.Tensor
    new: list[int]


class Keeper:
    """Of one layer.

    Args:
        kernels: Implementation of the ops.
        prompts: Of the worker.
        number: Of the layer, among retrieval layers.
        selection: The layer's.
        scale: Softmax scale.
        most: Tokens; most that a KV head keeps, where some method drops one at each step; else 0.
        storage: Where the layer's KV is.
    """

    def __init__(
        self,
        kernels: Ops,
        prompts: KeptPrompts,
        number: int,
        selection: Selection,
        scale: float,
        most: int,
        storage: LayerStorage,
    ) -> None:
        self._storage = storage
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
                else:
                    self._storage.hold(seat, head, rows.block_table[row], positions)

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
