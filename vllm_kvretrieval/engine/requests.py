"""The running requests as the retrieval layers see them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_kvretrieval.config import RequestOptions, RetrievalConfig
from vllm_kvretrieval.errors import RetrievalConfigError

logger = init_logger("vllm.kvretrieval.requests")


class RowOptions(NamedTuple):
    """Options of the rows of a step; arrays of one entry per row."""

    sink_pages: np.ndarray
    window_pages: np.ndarray
    select_pages: np.ndarray
    total_pages: np.ndarray
    threshold: np.ndarray
    exact: np.ndarray


class RequestTable:
    """Gives every running request a slot, a stable index into all per-request state.

    Life of a slot: a request takes one when it first appears in a batch, keeps it however the batch
    is reordered or condensed, and gives it back when it finishes, is aborted or is preempted. A
    resumed request takes a new one: its first decode step corrects every head, so nothing of the
    old state is needed. State is never cleared: it is valid only for a request that decoded
    sparsely in the step before, which the metadata builder checks by the length of the context at
    that step; that is forgotten when the slot changes hands.

    Args:
        config: Options of the engine.
        capacity: Most requests that run at once.
        retrieval_heads: KV heads times retrieval layers, the denominator of the corrected share.
        runner: vLLM's model runner, which knows the order of the batch and the requests' options.
        in_slots: Whether recall caches count the units attended to; else the table does.
    """

    def __init__(
        self,
        config: RetrievalConfig,
        capacity: int,
        retrieval_heads: int,
        runner: Any,
        in_slots: bool,
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.runner = runner
        self.retrieval_heads = retrieval_heads
        self.in_slots = in_slots
        self.corrected = torch.zeros(capacity, dtype=torch.int64)
        # (page, KV head) units attended to, missed in a recall cache, and read from home.
        self.recalls = torch.zeros(capacity, 3, dtype=torch.int64)
        self._past = torch.zeros(4, dtype=torch.int64)  # counts of slots' earlier requests
        self._taken = torch.zeros(4, dtype=torch.int64)
        self._slot_of: dict[str, int] = {}
        self._per_slot: list[np.ndarray] = []
        self._free = list(range(capacity))[::-1]
        self._sink = np.zeros(capacity, dtype=np.int32)
        self._window = np.zeros(capacity, dtype=np.int32)
        self._select = np.zeros(capacity, dtype=np.int32)
        self._total = np.zeros(capacity, dtype=np.int32)
        self._threshold = np.zeros(capacity, dtype=np.float32)
        self._exact = np.zeros(capacity, dtype=bool)
        self._context = np.zeros(capacity, dtype=np.int32)
        # Per slot: decode steps, sparse ones among them, and pages of context summed over these.
        self._steps = np.zeros((3, capacity), dtype=np.int64)
        # Whether the step about to run is a decode step within all budgets, known beforehand.
        self.calm = False
        self._calm_batch: set[str] = set()
        self._calm_left = self._calm_passed = 0

    def __len__(self) -> int:
        return len(self._slot_of)

    def release(self, req_ids: Iterable[str]) -> list[int]:
        """Take back the slots of finished, aborted or preempted requests; unknown ids are fine.

        Returns:
            The slots taken back.
        """
        self._settle()
        slots = []
        for req_id in req_ids:
            slot = self._slot_of.pop(req_id, None)
            if slot is not None:
                self._log_usage(req_id, slot)
                slots.append(slot)
        self._free += slots
        return slots

    def counts(self) -> torch.Tensor:
        """int64 [4]; KV heads corrected, and units attended to, missed and read, so far."""
        return self._past + self._counts(range(self.capacity))

    def take_counts(self) -> list[int]:
        """The same since the last call."""
        counts = self.counts()
        new = counts - self._taken
        self._taken = counts
        return new.tolist()

    def _counts(self, slots: Sequence[int]) -> torch.Tensor:
        """int64 [4]; corrected heads and recalls of the slots' last requests."""
        index = torch.tensor(slots)
        return torch.cat([self.corrected[index].sum(0, keepdim=True), self.recalls[index].sum(0)])

    def begin_step(self, scheduled: dict[str, int], tokens: int) -> None:
        """Find out whether the step is ``calm``: one more like those that :meth:`expect_calm` saw.

        Args:
            scheduled: Tokens of each request in the step.
            tokens: Their sum.
        """
        self.calm = (
            self._calm_left > 0
            and tokens == len(scheduled)
            and scheduled.keys() == self._calm_batch
        )
        if self.calm:
            self._calm_left -= 1
            self._calm_passed += 1
        else:
            self._settle()

    def expect_calm(self, steps: int) -> None:
        """All rows of this step decode within their budgets, and will for so many more steps."""
        self._calm_batch = set(self.runner.input_batch.req_ids)
        self._calm_left = steps

    def _settle(self) -> None:
        """Book the calm steps that have passed; the next step has to be looked at."""
        if self._calm_passed:
            slots = [self._slot_of[req_id] for req_id in self._calm_batch]
            self._context[slots] += self._calm_passed
            self._steps[0, slots] += self._calm_passed
        self._calm_left = self._calm_passed = 0

    def per_slot(self) -> np.ndarray:
        """int32 [capacity]; the caller's own, an entry is zero whenever its slot changes hands."""
        entries = np.zeros(self.capacity, dtype=np.int32)
        self._per_slot.append(entries)
        return entries

    def slots(self, count: int) -> np.ndarray:
        """int32 [count]; slots of the first ``count`` rows of the batch about to run."""
        slot_of = self._slot_of
        return np.array(
            [
                slot_of[r] if r in slot_of else self._admit(r)
                for r in self.runner.input_batch.req_ids[:count]
            ],
            dtype=np.int32,
        )

    def select(self, slots: np.ndarray) -> RowOptions:
        """Options of the requests in ``slots``."""
        return RowOptions(
            self._sink[slots],
            self._window[slots],
            self._select[slots],
            self._total[slots],
            self._threshold[slots],
            self._exact[slots],
        )

    def count_steps(
        self,
        slots: np.ndarray,
        lens: np.ndarray,
        pages: np.ndarray,
        sparse: np.ndarray,
        decodes: np.ndarray,
    ) -> None:
        """Book one step: which rows decode, and which of them over selected pages only.

        A step is booked once, also where several groups of layers report it.
        """
        new = lens != self._context[slots]
        self._context[slots] = lens
        self._steps[:, slots] += np.array((decodes, sparse, pages * sparse)) * new
        if not self.in_slots:
            units = sparse * self._total[slots] * self.retrieval_heads
            self.recalls.numpy()[slots, 0] += units * new

    def _admit(self, req_id: str) -> int:
        slot = self._free.pop()
        self._slot_of[req_id] = slot
        sampling_params = self.runner.requests[req_id].sampling_params
        extra_args = getattr(sampling_params, "extra_args", None)
        try:
            options = RequestOptions.parse(extra_args, self.config)
        except RetrievalConfigError as e:  # only a front end that skips our validation gets here
            logger.error("Request %s runs with the server's options: %s", req_id, e)
            options = RequestOptions.parse(None, self.config)
        budget = options.budget
        self._sink[slot], self._window[slot] = budget.sink, budget.window
        self._select[slot], self._total[slot] = budget.select, budget.total
        self._threshold[slot], self._exact[slot] = options.correction_threshold, options.exact
        self._context[slot] = 0
        self._steps[:, slot] = 0
        self._past += self._counts([slot])
        self.corrected[slot] = 0
        self.recalls[slot] = 0
        for entries in self._per_slot:
            entries[slot] = 0
        return slot

    def _log_usage(self, req_id: str, slot: int) -> None:
        steps, sparse, pages = (int(x) for x in self._steps[:, slot])
        attended = sparse * int(self._total[slot])
        units, missed, recalled = self.recalls[slot].tolist()
        logger.debug(
            "kv_retrieval request_id=%s context=%d decode_steps=%d sparse_steps=%d "
            "pages_attended=%d pages_total=%d kv_read_share=%.4f corrected_share=%.4f "
            "recall_hit_rate=%.4f units_recalled=%d",
            req_id,
            int(self._context[slot]),
            steps,
            sparse,
            attended // max(sparse, 1),
            pages // max(sparse, 1),
            attended / pages if pages else 1.0,
            int(self.corrected[slot]) / max(sparse * self.retrieval_heads, 1),
            1 - missed / units if units else 1.0,
            recalled,
        )
