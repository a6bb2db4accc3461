"""How the requests of a step that have a single token attend."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_kvretrieval.attention.cpu.schedules import Scheduler
from vllm_kvretrieval.attention.parts import split_rows
from vllm_kvretrieval.kernels import Contexts
from vllm_kvretrieval.methods import (
    DecodePlan,
    GroupFacts,
    GroupMethod,
    Sees,
    Step,
    StepRows,
    plan_whole,
)
from vllm_kvretrieval.retrieval.seats import even

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.requests import RequestTable


class RowPlanner:
    """Plans rows for layers that share metadata.

    Args:
        facts: The layers.
        methods: The methods, by number.
        scheduler: Makes vLLM's schedules.
        in_place: Whether whole contexts can be read where they are.
        attends: Whether our own kernel attends to lists; see
            :meth:`RetrievalMetadataBuilder.attach`.

    Attributes:
        budget_pages: Pages of the largest admissible budget.
    """

    def __init__(
        self,
        facts: GroupFacts,
        methods: Sequence[GroupMethod],
        scheduler: Scheduler,
        in_place: bool,
        attends: bool,
    ) -> None:
        self._facts, self._methods, self._scheduler = facts, methods, scheduler
        self._requests, self._page_size = facts.requests, facts.page_size
        self._in_place, self.attends = in_place, attends
        self.budget_pages = facts.requests.config.budget_limit // facts.page_size
        # Length of the context at a seat's last sparse decode step.
        self._last_len = facts.requests.per_seat()

    def plan(
        self,
        common: CommonAttentionMetadata,
        dense: CPUAttentionMetadata,
        count: int,
        apart: np.ndarray,
    ) -> tuple[list[DecodePlan], np.ndarray]:
        """How the first ``count`` requests, of one token each, attend.

        Args:
            common: vLLM's description of the step.
            dense: vLLM's metadata of the batch.
            count: How many they are.
            apart: int64 [n]; places of those that are planned elsewhere.

        Returns:
            Plans for those that attend to parts of their contexts; and the places of the rest.
        """
        lens = dense.seq_lens.numpy()[:count]
        seats = self._requests.seats[:count]
        decodes = self._requests.decodes(seats, lens)
        batch = self._requests.records[seats]
        pages = -(-lens // self._page_size)
        parts = split_rows(batch, pages, decodes)
        self._requests.count_steps(seats, lens, pages, parts.sparse, decodes)
        looks = any(m.sees is Sees.ALL for m in self._methods) or not self._in_place
        if not parts.sparsely and count == common.num_reqs and decodes.all() and not looks:
            room = batch["total"] * self._page_size - lens
            never = np.iinfo(np.int32).max
            steps = int(np.where(batch["exact"], never, room).min())
            self._requests.foreseen.foresee(self._requests.batch, steps)
        plans = [self._sparsely(dense, method, seats, rows) for method, rows in parts.sparsely]
        whole = np.setdiff1d(parts.whole, apart, assume_unique=True) if len(apart) else parts.whole
        if not self._in_place:
            fits = pages[whole] <= self.budget_pages
            if fits.any():
                index = torch.from_numpy(whole[fits])
                contexts = _contexts_of(dense, index, seats[whole[fits]])
                plans.append(plan_whole(self._facts, contexts, index))
            whole = whole[~fits]
        return plans, whole

    def _sparsely(
        self,
        dense: CPUAttentionMetadata,
        number: int,
        seats: np.ndarray,
        places: np.ndarray | None,
    ) -> DecodePlan:
        """How rows of a method decode that attend to parts of their contexts.

        Args:
            dense: vLLM's metadata of the batch.
            number: The number of the method.
            seats: Seats of all requests of one token.
            places: Which of them are rows of the method; None: all.
        """
        index = None if places is None else torch.from_numpy(places)
        seats = seats if places is None else seats[places]
        contexts, method = _contexts_of(dense, index, seats), self._methods[number]
        lens = contexts.seq_lens.numpy()
        fresh = self._last_len[seats] != lens - 1
        self._last_len[seats] = lens
        options = self._requests.records[seats]
        plan = method.plan(StepRows(seats, contexts, fresh, index, options))
        if not self.attends and method.even and even(options):
            # Pages, of which the last is the tail page, partly filled.
            attended = options["total"] * self._page_size - (-lens % self._page_size)
            plan.schedule = self._scheduler.of_lists(attended)
        return plan


def see_step(
    methods: Sequence[GroupMethod],
    requests: "RequestTable",
    dense: CPUAttentionMetadata,
    before: np.ndarray,
) -> dict[int, Any]:
    """See :attr:`RetrievalMetadata.seen`.

    Args:
        methods: The methods, by number.
        requests: Table of the running requests.
        dense: vLLM's metadata of the batch.
        before: int [R]; tokens of each context before the step.
    """
    least = Sees.ALL if requests.foreseen.now else Sees.PROMPTS
    watching = [number for number, method in enumerate(methods) if method.sees >= least]
    if not watching:
        return {}
    seats, lens = requests.seats[: len(before)], dense.seq_lens.numpy()
    step = Step(seats, lens, before, dense.query_start_loc.numpy(), dense.block_table)
    return {number: methods[number].see(step) for number in watching}


def _contexts_of(
    dense: CPUAttentionMetadata, index: torch.Tensor | None, seats: np.ndarray
) -> Contexts:
    """The contexts of some rows; of the first ones where ``index`` is None."""
    rows = slice(len(seats)) if index is None else index
    return Contexts(dense.block_table[rows], dense.seq_lens[rows], torch.from_numpy(seats))
