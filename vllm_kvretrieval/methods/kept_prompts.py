"""The prompts of requests whose methods keep some tokens and drop the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.budget import PageBudget
from vllm_kvretrieval.retrieval.capacity import Capacity
from vllm_kvretrieval.retrieval.families import DroppingMethod
from vllm_kvretrieval.retrieval.keeping import Keeping, entropy_shares

NEVER = 1 << 20
"""A number of pages that no context has: a request with this limit attends to everything."""

AddUp = Callable[[torch.Tensor], object]
"""Adds up a tensor over all workers, in place."""


@dataclass
class Watched:
    """The attention that tokens of a prompt received. It is kept until the prompt has been read.

    Attributes:
        mass: float32 [KV heads of all retrieval layers, tokens]; or [retrieval layers, tokens], if
            all heads of a layer keep the same tokens.
        entropies: float64 [retrieval layers]; sums over queries, for the layer's heads here.
        settled: Whether the numbers of tokens that KV heads keep are fixed.
    """

    mass: torch.Tensor
    entropies: torch.Tensor
    settled: bool = False


@dataclass(frozen=True)
class LocalHeads:
    """The KV heads of a worker's retrieval layers.

    Attributes:
        slices: For each layer, the places of its KV heads among those of all layers.
        add_up: Adds up over workers; None: no other worker has heads of these layers.
    """

    slices: Sequence[slice]
    add_up: AddUp | None = None

    @property
    def count(self) -> int:
        return self.slices[-1].stop if self.slices else 0


@dataclass
class KeptPrompts:
    """The tokens that the request of each seat keeps.

    Attributes:
        methods: The methods that drop tokens, by their numbers among the engine's methods.
        rules: The rules of these methods.
        heads: The heads of this worker.
        selected: int32 [seats, KV heads]; see ``RequestTable``.
        room: How many tokens requests may keep of each head.
        page_size: Tokens per page.
        keeps: bool [seats]; whether the request drops tokens, now or later. It drops none if its
            prompt fits in its budget and its method drops nothing afterwards.
        ends: int32 [seats]; tokens of the prompt. A resumed request's prompt includes the tokens
            that it had generated.
        budgets: int32 [seats, KV heads]; tokens that each KV head may keep.
    """

    methods: Mapping[int, DroppingMethod]
    rules: Mapping[int, Keeping]
    heads: LocalHeads
    selected: torch.Tensor
    room: Capacity
    page_size: int
    keeps: np.ndarray = field(init=False)
    ends: np.ndarray = field(init=False)
    budgets: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        seats = len(self.selected)
        self.keeps, self.ends = np.zeros(seats, dtype=bool), np.zeros(seats, dtype=np.int32)
        self.budgets = torch.zeros_like(self.selected)
        self._budget: dict[int, PageBudget] = {}
        self._watched: dict[int, Watched] = {}
        self._ratings: dict[int, torch.Tensor] = {}

    def ratings(self, layer: int, chosen: torch.Tensor) -> torch.Tensor:
        """Ratings of the tokens that are kept in a layer, float32 of the shape of ``chosen``.

        All methods of the engine use the same tensor.

        Args:
            layer: The layer's place among retrieval layers.
            chosen: The layer's :attr:`Selection.chosen`.
        """
        return self._ratings.setdefault(layer, torch.zeros(chosen.shape))

    def admit(
        self, seat: int, method: int, prompt: int, budget: PageBudget, exact: bool
    ) -> int | None:
        """Note a request that is new, or whose options or prompt have changed.

        Args:
            seat: The request's seat.
            method: The number of its method.
            prompt: Tokens of its prompt.
            budget: The request's budget per KV head on average.
            exact: Whether it attends to everything.

        Returns:
            Pages of context beyond which the request decodes sparsely; None: the usual number.
        """
        self._watched.pop(seat, None)
        self.keeps[seat] = False
        rule = self.methods.get(method)
        if rule is None or exact:
            return None
        self.ends[seat], self._budget[seat] = prompt, budget
        self.budgets[seat] = torch.from_numpy(self.room.counts(rule.name, budget))
        self.keeps[seat] = rule.drops or prompt > budget.total * self.page_size
        self.selected[seat] = self.budgets[seat].clamp(max=prompt)
        if not self.keeps[seat]:
            return NEVER
        return 0 if rule.drops else None

    def leave(self, seat: int) -> None:
        """Forget the seat's request, which has ended or is interrupted."""
        self._watched.pop(seat, None)
        self.keeps[seat] = False

    def watched(self, seat: int, method: int) -> Watched:
        """Return the sums of attention for the seat's prompt while it is read."""
        if seat not in self._watched:
            layers = len(self.heads.slices)
            per_layer = self.rules[method].per_layer
            shape = (layers if per_layer else self.heads.count, int(self.ends[seat]))
            entropies = torch.zeros(layers, dtype=torch.float64)
            self._watched[seat] = Watched(torch.zeros(shape), entropies)
        return self._watched[seat]

    def settle(self, seat: int, method: int) -> None:
        """Fix how many tokens each KV head keeps of a prompt that has been read.

        Args:
            seat: The request's seat.
            method: The number of its method.
        """
        watched = self.watched(seat, method)
        if watched.settled:
            return
        watched.settled = True
        rule = self.methods[method]
        if (bounds := rule.budget_shares.entropy) is not None:
            if self.heads.add_up is not None:
                self.heads.add_up(watched.entropies)
            shares = entropy_shares(watched.entropies.numpy(), *bounds)
            counts = self.room.counts(rule.name, self._budget[seat], shares)
            self.budgets[seat] = torch.from_numpy(counts)
        if not rule.drops:
            end = torch.tensor(int(self.ends[seat]))
            kept = self.rules[method].kept(self.budgets[seat].long(), end, torch.tensor(0))
            self.selected[seat] = kept

    def step(self, seats: np.ndarray, method: int, lens: np.ndarray) -> np.ndarray:
        """Prepare a step; returns how many tokens at the end of contexts are attended to.

        Args:
            seats: Seats of requests of one method that decode a token.
            method: The number of the method.
            lens: Tokens of their contexts, the new one included.

        Returns:
            int32 [n]; tokens at the end of each context, beside those that are kept.
        """
        drops = self.methods[method].drops
        if drops:
            self.selected[torch.from_numpy(seats).long()] = self._kept(seats, method, lens).int()
        return np.ones_like(lens) if drops else lens - self.ends[seats]

    def _kept(self, seats: np.ndarray, method: int, lens: np.ndarray) -> torch.Tensor:
        """Tokens kept before a step that leave room for the new one, int64 [n, KV heads]."""
        ends = torch.from_numpy(self.ends[seats].astype(np.int64))[:, None]
        added = torch.from_numpy(lens.astype(np.int64) - 1)[:, None] - ends
        room = (self.budgets[torch.from_numpy(seats).long()].long() - 1).clamp(min=0)
        return self.rules[method].kept(room, ends, added)

    def attended(self, seats: np.ndarray, lens: np.ndarray, methods: np.ndarray) -> np.ndarray:
        """Count the tokens that all KV heads of requests attend to in a step.

        Args:
            seats: Seats of the requests.
            lens: Tokens of their contexts, the new one included.
            methods: Numbers of their methods.

        Returns:
            int64 [n].
        """
        beside = (lens - self.ends[seats]).astype(np.int64) * self.heads.count
        tokens = self.selected.numpy()[seats].sum(1, dtype=np.int64) + beside
        for number, method in self.methods.items():
            if method.drops and (rows := np.flatnonzero(methods == number)).size:
                kept = self._kept(seats[rows], number, lens[rows])
                tokens[rows] = kept.sum(1).numpy() + self.heads.count
        return tokens

    def end_step(self) -> None:
        """Forget the attention of prompts whose tokens have been chosen."""
        done = [seat for seat, watched in self._watched.items() if watched.settled]
        for seat in done:
            del self._watched[seat]


def kept_prompts(
    config: RetrievalConfig,
    heads: LocalHeads,
    selected: torch.Tensor,
    room: Capacity,
) -> KeptPrompts | None:
    """Make the kept prompts of an engine; None if no method drops tokens."""
    methods, rules = dict[int, DroppingMethod](), dict[int, Keeping]()
    for number, method in enumerate(config.methods.values()):
        if not isinstance(method, DroppingMethod):
            continue
        rule = method.keeping
        if config.window is not None:
            rule = replace(rule, recent=config.window, recent_share=0.0)
        methods[number] = method
        rules[number] = rule if config.sink is None else replace(rule, sink=config.sink)
    return KeptPrompts(methods, rules, heads, selected, room, config.page_size) if methods else None
