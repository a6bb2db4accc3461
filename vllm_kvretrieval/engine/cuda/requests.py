"""The running requests as the retrieval layers on a GPU see them."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

from vllm_kvretrieval.engine.cuda.heads import RetrievalHeads
from vllm_kvretrieval.engine.loads import LoadedPages
from vllm_kvretrieval.engine.running import Note, logger, read_options, write_options
from vllm_kvretrieval.engine.usage import Counts, log_usage
from vllm_kvretrieval.kernels.device import COLUMNS, Column, DeviceRequests
from vllm_kvretrieval.methods import Step
from vllm_kvretrieval.methods.kept_prompts import NEVER, KeptPrompts, Watch, kept_prompts
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions, RequestReader
from vllm_kvretrieval.retrieval.seats import SEAT

COLUMNS_OF_SEATS = {
    Column.SINK: "sink",
    Column.WINDOW: "window",
    Column.SELECT: "select",
    Column.CHOOSER: "method",
    Column.EXACT: "exact",
    Column.THRESHOLD: "threshold",
    Column.MASS: "mass",
}
"""The columns of the table on the device that have what is in a seat."""


SPARE_BYTES = 5 << 23
"""Keys and values of a layer that a GPU reads in the time that selection takes before attention,
some 16 us on an H100. A guess."""


def exact_below(config: RetrievalConfig, token_bytes: int, rows: int) -> int:
    """Tokens below which a context is attended to in full, since that takes no longer.

    All rows of a step together may read as much beyond their budgets as selection is worth; nothing
    where tokens are kept of prompts, which have been selected.

    Args:
        config: Options of the engine.
        token_bytes: Bytes of keys and values of a token in a layer of this worker.
        rows: Rows of the step that decode.
    """
    if config.exact_below is not None:
        return config.exact_below
    if config.keeps_tokens:
        return 0
    return config.budget + SPARE_BYTES // (token_bytes * max(rows, 1))


@dataclass
class Usage:
    """The usage of a request so far, its time before interruptions included.

    Attributes:
        context: Tokens of its context.
        counts: ``steps``, ``sparse_steps``, ``pages``, ``attended`` of :class:`Counts`.
        corrected: KV heads that selected anew, as far as the device has reported.
        unread: Seats whose report is still to come.
    """

    context: int = 0
    counts: np.ndarray = field(default_factory=lambda: np.zeros(4, dtype=np.int64))
    corrected: int = 0
    unread: int = 0


@dataclass(frozen=True)
class Batch:
    """The requests of a step in batch order, as far as the host knows them; ``n`` rows.

    Attributes:
        seats: int64 [n].
        lens: int32 [n]; the most tokens that may be in the context, those of the step included, but
            for drafts.
        before: int32 [n]; the most before the step.
        prefilling: bool [n]; whether the row's tokens belong to a prompt.
        decodes: bool [n]; whether they do not: the row has one token, and perhaps drafts.
    """

    seats: np.ndarray
    lens: np.ndarray
    before: np.ndarray
    prefilling: np.ndarray
    decodes: np.ndarray

    @classmethod
    def of(cls, batch: Any) -> "Batch":
        """The requests of vLLM's ``InputBatch``, which may have rows of padding at its end."""
        prefilling, tokens = batch.is_prefilling_np, batch.num_scheduled_tokens
        before = batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs] - tokens
        lens = before + np.where(prefilling, tokens, 1)
        return cls(batch.idx_mapping_np, lens, before, prefilling, ~prefilling)


class Attended(Enum):
    """What the rows of a step attend to: each to its whole context, each to a selection of it, or
    some to the one and some to the other."""

    WHOLE = "whole contexts"
    SELECTIONS = "selections"
    BOTH = "both"


NOBODY = Batch(*(np.zeros(0, dtype=kind) for kind in (np.int64, np.int32, np.int32, bool, bool)))
"""The batch of steps without requests: vLLM's dummy runs, and captures of graphs."""
NOTHING_LOADED = np.zeros(0, dtype=np.int32)


@dataclass
class _Reading:
    """A count on its way from the device."""

    seat: int
    value: torch.Tensor
    arrived: Any
    usage: Usage


