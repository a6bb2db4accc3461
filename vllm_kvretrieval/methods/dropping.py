"""Methods that keep some tokens of a prompt, by its attention, and drop the others for good.

Those of the schedules ``running`` and ``sliding`` drop a token at each step, too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_kvretrieval.kernels import Chooser, DecodeRows, Ops, Remainder, TokenLists
from vllm_kvretrieval.kernels.device import (
    DeviceOps,
    DevicePlan,
    DeviceRequests,
    DeviceRows,
    ScoreRoom,
)
from vllm_kvretrieval.kernels.observe import DEVICE_SCRATCH, observing_bytes
from vllm_kvretrieval.methods.base import (
    DecodePlan,
    DeviceFacts,
    GroupFacts,
    LayerFacts,
    Sees,
    Step,
    StepRows,
    WorkSize,
)
from vllm_kvretrieval.methods.kept_prompts import KeptPrompts, Watch
from vllm_kvretrieval.methods.scored import ScoredLayer, connect
from vllm_kvretrieval.methods.watching import Watcher
from vllm_kvretrieval.retrieval.families import DroppingMethod, Method
from vllm_kvretrieval.storage.base import HeldTokens

__all__ = ["connect", "device_method", "group_method", "layer_method", "scratch_bytes"]


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
        watches = self._kept.watches(step, self._facts.requests.records["method"][step.seats])
        return [watch for watch in watches if watch.method == self._number]


class DroppingLayer(ScoredLayer):
    """A layer's rows of one method, and what it keeps; see :class:`LayerMethod`.

    Args:
        facts: The layer.
        number: The number of the method.
        method: The method.
        chooser: The layer's; its selection holds what is kept.
    """

    by_chooser = False
    source: HeldTokens | None = None

    def __init__(
        self, facts: LayerFacts, number: int, method: DroppingMethod, chooser: Chooser
    ) -> None:
        super().__init__(chooser)
        assert facts.requests.kept is not None, "some method drops tokens"
        prompts: KeptPrompts = facts.requests.kept
        self._facts, self._number, self._prompts = facts, number, prompts
        rules = facts.scale, facts.softcap, facts.sinks
        self._watcher = Watcher(prompts, facts.number, *rules)
        self._kernels = facts.kernels
        self._rule, self._drops = prompts.dropping(number), method.drops
        if not self._drops:  # tokens that are kept for good are brought when they are chosen
            self.source = facts.storage.held
        self._kept = prompts.tokens(facts.number, chooser.selection.chosen)

    def watch(
        self, query: torch.Tensor, kv_cache: torch.Tensor, seen: list[Watch] | None, split: Any
    ) -> None:
        """Watch the queries of a step; see :class:`LayerWatcher`."""
        for watch in seen or ():
            self._watcher.add(query, kv_cache, watch)

    def choose(self, kernels: Ops, query: torch.Tensor, plan: DecodePlan) -> Remainder | None:
        """List the kept tokens, after choosing those of prompts that have just been read."""
        for row in plan.own:
            self.settle(int(plan.rows.seats[row]), plan.rows.block_table[row])
        return super().choose(kernels, query, plan)

    def settle(self, seat: int, pages: torch.Tensor) -> None:
        """Choose the kept tokens of a prompt that has been read."""
        kept = self._prompts.keep(seat, self._number, self._facts.number)
        if self.source is not None:
            for head, positions in enumerate(kept):
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
            if self._prompts.heads.add_up is not None:  # other workers have heads of the layer
                self._prompts.heads.add_up(by_set)
        self._kernels.drop_tokens(by_set, plan.rows, self._kept, self._rule)


class DeviceDropping:
    """A layer's rows of methods that keep tokens, on a device; see :class:`DeviceMethod`,
    :class:`LayerWatcher` and :class:`LayerWeigher`.

    Args:
        methods: The engine's: those of this family, and others that select nothing.
        choosers: The layer's, by the number of the method; their selection holds what is kept.
        facts: The layer.
    """

    per_token, looks_ahead = True, False

    def __init__(
        self, methods: Sequence[Method], choosers: Sequence[Chooser], facts: DeviceFacts
    ) -> None:
        assert facts.kept is not None, "some method drops tokens"
        self.selection, self._page_size = choosers[0].selection, choosers[0].store.page_size
        self._prompts, self._facts = facts.kept, facts
        own = self._prompts.methods
        self._kept = self._prompts.tokens(facts.number, self.selection.chosen)
        self._once = [number for number, method in own.items() if not method.drops]
        self._dropping = [number for number, method in own.items() if method.drops]
        self._others = [number for number in range(len(methods)) if number not in own]
        rules = facts.scale, facts.softcap, facts.sinks
        self._watcher = Watcher(self._prompts, facts.number, *rules, DEVICE_SCRATCH)

    def choose(
        self,
        ops: DeviceOps,
        query: torch.Tensor,
        rows: DeviceRows,
        requests: DeviceRequests,
        plan: DevicePlan,
    ) -> None:
        """See :meth:`DeviceOps.list_kept`."""
        numbers = self._once, self._others
        held = self.selection, self._page_size
        ops.list_kept(rows, requests, *numbers, *held, plan, dropping=self._dropping)

    def choose_ahead(
        self, ops: DeviceOps, rows: DeviceRows, requests: DeviceRequests, room: ScoreRoom
    ) -> None:
        """Nothing is selected after the prompt."""

    @property
    def weighs(self) -> bool:
        """See :attr:`LayerWeigher.weighs`."""
        return bool(self._dropping)

    def attended(
        self, ops: DeviceOps, rows: DeviceRows, scores: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """See :meth:`DeviceOps.drop_tokens`, for the methods whose steps drop tokens."""
        for number in self._dropping:
            rule, received = self._prompts.dropping(number), None
            if rule.per_layer and self._prompts.heads.add_up is not None:  # other workers have some
                received = scores.new_zeros(len(rows), scores.shape[2])
                ops.receive_tokens(scores, lse, rows, number, self._kept, received)
                self._prompts.heads.add_up(received)
            ops.drop_tokens(scores, lse, rows, number, self._kept, rule, received=received)

    def watch(
        self, query: torch.Tensor, kv_cache: torch.Tensor, seen: list[Watch], split: Any = None
    ) -> None:
        """Watch the queries of a step, and choose the kept tokens of prompts that end in it.

        How many these are may follow from the attention of all layers. Then the last one chooses
        for all.
        """
        for watch in seen:
            self._watcher.add(query, kv_cache, watch)
            layers = [self._facts.number]
            if watch.ends and not watch.watched.settled and self._facts.is_last:
                self._prompts.settle(watch.seat, watch.method)
                layers = [*watch.watched.masses]
            if watch.ends and watch.watched.settled:
                for layer in layers:
                    self._prompts.keep(watch.seat, watch.method, layer)


group_method = Dropping
device_method = DeviceDropping
layer_method = DroppingLayer


def scratch_bytes(methods: Sequence[Method], size: WorkSize) -> int:
    """Keys by which prompts are watched; see :meth:`Family.scratch_bytes`."""
    return observing_bytes(size.tokens, size.heads // size.kv_heads, size.head_size, size.dtype)
