"""The prompts of requests whose methods keep some tokens and drop the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.kernels import KeptTokens
from vllm_kvretrieval.methods.base import Step
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
        tokens: Tokens of the prompt.
        entropies: float64 [retrieval layers]; sums over queries, for the layer's heads here.
        masses: float32 [KV heads, tokens] by the layer's place among retrieval layers; or
            [1, tokens], if all heads of a layer keep the same tokens.
        settled: Whether the numbers of tokens that KV heads keep are fixed.
    """

    tokens: int
    entropies: torch.Tensor
    masses: dict[int, torch.Tensor] = field(default_factory=dict)
    settled: bool = False

    def mass(self, layer: int, heads: int) -> torch.Tensor:
        """The sums of a layer, which begin as zeros; see ``masses``.

        Args:
            layer: The layer's place among retrieval layers.
            heads: Its KV heads, or 1.
        """
        if layer not in self.masses:
            device = self.entropies.device
            self.masses[layer] = torch.zeros(heads, self.tokens, device=device)
        return self.masses[layer]


class Watch(NamedTuple):
    """Queries of a step, of one prompt, whose attention counts.

    Attributes:
        seat: The request's.
        method: The number of its method.
        tokens: The queries' places among the step's tokens.
        first: Position of the first of them in the context.
        pages: int64 [n]; pages of the context up to the last of them.
        ends: Whether the last of them is the last of the prompt.
        watched: The sums to add to.
    """

    seat: int
    method: int
    tokens: slice
    first: int
    pages: torch.Tensor
    ends: bool
    watched: Watched


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
        device: Where the layers are, and the sums of the attention.
        copies: int32 [seats, KV heads] each; copies of ``selected`` and of ``budgets`` there, which
            get what is found out in prompts, and of which steps that drop tokens write the first;
            None: layers read these themselves.
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
    device: torch.device | str = "cpu"
    copies: tuple[torch.Tensor, torch.Tensor] | None = None
    keeps: np.ndarray = field(init=False)
    ends: np.ndarray = field(init=False)
    budgets: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        seats = len(self.selected)
        self.keeps, self.ends = np.zeros(seats, dtype=bool), np.zeros(seats, dtype=np.int32)
        self.budgets = torch.zeros_like(self.selected)
        self._budget: dict[int, PageBudget] = {}
        self._watched: dict[int, Watched] = {}
        self._tokens: dict[int, KeptTokens] = {}

    @property
    def drops(self) -> bool:
        """Whether steps of some method drop tokens."""
        return any(method.drops for method in self.methods.values())

    def dropping(self, method: int) -> Keeping:
        """The rule by which steps of a method drop tokens."""
        rule = self.rules[method]
        if not self.methods[method].slides:
            return rule
        return replace(rule, rating="position", recent=0, recent_share=0.0)  # ratings say it all

    def tokens(self, layer: int, chosen: torch.Tensor) -> KeptTokens:
        """What is kept in a layer: the same for all methods of the engine.

        Args:
            layer: The layer's place among retrieval layers.
            chosen: The layer's :attr:`Selection.chosen`.
        """
        if layer not in self._tokens:
            heads = self.heads.slices[layer]
            counts, budgets = self.copies or (self.selected, self.budgets)
            shape = chosen.shape if self.drops else (0,)
            ratings = torch.zeros(shape, device=chosen.device)
            self._tokens[layer] = KeptTokens(chosen, ratings, counts[:, heads], budgets[:, heads])
        return self._tokens[layer]

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

    def watched(self, seat: int) -> Watched:
        """Return the sums of attention for the seat's prompt while it is read."""
        if seat not in self._watched:
            layers = len(self.heads.slices)
            entropies = torch.zeros(layers, dtype=torch.float64, device=self.device)
            self._watched[seat] = Watched(int(self.ends[seat]), entropies)
        return self._watched[seat]

    def watches(self, step: Step, methods: np.ndarray) -> list[Watch]:
        """The queries of a step that decide which tokens of their prompts are kept.

        Args:
            step: The step.
            methods: int [R]; numbers of its requests' methods.
        """
        watches, seats = list[Watch](), step.seats
        reading = self.keeps[seats] & (step.before < self.ends[seats])
        for row in np.flatnonzero(reading).tolist():
            seat, length, before = int(seats[row]), int(step.lens[row]), int(step.before[row])
            method, end = int(methods[row]), int(self.ends[seat])
            first = max(before, self.rules[method].first_observed(end))
            if first >= length:
                continue
            tokens = slice(int(step.starts[row]) + first - before, int(step.starts[row + 1]))
            pages = step.block_table[row, : -(-length // self.page_size)].long()
            found = method, tokens, first, pages, length >= end, self.watched(seat)
            watches.append(Watch(seat, *found))
        return watches

    def choose(self, seat: int, method: int, layer: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Choose the kept tokens of a prompt that has been read, in a layer.

        Args:
            seat, method: The request's seat, and the number of its method.
            layer: The layer's place among retrieval layers.

        Returns:
            What the tokens have received, see :class:`Watched`; and positions, int64 [its count],
            rising, of each KV head.
        """
        rule, heads = self.rules[method], self.heads.slices[layer]
        rows = 1 if rule.per_layer else heads.stop - heads.start
        mass = self.watched(seat).mass(layer, rows)
        if rule.per_layer and self.heads.add_up is not None:  # other workers have heads of it
            self.heads.add_up(mass)
        return mass, rule.keep(mass, self.selected[seat, heads])

    def keep(self, seat: int, method: int, layer: int) -> list[torch.Tensor]:
        """Write what :meth:`choose` chooses to :meth:`tokens`, rated where steps drop some;
        and forget what it follows from.

        Returns:
            int64 [its count], rising; positions that each KV head keeps.
        """
        mass, kept = self.choose(seat, method, layer)
        tokens, rule, by = self._tokens[layer], self.rules[method], self.methods[method]
        budgets = self.budgets[seat, self.heads.slices[layer]].tolist()
        for head, (positions, budget) in enumerate(zip(kept, budgets, strict=True)):
            tokens.chosen[seat, head, : len(positions)] = positions
            if by.drops:
                of_mass = mass[min(head, len(mass) - 1)]
                rated = rule.ratings(of_mass, positions, budget, by.slides)
                tokens.ratings[seat, head, : len(positions)] = rated
        del self.watched(seat).masses[layer]
        return kept

    def settle(self, seat: int, method: int) -> None:
        """Fix how many tokens each KV head keeps of a prompt that has been read.

        Args:
            seat: The request's seat.
            method: The number of its method.
        """
        watched = self.watched(seat)
        if watched.settled:
            return
        watched.settled = True
        rule = self.methods[method]
        bounds = rule.budget_shares.entropy
        if bounds is not None:
            if self.heads.add_up is not None:
                self.heads.add_up(watched.entropies)
            shares = entropy_shares(watched.entropies.cpu().numpy(), *bounds)
            counts = self.room.counts(rule.name, self._budget[seat], shares)
            self.budgets[seat] = torch.from_numpy(counts)
        seats, ends = np.array([seat]), self.ends[[seat]]
        self.selected[seat] = self._kept(seats, method, ends + 1)[0]
        if bounds is not None and self.copies is not None:
            for copy, own in zip(self.copies, (self.selected, self.budgets), strict=True):
                copy[seat] = own[seat]

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
        """Tokens that are kept before a step, int64 [n, KV heads]: of the prompts; if steps drop
        tokens, of all before the new one, so many that it has room."""
        ends = torch.from_numpy(self.ends[seats].astype(np.int64))[:, None]
        added, room = torch.zeros_like(ends), self.budgets[torch.from_numpy(seats).long()].long()
        if self.methods[method].drops:
            added = torch.from_numpy(lens.astype(np.int64) - 1)[:, None] - ends
            room = (room - 1).clamp(min=0)
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
            self.forget(seat)

    def forget(self, seat: int) -> None:
        """Forget the attention of a prompt whose tokens have been chosen."""
        self._watched.pop(seat, None)


def kept_prompts(
    config: RetrievalConfig,
    heads: LocalHeads,
    selected: torch.Tensor,
    room: Capacity,
    device: torch.device | str = "cpu",
    copies: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> KeptPrompts | None:
    """Make the kept prompts of an engine; None if no method drops tokens.

    Args:
        config: Options of the engine.
        heads, selected, room, device, copies: See :class:`KeptPrompts`.
    """
    methods, rules = dict[int, DroppingMethod](), dict[int, Keeping]()
    for number, method in enumerate(config.methods.values()):
        if not isinstance(method, DroppingMethod):
            continue
        rule = method.keeping
        if config.window is not None:
            rule = replace(rule, recent=config.window, recent_share=0.0)
        methods[number] = method
        rules[number] = rule if config.sink is None else replace(rule, sink=config.sink)
    if not methods:
        return None
    return KeptPrompts(methods, rules, heads, selected, room, config.page_size, device, copies)