class RunningRequests:
    """Options and counts of the running requests, by vLLM's numbers of them.

    Life of a seat: vLLM's runner numbers a request when it is added, and keeps the number until the
    request finishes, is aborted or is preempted. When a request takes a seat, its options are
    written there, in the order of the stream, and the note of the seat's last step is erased, so no
    other state has to be cleared. A resumed request is added anew, and continues its counts.

    Args:
        config: Options of the engine.
        capacity: Most requests that run at once.
        heads: KV heads of the layers that retrieve.
        token_bytes: Bytes of keys and values of a token in a retrieval layer.
        far: Whether the cache of these layers is in host memory.
        drafts: The most draft tokens of a request in a step.
        device: Where the layers are.

    Attributes:
        encoded: Whether full pages of these layers are encoded.
        room: How many units requests get of these heads.
        retrieval_heads: How many these are.
        kept: The prompts of requests whose methods keep some of their tokens; None: no method does.
        corrected: int64 [capacity], on the device; KV heads that selected anew, by seat.
        spared: int64 [capacity], on the device; selected pages that KV heads did not need.
        counts: int64; ``steps``, ``sparse_steps``, ``pages``, ``attended`` of :class:`Counts`, all
            requests so far added up.
        loaded: Pages that a KV connector fills; None: there is no connector.
        loaded_pages: int32 [n]; those of them that requests have brought into the step.
        batch: The step that the runner is at; :data:`NOBODY` between steps.
        assumed: What rows are taken to attend to, whatever they do: so that all kernels are
            compiled, and while graphs are captured.
    """

    def __init__(
        self,
        config: RetrievalConfig,
        capacity: int,
        heads: RetrievalHeads,
        token_bytes: int,
        device: torch.device,
        *,
        far: bool,
        drafts: int,
    ) -> None:
        self.config, self.capacity, self.device = config, capacity, device
        self._token_bytes, self._far, self.drafts = token_bytes, far, drafts
        self.encoded = far and config.encoding is not None
        self._reader, self._heads = RequestReader(config), heads
        self.room, self.retrieval_heads = heads.room, heads.room.heads
        if config.memory_fraction is not None:
            config.budget_of_share(0, heads.dense_share, config.method)  # refuses what cannot be
        self._selected: np.ndarray | None = None
        self._counts: StagedWriteTensor | None = None
        self._most: StagedWriteTensor | None = None
        self.kept: KeptPrompts | None = None
        self._unread = set[int]()
        self._ends = StagedWriteTensor(capacity, dtype=torch.int32, device=device)
        if self.room.allotments or heads.fixed or config.keeps_tokens:
            shape = capacity, self.retrieval_heads
            self._selected = np.zeros(shape, dtype=np.int32)
            self._counts = StagedWriteTensor(shape, dtype=torch.int32, device=device)
        if config.keeps_tokens:
            assert self._selected is not None
            assert self._counts is not None
            self._most = StagedWriteTensor(shape, dtype=torch.int32, device=device)
            selected = torch.from_numpy(self._selected)
            places = self.room, device, (self._counts.gpu, self._most.gpu)
            self.kept = kept_prompts(config, heads.local, selected, *places)
        # Units of selection in a page, by the number of the method.
        units = [config.page_size if m.per_token else 1 for m in config.methods.values()]
        self._units = np.array(units, dtype=np.int64)
        self.corrected, self.spared = torch.zeros(2, capacity, dtype=torch.int64, device=device)
        self.counts = np.zeros(4, dtype=np.int64)
        self.batch = NOBODY
        self.loaded: LoadedPages | None = None
        self.loaded_pages = NOTHING_LOADED
        self.assumed: Attended | None = None
        self._records = np.zeros(capacity, dtype=SEAT)
        self._came = np.zeros(capacity, dtype=bool)  # since the last step
        self._own = np.zeros(capacity, dtype=np.int32)  # the first page that a request writes
        self._tables: list[StagedWriteTensor] = []
        self._usage: list[Usage | None] = [None] * capacity
        self._seat_of: dict[str, int] = {}
        self._interrupted: dict[str, Usage] = {}
        self._finished: deque[tuple[str, Usage]] = deque()
        self._readings: deque[_Reading] = deque()
        self._read = np.zeros(capacity, dtype=np.int64)

    def device_table(self) -> DeviceRequests:
        """The requests on the device: one table per group of layers, which notes its steps."""
        shape = self.capacity, COLUMNS
        table = StagedWriteTensor(shape, dtype=torch.int32, device=self.device)
        self._tables.append(table)
        return DeviceRequests(table.gpu, self.corrected, self.spared)

    def counts_of(self, name: str) -> torch.Tensor | None:
        """int32 [capacity, kv_heads], on the device; the units that each KV head of a layer selects
        for the request of a seat. None: all heads select equally many."""
        return None if self._counts is None else self._counts.gpu[:, self._heads.places[name]]

    @property
    def ends(self) -> torch.Tensor | None:
        """int32 [capacity], on the device; tokens of the prompts of which some are kept; None: no
        method keeps tokens."""
        return None if self.kept is None else self._ends.gpu

    def heads_of(self, name: str) -> slice:
        """The places of a layer's KV heads among all of the worker."""
        return self._heads.places[name]

    def number_of(self, name: str) -> int:
        """The place of a layer among the worker's retrieval layers."""
        return [*self._heads.places].index(name)

    def admit(self, req_id: str, seat: int, note: Note) -> None:
        """Give a request its seat, and stage its options."""
        record = self._records[seat]
        options = read_options(req_id, note.extra_args, self._reader)
        if self.config.memory_fraction is not None and not options.own_budget:
            share = self._heads.dense_share
            tokens = self.config.budget_of_share(note.prompt, share, options.method)
            options = replace(options, budget=self.config.page_budget(tokens, options.method))
        write_options(record, options, self.config)
        if self._counts is not None:
            assert self._selected is not None
            fixed = self._heads.fixed.get(options.method)
            counts = self.room.counts(options.method, options.budget) if fixed is None else fixed
            self._selected[seat] = counts
            self._keep(seat, note, options)
            self._counts.stage_write(seat, 0, self._selected[seat].tolist())
        row = np.zeros(COLUMNS, dtype=np.int32)
        for column, name in COLUMNS_OF_SEATS.items():
            number = record[name]
            row[column] = number.view(np.int32) if number.dtype == np.float32 else number
        for table in self._tables:
            table.stage_write(seat, 0, row.tolist())
        self._seat_of[req_id], self._came[seat] = seat, True
        self._usage[seat] = self._interrupted.pop(req_id, None) or Usage()

    def _keep(self, seat: int, note: Note, options: RequestOptions) -> None:
        """Note what the request's method keeps of its prompt, if it is one that keeps tokens."""
        if self.kept is None:
            return
        assert self._most is not None
        assert self._selected is not None
        record = self._records[seat]
        method, end = int(record["method"]), note.tokens
        self._unread.discard(seat)
        self.kept.admit(seat, method, note.tokens, options.budget, options.exact)
        if self.kept.keeps[seat]:
            self._unread.add(seat)
            if self.kept.methods[method].budget_shares.entropy is None:
                self.kept.settle(seat, method)
            self._most.stage_write(seat, 0, self.kept.budgets[seat].tolist())
            if self.kept.methods[method].drops:  # from its first step on
                for name in ("total", "sink", "window", "select"):
                    record[name] = 0
        elif method in self.kept.methods and not options.exact:  # a prompt that fits
            if self._far:  # all of the context is listed, and held in slots
                end, self._selected[seat], record["total"] = 0, 0, NEVER
            else:
                record["exact"] = True
        self._ends.stage_write_elem(seat, end)

    def apply(self) -> None:
        """Write the staged options to the device, before the step that needs them."""
        self._ends.apply_write()
        for table in self._tables:
            table.apply_write()
        for staged in (self._counts, self._most):
            if staged is not None:
                staged.apply_write()

    def leave(self, req_id: str) -> None:
        """Take back the seat of a request that has finished or is interrupted, if it has one."""
        seat = self._seat_of.pop(req_id, None)
        if seat is None:
            return
        if self.kept is not None:
            self.kept.leave(seat)
            self._unread.discard(seat)
        usage, self._usage[seat] = self._usage[seat], None
        assert usage is not None
        self._interrupted[req_id] = usage
        if logger.isEnabledFor(logging.DEBUG):  # only the log asks, at the cost of a copy
            self._readings.append(self._ask(seat, usage))

    def finish(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have left; their usage is logged when it is known."""
        for req_id in req_ids:
            if (usage := self._interrupted.pop(req_id, None)) is not None:
                self._finished.append((req_id, usage))
        self._report()

    @property
    def least(self) -> int:
        """Tokens of the shortest contexts that are selected from in this step.

        Those in host memory are, all of them, since attention in full reads them too slowly.
        """
        if self._far:
            return 0
        return exact_below(self.config, self._token_bytes, int(self.batch.decodes.sum()))

    def begin_step(self, batch: Batch) -> None:
        """Note a step's requests and count the step."""
        self.batch = batch
        came = self._came[batch.seats]
        self._own[batch.seats[came]] = batch.before[came] // self.config.page_size
        sparse, pages = self._sparse(batch), self._pages(batch.lens)
        attended = self._attended(batch, pages)
        booked = np.stack((batch.decodes, sparse, sparse * pages, sparse * attended), axis=1)
        self.counts += booked.sum(0, dtype=np.int64)
        lists = batch.seats.tolist(), batch.lens.tolist(), booked
        for seat, context, counts in zip(*lists, strict=True):
            usage = self._usage[seat]
            assert usage is not None, "running requests have seats"
            usage.context = context
            usage.counts += counts

    def counted(self) -> dict[str, int]:
        """What the host has counted so far, by the names of metrics."""
        _, sparse_steps, pages, attended = self.counts.tolist()
        return {
            "units_attended": attended,
            "units_in_context": pages * self.retrieval_heads,
            "tokens_read": attended * self.config.page_size,
            "heads_decoded": sparse_steps * self.retrieval_heads,
        }

    def end_step(self) -> None:
        """End a step: work before the next :meth:`begin_step` belongs to no request."""
        if self.kept is not None:
            read = self.batch.lens >= self.kept.ends[self.batch.seats]
            for seat in self._unread & {*self.batch.seats[read].tolist()}:
                self._unread.discard(seat)
                self.kept.forget(seat)
        self.batch = NOBODY
        self._came[:] = False
        self.loaded_pages = NOTHING_LOADED

    def note_loads(self, filled: Sequence[int]) -> None:
        """Note the blocks that a KV connector fills in a step, or later; before its requests are
        added. With a connector a block is a page."""
        if self.loaded is not None:
            self.loaded.begin_step(filled)

    def bring(self, blocks: Iterable[int]) -> None:
        """Find out which blocks of requests that are added no index knows."""
        if self.loaded is not None:
            brought = np.unique(np.fromiter(blocks, dtype=np.int32))
            self.loaded_pages = brought[self.loaded.among(brought)]

    @property
    def watches_prompts(self) -> bool:
        """Whether prompts are being read whose queries may decide what is kept of them."""
        return bool(self._unread)

    def watches(self, starts: np.ndarray, block_table: torch.Tensor) -> list[Watch]:
        """The queries of the step that decide which tokens of their prompts are kept.

        Args:
            starts: int32 [rows + 1]; the first token of each row in the step.
            block_table: int32 [rows, >= pages], on the device; page ids in context order.
        """
        if self.kept is None or not self._unread:
            return []
        batch = self.batch
        step = Step(batch.seats, batch.lens, batch.before, starts, block_table)
        return self.kept.watches(step, self._records["method"][batch.seats])

    def attended(self) -> Attended:
        """What the rows of the step attend to, as the device will find out. With a home in host
        memory contexts within their budgets are selected as a whole; in others rows with drafts may
        attend to both, since contexts are shorter than the host knows if drafts were rejected."""
        if self.assumed is not None:
            return self.assumed
        listed = self._listed(self.batch)
        if not listed.any():
            return Attended.WHOLE
        known = self._far or not self.drafts
        return Attended.SELECTIONS if known and listed.all() else Attended.BOTH

    def staged(self, tokens: np.ndarray) -> np.ndarray:
        """bool [rows]; which rows of the step, those of padding included, attend to copies of their
        contexts on the device: those with several tokens of a prompt. Where pages are encoded, all
        are that attend to whole contexts. Steps without requests have some where there are more
        tokens than with all drafts.

        Args:
            tokens: int [rows]; tokens of each row.
        """
        batch = self.batch
        if batch is NOBODY:
            return tokens > 1 + self.drafts
        several = tokens > 1
        several[: len(batch.decodes)] &= ~batch.decodes
        if self.encoded:
            several[: len(batch.decodes)] |= ~self._listed(batch)
        return several

    def seats(self, rows: int) -> np.ndarray:
        """int64 [rows]; the seats of the step's rows; -1: the row is padding."""
        found = np.full(rows, -1, dtype=np.int64)
        found[: len(self.batch.seats)] = self.batch.seats
        return found

    def opened(self) -> np.ndarray:
        """int32 [capacity]; the page from which on the request of a seat reads its own pages as the
        model made them, in this step; see ``EncodedUnits.first``."""
        found, batch = self._own.copy(), self.batch
        kept = batch.before // self.config.page_size - self.config.open_pages
        found[batch.seats] = np.maximum(found[batch.seats], kept)
        return found

    def reads_whole(self, seats: np.ndarray, prefilling: np.ndarray) -> bool:
        """Whether any row of a step attends to a whole context that is encoded. No graph brings
        that to the device.

        Args:
            seats: int [rows].
            prefilling: bool [rows]; whether their tokens belong to prompts.
        """
        return self.encoded and bool((prefilling | self._exact(seats)).any())

    @property
    def needs_eager(self) -> bool:
        """The same of the step that the runner is at."""
        return self.reads_whole(self.batch.seats, self.batch.prefilling)

    def may_read_written(self) -> bool:
        """Whether a row of the step may read what another row writes in the same step.

        vLLM takes blocks for cached when it schedules the step that fills them. A request that
        comes in this step may have such blocks in its prefix; later it gets none from others.
        """
        batch = self.batch
        found = self._came[batch.seats] & (batch.before > 0)
        return len(batch.seats) > 1 and bool(found.any())

    def _sparse(self, batch: Batch) -> np.ndarray:
        """bool [n]; which rows attend to a part of their contexts, as ``prepare_rows`` decides."""
        beyond = self._pages(batch.lens) > self._budgets(batch.seats)
        beyond &= batch.lens >= self.least
        return batch.decodes & ~self._exact(batch.seats) & beyond

    def _listed(self, batch: Batch) -> np.ndarray:
        """bool [n]; which rows get a list of pages."""
        if self._far:
            return batch.decodes & ~self._exact(batch.seats)
        return self._sparse(batch)

    def _exact(self, seats: np.ndarray) -> np.ndarray:
        """bool [n]; which requests attend to their whole contexts because they ask for it."""
        return self._records["exact"][seats]

    def _attended(self, batch: Batch, pages: np.ndarray) -> np.ndarray:
        """int64 [n]; units that a sparse step attends to, in contexts of ``pages`` pages."""
        seats = batch.seats
        if self._selected is None:
            return self._budgets(seats) * self.retrieval_heads
        if self.kept is None or not (keeps := self.kept.keeps[seats]).any():
            return self._attended_beside(seats, pages)
        tokens = self.kept.attended(seats, batch.lens, self._records["method"][seats])
        beside = self._attended_beside(seats, pages)
        return np.where(keeps, tokens // self.config.page_size, beside)

    def _attended_beside(self, seats: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """The same of requests whose methods keep no tokens."""
        assert self._selected is not None
        records = self._records[seats]
        units = self._units[records["method"]]
        always = (records["sink"] + records["window"]).astype(np.int64)
        between = (pages - always) * units
        selected = np.minimum(self._selected[seats], between[:, None]).sum(1, dtype=np.int64)
        return always * self.retrieval_heads + selected // units

    def _budgets(self, seats: np.ndarray) -> np.ndarray:
        """int64 [n]; pages."""
        return self._records["total"][seats].astype(np.int64)

    def _pages(self, lens: np.ndarray) -> np.ndarray:
        return -(-lens // self.config.page_size)

    def _ask(self, seat: int, usage: Usage) -> _Reading:
        """Ask the device how often the seat's KV heads have selected anew, without waiting."""
        value = torch.empty(1, dtype=torch.int64, pin_memory=self.corrected.is_cuda)
        value.copy_(self.corrected[seat : seat + 1], non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        usage.unread += 1
        return _Reading(seat, value, arrived, usage)

    def _report(self) -> None:
        """Log the usage of requests whose reports are complete."""
        while self._readings and self._readings[0].arrived.query():
            reading = self._readings.popleft()
            value, seat = int(reading.value), reading.seat
            reading.usage.corrected += value - int(self._read[seat])
            reading.usage.unread -= 1
            self._read[seat] = value
        while self._finished and not self._finished[0][1].unread:
            req_id, usage = self._finished.popleft()
            steps, sparse_steps, pages, attended = usage.counts.tolist()
            counts = Counts(
                corrected=usage.corrected,
                steps=steps,
                sparse_steps=sparse_steps,
                pages=pages,
                attended=attended,
            )
            log_usage(req_id, usage.context, counts, self.retrieval_heads)
