"""The table of running requests: their seats, options and counts."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_kvretrieval.engine.loads import LoadedPages
from vllm_kvretrieval.engine.running import Note, read_options, write_options
from vllm_kvretrieval.engine.sources import Sources
from vllm_kvretrieval.engine.usage import Counts, log_usage
from vllm_kvretrieval.methods.kept_prompts import LocalHeads, kept_prompts
from vllm_kvretrieval.methods.page_chunks import PromptReads
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestReader
from vllm_kvretrieval.retrieval.capacity import Capacity
from vllm_kvretrieval.retrieval.families.numbers import SeatField
from vllm_kvretrieval.retrieval.seats import SEAT


class ForeseenSteps:
    """Steps that an earlier one has foreseen: its requests decode on, and attend in full.

    They attend to whole contexts, so nobody plans them, and they are booked together, later.

    Attributes:
        now: Whether the step under way is one of them.
    """

    def __init__(self) -> None:
        self.now = False
        self._batch: frozenset[str] = frozenset()
        self._left = self._passed = 0

    def foresee(self, batch: Iterable[str], steps: int) -> None:
        """Say that after this step come so many in which its batch attends in full."""
        self._batch, self._left = frozenset(batch), steps

    def begin_step(
        self, scheduled: Mapping[str, int], tokens: int, arrived: Collection[str]
    ) -> None:
        """See whether the step is one of them: a token for each request of the batch, none new.

        Args:
            scheduled: Tokens of each request in the step.
            tokens: Tokens of the step.
            arrived: Requests and sessions with new input.
        """
        decodes = not arrived and tokens == len(scheduled)
        self.now = self._left > 0 and decodes and scheduled.keys() == self._batch
        self._left -= self.now
        self._passed += self.now

    def stop(self) -> tuple[frozenset[str], int]:
        """Foresee no more steps; returns the requests of those that have passed, and how many."""
        passed, self._left, self._passed = self._passed, 0, 0
        return self._batch, passed


class RequestTable:
    """Gives every running request a seat, a stable index into all per-request state.

    Life of a seat: a request takes a seat when it is first scheduled, keeps it when the batch is
    reordered or condensed, and gives it back when it ends or is preempted, or to make room for
    others. A resumed request takes a new seat: its first decode step corrects every head, so it
    needs only the counts of its old state. State is never cleared. It is valid only for a request
    that decoded sparsely in the step before; the metadata builder checks this by the length of the
    context at that step, which is forgotten when the seat changes hands.

    A step: the worker takes back seats (:meth:`release`, :meth:`make_room`) and gives some
    (:meth:`begin_step`). Each metadata builder says in which order the requests are in the batch
    (:meth:`set_batch`), plans by :attr:`seats` and :attr:`records`, and books what it has planned
    (:meth:`count_steps`, :meth:`count_prefill`), unless the step is foreseen. The worker ends the
    step (:meth:`end_step`).

    Args:
        config: Options of the engine.
        capacity: The most requests that run at once.
        retrieval_heads: KV heads times retrieval layers, the denominator of the corrected share.
        room: How many units requests get of each of these heads.
        rows: Names the requests of a step in batch order, by vLLM's description of the step.
        dense_share: Share of dense layers among the layers with full attention.
        heads: The KV heads of this worker, for methods that drop tokens.
        fixed: int32 [retrieval_heads] by the name of a method that fixes them; pages that each KV
            head selects, whatever the budget.

    Attributes:
        records: :data:`SEAT` [capacity]; what the requests ask for.
        foreseen: The steps that need no plan.
        selected: int32 [capacity, retrieval_heads]; pages or tokens that each KV head, layer after
            layer, selects for the request of a seat, if the context has as many; or tokens that a
            method that drops tokens keeps of a prompt. None: all heads select equally many.
        kept: The prompts of requests whose methods drop tokens; None: no method does.
        corrected: int64 [capacity]; see :class:`Counts`.
        spared: int64 [capacity]; see :attr:`DecodeRows.spared`.
        plain: Numbers of requests that have no effect here.
        prompt_reads: How KV heads read prompts that retrieve.
        recalls: int64 [capacity, 3]; units looked up, missed and recalled.
        in_step: Whether a step of requests is under way; vLLM's dummy runs are none.
        batch: The requests of the step in batch order, by id.
        notes: What is known of the requests that have not ended, by id.
        ends: int32 [capacity]; see :attr:`Note.tokens`.
        arrived: Requests that got their first blocks in this step, perhaps with contents, and
            sessions that got more input.
        loaded: Pages that a KV connector fills; None: there is no connector.
        sources: What answers attend to, of requests that ask; None: none may.
    """

    def __init__(
        self,
        config: RetrievalConfig,
        capacity: int,
        retrieval_heads: int,
        room: Capacity,
        rows: Callable[[Any], Sequence[str]],
        dense_share: float = 0.0,
        heads: LocalHeads | None = None,
        fixed: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.config, self._reader = config, RequestReader(config)
        self.room, self.fixed = room, fixed or {}
        self.selected: torch.Tensor | None = None
        if room.allotments or self.fixed or config.keeps_tokens:
            self.selected = torch.zeros(capacity, retrieval_heads, dtype=torch.int32)
        self.kept = None
        if self.selected is not None and heads is not None:
            self.kept = kept_prompts(config, heads, self.selected, room)
        self.retrieval_heads = retrieval_heads
        self.dense_share = dense_share
        self.capacity = capacity
        self.records = np.zeros(capacity, dtype=SEAT)
        self.foreseen = ForeseenSteps()
        self._rows = rows
        self.in_step = False
        self.batch: Sequence[str] = ()
        self._batch_seats: np.ndarray | None = None
        self.notes: dict[str, Note] = {}
        self.ends = np.zeros(capacity, dtype=np.int32)
        self.corrected = torch.zeros(capacity, dtype=torch.int64)
        self.spared = torch.zeros(capacity, dtype=torch.int64)
        self.plain: Sequence[SeatField] = ()
        self.prompt_reads = PromptReads()
        self.recalls = torch.zeros(capacity, 3, dtype=torch.int64)
        self._steps = torch.zeros(capacity, 6, dtype=torch.int64)  # the rest of the counts
        self._past = np.zeros(len(Counts._fields), np.int64)  # of ended requests
        self._taken = np.zeros_like(self._past)
        # Context and counts of preempted requests.
        self._preempted: dict[str, tuple[int, np.ndarray]] = {}
        self._seat_of: dict[str, int] = {}
        self._per_seat: list[np.ndarray] = []
        self._free = list(range(capacity))[::-1]
        # Units of selection in a page, by the number of the method.
        tokens = [config.page_size if m.per_token else 1 for m in config.methods.values()]
        self._units = np.array(tokens, dtype=np.int64)
        # Tokens that requests of a method attend to in full beyond their budgets.
        below = [config.whole_beyond_budget(method) for method in config.methods.values()]
        self._below = np.array(below, dtype=np.int64)
        self._context = np.zeros(capacity, dtype=np.int32)
        self.arrived: frozenset[str] = frozenset()
        self.loaded: LoadedPages | None = None
        self.sources: Sources | None = None

    def __len__(self) -> int:
        return len(self._seat_of)

    def release(self, finished: Iterable[str], preempted: Iterable[str] = ()) -> list[int]:
        """Take back the seats of requests that have ended or are interrupted.

        Args:
            finished: Requests that have finished or were aborted. Their counts are logged. Ids that
                are not known are ignored.
            preempted: Requests that are interrupted. If they come back, their counts go on.

        Returns:
            The seats that were taken back.
        """
        self._book_foreseen()
        self._batch_seats, seats = None, []
        for req_id in preempted:
            if (seat := self._seat_of.pop(req_id, None)) is not None:
                self._preempted[req_id] = self._take_out(seat)
                seats.append(seat)
        for req_id in finished:
            self.notes.pop(req_id, None)
            noted = self._preempted.pop(req_id, None)
            if (seat := self._seat_of.pop(req_id, None)) is not None:
                noted = self._take_out(seat)
                seats.append(seat)
            if noted is not None:
                context, counted = noted
                self._past += counted
                if context:  # some step of it was booked
                    counts = Counts(*counted.tolist())
                    log_usage(req_id, context, counts, self.retrieval_heads)
        self._free += seats
        return seats

    def make_room(self, scheduled: Mapping[str, int]) -> list[int]:
        """Take back seats that a step needs, from requests that are not in it.

        A session has a seat between its inputs. When it could go on and its LoRA adapter does not
        fit in the step, vLLM lets it wait and counts it no longer, so others may come. With its
        next input it takes a new seat.

        Args:
            scheduled: Tokens of each request in the step.

        Returns:
            The seats that were taken back. Requests of the step before lose theirs last.
        """
        lacking = len(scheduled.keys() - self._seat_of.keys()) - len(self._free)
        if lacking <= 0:
            return []
        idle = [req_id for req_id in self._seat_of if req_id not in scheduled]
        idle.sort(key=self.batch.__contains__)
        return self.release((), idle[:lacking])

    def counts(self) -> Counts:
        """The counts of all requests so far."""
        return Counts(*self._sum().tolist())

    def take_counts(self) -> Counts:
        """The counts of all requests since the last call."""
        counts = self._sum()
        new = counts - self._taken
        self._taken = counts
        return Counts(*new.tolist())

    def _sum(self) -> np.ndarray:
        interrupted = [counts for _, counts in self._preempted.values()]
        return sum(interrupted, self._past) + self._counts(slice(None))

    def _counts(self, seats: slice) -> np.ndarray:
        """int64 [10]; the fields of :class:`Counts`, added up over requests in these seats."""
        total = np.empty(len(Counts._fields), np.int64)
        total[0] = self.corrected.numpy()[seats].sum()
        total[1:4] = self.recalls.numpy()[seats].sum(0)
        total[4:] = self._steps.numpy()[seats].sum(0)
        spared = self.spared.numpy()[seats] // self._units_of(seats)
        total[Counts._fields.index("attended")] -= spared.sum()
        return total

    def _take_out(self, seat: int) -> tuple[int, np.ndarray]:
        """The context and the counts of the request in a seat. Resets the counts of the seat."""
        if self.sources is not None:
            self.sources.leave(seat)
        if self.kept is not None:
            self.kept.leave(seat)
        counts = self._counts(slice(seat, seat + 1))
        for count in (self.corrected, self.spared, self.recalls, self._steps):
            count[seat] = 0
        return int(self._context[seat]), counts

    def begin_step(
        self, scheduled: Mapping[str, int], tokens: int, notes: Mapping[str, Note] | None = None
    ) -> None:
        """Begin a step: its requests get seats, unless it is foreseen and they have them.

        Args:
            scheduled: Tokens of each request in the step.
            tokens: Tokens of the step.
            notes: Requests that have got their first blocks, and sessions that got more input.

        Raises:
            RuntimeError: The scheduler runs more requests at once than there are seats.
        """
        self.in_step = True
        notes = notes or {}
        self.arrived = frozenset(notes)
        self.notes |= notes
        for req_id in self.arrived & self._seat_of.keys():  # perhaps with other options
            self._read_options(req_id, self._seat_of[req_id])
        self.foreseen.begin_step(scheduled, tokens, self.arrived)
        if not self.foreseen.now:
            self._book_foreseen()
            self.admit(scheduled)

    def admit(self, req_ids: Iterable[str]) -> None:
        """Give seats to requests that have none; see :meth:`begin_step`."""
        for req_id in req_ids:
            if req_id not in self._seat_of:
                self._take_in(req_id)

    def end_step(self) -> None:
        """End a step, and forget state that only it needed."""
        self.in_step = False
        if self.kept is not None:
            self.kept.end_step()

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Between two steps of the engine: steps in which requests draft for themselves.

        Each begins by :meth:`set_drafting`. Requests select in them that attend to everything in
        the engine's steps. What they read is counted, and their contexts are as before in the end.
        """
        rows, foreseen, arrived, batch = self._rows, self.foreseen, self.arrived, self.batch
        exact, contexts = self.records["exact"].copy(), self._context.copy()
        self._book_foreseen()
        self.foreseen, self.arrived, self.in_step = ForeseenSteps(), frozenset(), True
        self.records["exact"] = False
        try:
            yield
        finally:
            self._rows, self.foreseen, self.arrived, self.in_step = rows, foreseen, arrived, False
            self.batch, self._batch_seats = batch, None
            self.records["exact"], self._context[:] = exact, contexts

    def set_drafting(self, batch: Sequence[str]) -> None:
        """Begin a step of :meth:`drafting`, of requests that have seats."""
        self._rows, self.foreseen = lambda _: batch, ForeseenSteps()
        self.batch, self._batch_seats = batch, None

    def _book_foreseen(self) -> None:
        """Book the foreseen steps that have passed; the next step is none of them."""
        batch, passed = self.foreseen.stop()
        if passed:
            seats = [self._seat_of[req_id] for req_id in batch]
            self._context[seats] += passed
            self._steps[seats, 0] += passed

    def per_seat(self) -> np.ndarray:
        """A new array, int32 [capacity]. An entry is reset to zero when its seat changes hands."""
        entries = np.zeros(self.capacity, dtype=np.int32)
        self._per_seat.append(entries)
        return entries

    def set_batch(self, common: Any) -> None:
        """Take the order of the requests from vLLM's description of the step."""
        self.batch, self._batch_seats = self._rows(common), None

    @property
    def seats(self) -> np.ndarray:
        """int32 [R]; the seats of the batch, in its order."""
        if self._batch_seats is None:
            found = [self._seat_of[req_id] for req_id in self.batch]
            self._batch_seats = np.array(found, dtype=np.int32)
        return self._batch_seats

    def decodes(self, seats: np.ndarray, lens: np.ndarray) -> np.ndarray:
        """bool [n]; whether the last token of each context is one that its request has generated.

        Otherwise it belongs to a prompt, or is computed anew after an interruption.
        """
        return lens > self.ends[seats]

    def whole_tokens(self, seats: np.ndarray) -> np.ndarray:
        """int64 [n]; tokens of the longest contexts that steps attend to in full."""
        records = self.records[seats]
        tokens = records["total"].astype(np.int64) * self.config.page_size
        return np.maximum(tokens, self._below[records["method"]])

    def certain(self, seats: np.ndarray, before: np.ndarray, lens: np.ndarray) -> np.ndarray:
        """int [n]; tokens of contexts with a step, without drafts that it may reject.

        Args:
            seats: The requests' seats.
            before, lens: int [n]; tokens of the contexts before the step, and with it.
        """
        return np.maximum(np.minimum(lens, self.ends[seats]), before + 1)

    def count_steps(
        self,
        seats: np.ndarray,
        lens: np.ndarray,
        pages: np.ndarray,
        sparse: np.ndarray,
        decodes: np.ndarray,
        reads: np.ndarray,
    ) -> None:
        """Book a step: which rows decode, and which of them attend to selected pages only.

        A step is booked once, although several groups of layers may report it. Rows that ``reads``
        names are left to :meth:`count_prefill`.
        """
        known = self._context[seats]
        new = (lens != known) & ~reads
        self._context[seats] = np.where(reads, known, lens)
        attended = self._attended(seats, pages)
        booked = np.stack((decodes, sparse, sparse * pages, sparse * attended), axis=1)
        self._steps.numpy()[seats, :4] += booked * new[:, None]

    def prefill_budgets(self, seats: np.ndarray) -> np.ndarray:
        """Pages of sink, window and selection of chunks of prompts, int32 [3, n]; zeros: all."""
        return self.records["prefill"][seats].T

    def prefill_shares(self, seats: np.ndarray) -> np.ndarray:
        """The least share of the tokens before a chunk that it attends to, float64 [n]."""
        return self.records["prefill_share"][seats]

    def count_prefill(
        self, seats: np.ndarray, lens: np.ndarray, before: np.ndarray, attended: np.ndarray
    ) -> None:
        """Book how much tokens of prompts attend to, once per step, as :meth:`count_steps` does.

        Args:
            seats: The seats of the requests.
            lens: Tokens of the contexts, including those of the step.
            before, attended: See ``prompt`` and ``prompt_attended`` of :class:`Counts`.
        """
        new = lens != self._context[seats]
        self._context[seats] = lens
        booked = np.stack((before, attended), axis=1)
        self._steps.numpy()[seats, 4:] += booked * new[:, None]

    def _attended(self, seats: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Units that a sparse step attends to, in contexts of ``pages`` pages; int64 [rows]."""
        if self.selected is None:
            return self.records["total"][seats].astype(np.int64) * self.retrieval_heads
        attended = self._attended_beside(seats, pages)
        if self.kept is None or not (keeps := self.kept.keeps[seats]).any():
            return attended
        tokens = self.kept.attended(seats, self._context[seats], self.records["method"][seats])
        return np.where(keeps, tokens // self.config.page_size, attended)

    def _attended_beside(self, seats: np.ndarray, pages: np.ndarray) -> np.ndarray:
        assert self.selected is not None
        records, units = self.records[seats], self._units_of(seats)
        always = records["sink"] + records["window"]
        between = (pages - always) * units
        selected = np.minimum(self.selected.numpy()[seats], between[:, None]).sum(1, dtype=np.int64)
        return always.astype(np.int64) * self.retrieval_heads + selected // units

    def _units_of(self, seats: np.ndarray | slice) -> np.ndarray:
        """int64 [n]; units of selection in a page, by the methods of the requests in ``seats``."""
        return self._units[self.records["method"][seats]]

    def _take_in(self, req_id: str) -> None:
        if not self._free:
            raise RuntimeError(
                f"the scheduler runs more requests at once than the {self.capacity} that there is "
                "room for"
            )
        seat = self._free.pop()
        self._seat_of[req_id] = seat
        self._read_options(req_id, seat)
        self._context[seat] = 0
        if req_id in self._preempted:
            _, counts = self._preempted.pop(req_id)
            self.corrected[seat] = counts[0]
            self.recalls.numpy()[seat], self._steps.numpy()[seat] = counts[1:4], counts[4:]

    def _read_options(self, req_id: str, seat: int) -> None:
        """Read the options of a request into its seat, which starts afresh."""
        note = self.notes[req_id]
        options = read_options(req_id, note.extra_args, self._reader)
        self.ends[seat] = note.tokens
        if self.sources is not None:
            self.sources.sit(seat, req_id, options.sources)
        if self.config.memory_fraction is not None and not options.own_budget:
            tokens = self.config.budget_of_share(note.prompt, self.dense_share, options.method)
            options = replace(options, budget=self.config.page_budget(tokens, options.method))
        # What was spared is booked by the unit of the method until now.
        record = self.records[seat]
        self._steps[seat, 3] -= self.spared[seat] // int(self._units[record["method"]])
        self.spared[seat] = 0
        write_options(record, options, self.config)
        for known in self.plain:
            record[known.column] = known.plain
        if self.selected is not None:
            fixed = self.fixed.get(options.method)
            counts = torch.from_numpy(self.room.counts(options.method, options.budget))
            self.selected[seat] = counts if fixed is None else fixed
        if self.kept is not None:
            least = self.kept.admit(
                seat, int(record["method"]), note.tokens, options.budget, options.exact
            )
            record["total"] = options.budget.total if least is None else least
        for entries in self._per_seat:
            entries[seat] = 0
