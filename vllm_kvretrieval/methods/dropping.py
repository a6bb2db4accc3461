"""Methods that keep some tokens of a prompt, by its attention, and drop the others for good.

Those of the schedules ``running`` and ``sliding`` drop a token at each step, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.kernels import Chooser, DecodeRows, KeptTokens, Ops, Remainder, TokenLists
from vllm_kvretrieval.kernels.observe import context_keys, observe, observing_bytes
from vllm_kvretrieval.methods.base import (
    DecodePlan,
    GroupFacts,
    LayerFacts,
    Sees,
    Step,
    StepRows,
    WorkSize,
)
from vllm_kvretrieval.methods.kept_prompts import AddUp, KeptPrompts, Watched
from vllm_kvretrieval.methods.scored import ScoredLayer, connect
from vllm_kvretrieval.retrieval.families import DroppingMethod, Method
from vllm_kvretrieval.retrieval.keeping import STAMPED, Keeping
from vllm_kvretrieval.storage.base import HeldTokens

__all__ = ["connect", "group_method", "layer_method", "scratch_bytes"]


class Watch(NamedTuple):
    """Queries of a step, of one prompt, whose attention counts.

    Attributes:
        tokens: The queries' places among the step's tokens.
        first: Position of the first of them in the context.
        pages: int64 [n]; pages of the context up to the last of them.
        watched: The sums to add to.
    """

    tokens: slice
    first: int
    pages: torch.Tensor
    watched: Watched


class Dropping:
    """A group's rows of one method; see :class:`GroupMethod`."""

    even, sees = True, Sees.PROMPTS

    def __init__(self, facts: GroupFacts, number: int, method: Method) -> None:
        assert facts.requests.kept is not None, "some method drops tokens"
        self._facts, self._number = facts, number
        self._kept = facts.requests.kept

    def plan(self, rows: StepRows) -> DecodePlan:
        """Rows that attend to the kept tokens of their prompts, and to all tokens after.

        Layers then choose for those whose prompts have just been read: these are ``own``.
        """
        facts, kept, number = self._facts, self._kept, self._number
        new = np.flatnonzero(rows.fresh).tolist()
        for row in new:
            kept.settle(int(rows.seats[row]), number)
        window = kept.step(rows.seats, number, rows.lens)
        most = min(facts.requests.room.most_chosen() + int(window.max()), int(rows.lens.max()))
        decode_rows = DecodeRows.given(
            rows.context,
            torch.empty(len(rows.seats) * facts.kv_heads, most, dtype=torch.int32),
            sink=0,
            window=torch.from_numpy(window.astype(np.int32)),
            fresh=torch.from_numpy(rows.fresh.astype(np.uint8)),
            per_token=True,
        )
        listed, starts = decode_rows.lists, decode_rows.starts
        lists = TokenLists(listed, decode_rows.lengths, 1, facts.kv_heads, starts=starts)
        return DecodePlan(number, decode_rows, rows.index, lists, own=new)

    def see(self, step: Step) -> list[Watch]:
        """Note the queries of the step that decide which tokens of their prompts are kept."""
        watches = list[Watch]()
        kept, seats = self._kept, step.seats
        methods = self._facts.requests.records["method"][seats]
        reading = kept.keeps[seats] & (step.before < kept.ends[seats])
        rule = kept.rules[self._number]
        for row in np.flatnonzero(reading & (methods == self._number)).tolist():
            seat, length, before = int(seats[row]), int(step.lens[row]), int(step.before[row])
            first = max(before, rule.first_observed(int(kept.ends[seat])))
            if first >= length:
                continue
            tokens = slice(int(step.starts[row]) + first - before, int(step.starts[row + 1]))
            pages = step.block_table[row, : -(-length // self._facts.page_size)].long()
            watches.append(Watch(tokens, first, pages, kept.watched(seat, self._number)))
        return watches


class DroppingLayer(ScoredLayer):
    """A layer's rows of one method, and what it keeps; see :class:`LayerMethod`.

    Args:
        facts: The layer.
        number: The number of the method.
        method: The method.
        chooser: The layer's; its selection holds what is kept.
    """

    source: HeldTokens | None = None

    def __init__(
        self, facts: LayerFacts, number: int, method: DroppingMethod, chooser: Chooser
    ) -> None:
        super().__init__(chooser)
        assert facts.requests.kept is not None, "some method drops tokens"
        prompts: KeptPrompts = facts.requests.kept
        self._facts, self._number, self._prompts = facts, number, prompts
        self._kernels = facts.kernels
        self._rule, self._drops = prompts.rules[number], method.drops
        if not self._drops:  # tokens that are kept for good are brought when they are chosen
            self.source = facts.storage.held
        self._slides = method.slides
        self._dropping = self._rule
        if self._slides:  # the ratings alone say what goes
            self._dropping = replace(self._rule, rating="position", recent=0, recent_share=0.0)
        self._by_entropy = method.budget_shares.entropy is not None
        self._heads = prompts.heads.slices[facts.number]
        chosen = chooser.selection.chosen
        self._kept = KeptTokens(
            chosen,
            prompts.ratings(facts.number, chosen) if self._drops else torch.empty(0),
            prompts.selected[:, self._heads],
            prompts.budgets[:, self._heads],
        )

    @property
    def _row(self) -> slice:
        """The layer's rows in a :class:`Watched`."""
        number = self._facts.number
        return slice(number, number + 1) if self._rule.per_layer else self._heads

    def watch(
        self, query: torch.Tensor, kv_cache: torch.Tensor, seen: list[Watch] | None, split: Any
    ) -> None:
        """Watch the queries of a step; see :class:`LayerWatcher`."""
        rule, facts = self._rule, self._facts
        stamped = STAMPED if rule.rating == "stamp" else None
        for watch in seen or ():
            kv_heads, watched = kv_cache.shape[1], watch.watched
            by_head = query[watch.tokens].chunk(kv_heads, dim=1)
            sinks = [None] * kv_heads if facts.sinks is None else facts.sinks.chunk(kv_heads)
            tokens = watch.first + len(by_head[0])
            mass = watched.mass[self._row, :tokens]
            for head, asked in enumerate(by_head):
                keys = context_keys(kv_cache, watch.pages, tokens, head)
                received = mass if rule.per_layer else mass[head : head + 1]
                entropy = observe(
                    asked,
                    watch.first,
                    keys,
                    facts.scale,
                    received,
                    self._by_entropy,
                    stamped,
                    softcap=facts.softcap,
                    sinks=sinks[head],
                )
                watched.entropies[facts.number] += entropy / query.shape[1]

    def choose(self, kernels: Ops, query: torch.Tensor, plan: DecodePlan) -> Remainder | None:
        """List the kept tokens, after choosing those of prompts that have just been read."""
        for row in plan.own:
            self.settle(int(plan.rows.seats[row]), plan.rows.block_table[row])
        return super().choose(kernels, query, plan)

    def settle(self, seat: int, pages: torch.Tensor) -> None:
        """Choose the kept tokens of a prompt that has been read."""
        mass = self._prompts.watched(seat, self._number).mass[self._row]
        _all_workers(mass, self._rule, self._prompts.heads.add_up)
        counts = self._prompts.selected[seat, self._heads]
        for head, positions in enumerate(self._rule.keep(mass, counts)):
            self._kept.chosen[seat, head, : len(positions)] = positions
            if self._drops:
                of_mass = mass[min(head, len(mass) - 1)]
                budget = int(self._kept.budgets[seat, head])
                rated = self._rule.ratings(of_mass, positions, budget, self._slides)
                self._kept.ratings[seat, head, : len(positions)] = rated
            elif self.source is not None:
                self.source.hold(seat, head, pages, positions)

    def weights(self, query: torch.Tensor) -> torch.Tensor | None:
        """Room for the most tokens that are kept, and the new one."""
        if not self._drops:
            return None
        return torch.empty(*query.shape[:2], self._kept.ratings.shape[2] + 1)

    def attended(self, plan: DecodePlan, weights: torch.Tensor) -> None:
        """Take each row's new token in, and drop the least attended one where there is no room.

        Args:
            plan: The rows.
            weights: Of the tokens of each head's list; the last one is the new token.
        """
        by_set = weights.unflatten(1, (self._kept.chosen.shape[1], -1))
        if self._rule.per_layer:
            by_set = weights.sum(1)[:, None, None]
            _all_workers(by_set, self._rule, self._prompts.heads.add_up)
        self._kernels.drop_tokens(by_set, plan.rows, self._kept, self._dropping)


def _all_workers(mass: torch.Tensor, rule: Keeping, add_up: AddUp | None) -> None:
    """Add up over workers where a whole layer keeps the same: other workers have heads of it."""
    if rule.per_layer and add_up is not None:
        add_up(mass)


group_method = Dropping
layer_method = DroppingLayer


def scratch_bytes(methods: Sequence[Method], size: WorkSize) -> int:
    """Keys by which prompts are watched; see :meth:`Family.scratch_bytes`."""
    return observing_bytes(size.tokens, size.heads // size.kv_heads, size.head_size, size.dtype)
