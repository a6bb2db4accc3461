"""The table of running requests: their seats, options and counts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_kvretrieval.attention.parts import RowOptions
from vllm_kvretrieval.engine.loads import LoadedPages
from vllm_kvretrieval.engine.running import Note, read_options
from vllm_kvretrieval.engine.usage import Counts, log_usage
from vllm_kvretrieval.methods.kept_prompts import LocalHeads, kept_prompts
from vllm_kvretrieval.methods.page_chunks import PromptReads
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.capacity import Capacity


class RequestTable:
    """Gives every running request a seat, a stable index into all per-request state.

    Life of a seat: a request takes a seat when it first appears in a batch, keeps it when the batch
    is reordered or condensed, and gives it back when it ends or is preempted, or to make room for
    others. A resumed request takes a new seat: its first decode step corrects every head, so it
    needs only the counts of its old state. State is never cleared. It is valid only for a request
    that decoded sparsely in the step before; the metadata builder checks this by the length of the
    context at that step, which is forgotten when the seat changes hands.

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
        selected: int32 [capacity, retrieval_heads]; pages or tokens that each KV head, layer after
            layer, selects for the request of a seat, if the context has as many; or tokens that a
            method that drops tokens keeps of a prompt. None: all heads select equally many.
        kept: The prompts of requests whose methods drop tokens; None: no method does.
        corrected: int64 [capacity]; see :class:`Counts`.
        spared: int64 [capacity]; see :attr:`DecodeRows.spared`.
        by_mass: Whether the mass of a request has an effect. Otherwise all KV heads attend to as
            many units as are selected.
        prompt_reads: How KV heads read prompts that retrieve.
        recalls: int64 [capacity, 3]; units looked up, missed and recalled.
        in_step: Whether a step of requests is under way; vLLM's dummy runs are none.
        batch: The requests of the step in batch order, by id.
        notes: What is known of the requests that have not ended, by id.
        ends: int32 [capacity]; see :attr:`Note.tokens`.
        arrived: Requests that got their first blocks in this step, perhaps with contents, and
            sessions that got more input.
        loaded: Pages that a KV connector fills; None: there is no connector.
        calm: Whether the step about to run is a decode step within all budgets, known beforehand.
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
        self.config = config
        self.room, self.fixed = room, fixed or {}
        self.selected: torch.Tensor | None = None
        methods = config.methods.values()
        if room.allotments or self.fixed or any(method.observes for method in methods):
            self.selected = torch.zeros(capacity, retrieval_heads, dtype=torch.int32)
        self.kept = None
        if self.selected is not None and heads is not None:
            self.kept = kept_prompts(config, heads, self.selected, room)
        self.retrieval_heads = retrieval_heads
        self.dense_share = dense_share
        self.capacity = capacity
        self._rows = rows
        self.in_step = False
        self.batch: Sequence[str] = ()
        self.notes: dict[str, Note] = {}
        self.ends = np.zeros(capacity, dtype=np.int32)
        self.corrected = torch.zeros(capacity, dtype=torch.int64)
        self.spared = torch.zeros(capacity, dtype=torch.int64)
        self.by_mass = True
        self.prompt_reads = PromptReads()
        self.recalls = torch.zeros(capacity, 3, dtype=torch.int64)
        self._steps = torch.zeros(capacity, 6, dtype=torch.int64)  # the rest of the counts
        self._past = torch.zeros(len(Counts._fields), dtype=torch.int64)  # of ended requests
        self._taken = torch.zeros_like(self._past)
        # Context and counts of preempted requests.
        self._preempted: dict[str, tuple[int, torch.Tensor]] = {}
        self._seat_of: dict[str, int] = {}
        self._per_seat: list[np.ndarray] = []
        self._free = list(range(capacity))[::-1]
        self._sink = np.zeros(capacity, dtype=np.int32)
        self._window = np.zeros(capacity, dtype=np.int32)
        self._select = np.zeros(capacity, dtype=np.int32)
        self._total = np.zeros(capacity, dtype=np.int32)
        self._threshold = np.zeros(capacity, dtype=np.float32)
        self._mass = np.ones(capacity, dtype=np.float32)
        self._exact = np.zeros(capacity, dtype=bool)
        self._method = np.zeros(capacity, dtype=np.int32)
        self._units = np.ones(capacity, dtype=np.int64)  # of selection, in a page
        self._prefill = np.zeros((3, capacity), dtype=np.int32)
        self._prefill_share = np.zeros(capacity)
        self._methods = {name: number for number, name in enumerate(config.methods)}
        self._context = np.zeros(capacity, dtype=np.int32)
        self.arrived: frozenset[str] = frozenset()
        self.loaded: LoadedPages | None = None
        self.calm = False
        self._calm_batch: set[str] = set()
        self._calm_left = self._calm_passed = 0

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
        self._settle()
        seats = []
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
                self._past += noted[1]
                context, counted = noted
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

    def _sum(self) -> torch.Tensor:
        interrupted = [counts for _, counts in self._preempted.values()]
        return sum(interrupted, self._past) + self._counts(range(self.capacity))

    def _counts(self, seats: Sequence[int]) -> torch.Tensor:
        """int64 [10]; the fields of :class:`Counts`, added up over requests in these seats."""
        index = torch.tensor(seats)
        counts = (self.corrected[:, None], self.recalls, self._steps)
        total = torch.cat([count[index].sum(0) for count in counts])
        spared = self.spared[index] // torch.from_numpy(self._units)[index]
        total[Counts._fields.index("attended")] -= spared.sum()
        return total

    def _take_out(self, seat: int) -> tuple[int, torch.Tensor]:
        """The context and the counts of the request in a seat. Resets the counts of the seat."""
        if self.kept is not None:
            self.kept.leave(seat)
        counts = self._counts([seat])
        for count in (self.corrected, self.spared, self.recalls, self._steps):
            count[seat] = 0
        return int(self._context[seat]), counts

    def begin_step(
        self, scheduled: dict[str, int], tokens: int, notes: Mapping[str, Note] | None = None
    ) -> None:
        """Begin a step, and find out whether it is ``calm``.

        It is if :meth:`expect_calm` has foreseen it.

        Args:
            scheduled: Tokens of each request in the step.
            tokens: Tokens of the step.
            notes: Requests that have got their first blocks, and sessions that got more input.
        """
        self.in_step = True
        notes = notes or {}
        self.arrived = frozenset(notes)
        self.notes |= notes
        for req_id in self.arrived & self._seat_of.keys():  # perhaps with other options
            self._read_options(req_id, self._seat_of[req_id])
        self.calm = (
            self._calm_left > 0
            and not self.arrived
            and tokens == len(scheduled)
            and scheduled.keys() == self._calm_batch
        )
        if self.calm:
            self._calm_left -= 1
            self._calm_passed += 1
        else:
            self._settle()

    def end_step(self) -> None:
        """End a step, and forget state that only it needed."""
        self.in_step = False
        if self.kept is not None:
            self.kept.end_step()

    def expect_calm(self, steps: int) -> None:
        """Note that all rows decode within their budgets in this step and in ``steps`` more."""
        self._calm_batch = set(self.batch)
        self._calm_left = steps

    def _settle(self) -> None:
        """Book the calm steps that have passed. The next step is not calm."""
        if self._calm_passed:
            seats = [self._seat_of[req_id] for req_id in self._calm_batch]
            self._context[seats] += self._calm_passed
            self._steps[seats, 0] += self._calm_passed
        self._calm_left = self._calm_passed = 0

    def per_seat(self) -> np.ndarray:
        """A new array, int32 [capacity]. An entry is reset to zero when its seat changes hands."""
        entries = np.zeros(self.capacity, dtype=np.int32)
        self._per_seat.append(entries)
        return entries

    def look(self, common: Any) -> None:
        """Look who is in the batch that is about to run; before :meth:`seats`.

        Args:
            common: vLLM's description of the step.
        """
        self.batch = self._rows(common)

    def seats(self, count: int) -> np.ndarray:
        """The seats of the first ``count`` rows of the batch, int32 [count]."""
        seat_of = self._seat_of
        found = [seat_of[r] if r in seat_of else self._admit(r) for r in self.batch[:count]]
        return np.array(found, dtype=np.int32)

    def select(self, seats: np.ndarray) -> RowOptions:
        """The options of the requests in ``seats``."""
        return RowOptions(
            self._sink[seats],
            self._window[seats],
            self._select[seats],
            self._total[seats],
            self._threshold[seats],
            self._mass[seats],
            self._exact[seats],
            self._method[seats],
        )

    def decodes(self, seats: np.ndarray, lens: np.ndarray) -> np.ndarray:
        """bool [n]; whether the last token of each context is one that its request has generated.

        Otherwise it belongs to a prompt, or is computed anew after an interruption.
        """
        return lens > self.ends[seats]

    def count_steps(
        self,
        seats: np.ndarray,
        lens: np.ndarray,
        pages: np.ndarray,
        sparse: np.ndarray,
        decodes: np.ndarray,
    ) -> None:
        """Book a step: which rows decode, and which of them attend to selected pages only.

        A step is booked once, although several groups of layers may report it.
        """
        new = lens != self._context[seats]
        self._context[seats] = lens
        attended = self._attended(seats, pages)
        booked = np.stack((decodes, sparse, sparse * pages, sparse * attended), axis=1)
        self._steps.numpy()[seats, :4] += booked * new[:, None]

    def prefill_budgets(self, seats: np.ndarray) -> np.ndarray:
        """Pages of sink, window and selection of chunks of prompts, int32 [3, n]; zeros: all."""
        return self._prefill[:, seats]

    def prefill_shares(self, seats: np.ndarray) -> np.ndarray:
        """The least share of the tokens before a chunk that it attends to, float64 [n]."""
        return self._prefill_share[seats]

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
            return self._total[seats].astype(np.int64) * self.retrieval_heads
        attended = self._attended_beside(seats, pages)
        if self.kept is None or not (keeps := self.kept.keeps[seats]).any():
            return attended
        tokens = self.kept.attended(seats, self._context[seats], self._method[seats])
        return np.where(keeps, tokens // self.config.page_size, attended)

    def _attended_beside(self, seats: np.ndarray, pages: np.ndarray) -> np.ndarray:
        assert self.selected is not None
        always, units = self._sink[seats] + self._window[seats], self._units[seats]
        between = (pages - always) * units
        selected = np.minimum(self.selected.numpy()[seats], between[:, None]).sum(1, dtype=np.int64)
        return always.astype(np.int64) * self.retrieval_heads + selected // units

    def _admit(self, req_id: str) -> int:
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
            self.recalls[seat], self._steps[seat] = counts[1:].split((3, 6))
        return seat

    def _read_options(self, req_id: str, seat: int) -> None:
        """Read the options of a request into its seat, which starts afresh."""
        note = self.notes[req_id]
        options = read_options(req_id, note.extra_args, self.config)
        self.ends[seat] = note.tokens
        budget = options.budget
        if self.config.memory_fraction is not None and not options.own_budget:
            tokens = self.config.budget_of_share(note.prompt, self.dense_share, options.method)
            budget = self.config.page_budget(tokens, options.method)
        self._sink[seat], self._window[seat] = budget.sink, budget.window
        self._select[seat], self._total[seat] = budget.select, budget.total
        self._threshold[seat], self._exact[seat] = options.correction_threshold, options.exact
        self._mass[seat] = options.mass if self.by_mass else 1
        self._method[seat] = self._methods[options.method]
        method = self.config.methods[options.method]
        # What was spared is booked by the unit of the method until now.
        self._steps[seat, 3] -= self.spared[seat] // int(self._units[seat])
        self.spared[seat] = 0
        self._units[seat] = self.config.page_size if method.per_token else 1
        if self.selected is not None:
            fixed = self.fixed.get(options.method)
            counts = torch.from_numpy(self.room.counts(options.method, budget))
            self.selected[seat] = counts if fixed is None else fixed
        if self.kept is not None:
            number = self._methods[options.method]
            least = self.kept.admit(seat, number, note.tokens, budget, options.exact)
            self._total[seat] = budget.total if least is None else least
        self._prefill[:, seat] = options.prefill_budget or 0
        self._prefill_share[seat] = options.prefill_share
        for entries in self._per_seat:
            entries[seat] = 0
