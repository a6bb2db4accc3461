"""The scheduler's half of a store: which blocks it has, which are to be stored, their levels.

Blocks of an earlier run stand in vLLM's prefix cache from the start on, in their old order of use.
Before a request shares one for the first time, its contents are read and compared with its sum.
"""

import contextlib
import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.request import Request

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.exactness_levels import BlockLevels
from vllm_kvretrieval.storage.lost import allotted_blocks
from vllm_kvretrieval.store.disk.changes import note, note_reset, note_session
from vllm_kvretrieval.store.disk.contexts import (
    NO_PARENT,
    PINNED_SHARE,
    beside,
    forgotten,
    id_of,
    reachable,
)
from vllm_kvretrieval.store.disk.groups import Group, pinned
from vllm_kvretrieval.store.disk.groups import groups_of as stored_groups
from vllm_kvretrieval.store.disk.inbox import DROP, RETRY_S, Change, Inbox
from vllm_kvretrieval.store.disk.names import read_kept, read_names, read_pins, sessions
from vllm_kvretrieval.store.disk.ranks import open_ranks
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.store.disk.store import LOCK, release
from vllm_kvretrieval.store.serving.blocks import Blocks
from vllm_kvretrieval.store.serving.groups import groups_of, numbers_of
from vllm_kvretrieval.store.serving.halves import FIELD, Fault, StoreStep, started
from vllm_kvretrieval.store.serving.levels import StoredLevels

logger = init_logger("vllm.kvretrieval.store")

CHECKERS = 2
"""Threads that compare blocks with their sums; hashing lets others run."""
PATIENCE_S = 10.0
"""How long a command that looks at the store may keep the server waiting."""
AHEAD_BYTES = 32 << 20
"""What is read ahead in a step at most, which takes longer by it."""
PERIOD_S = 60.0
"""Seconds between two looks; on a clock that never jumps."""
DAY_S = 86400
TOLERATED_S = 3600
"""How far blocks may be from the future: clocks are set now and then."""


class Arrivals:
    """Numbers of the requests that have not ended, from 1 on.

    Attributes:
        last: The number of the request that has arrived last; 0: none has.
    """

    def __init__(self) -> None:
        self.last = 0
        self._numbers: dict[str, int] = {}

    @property
    def first(self) -> int:
        """The number of the first request that has not ended, or of the next one."""
        return min(self._numbers.values(), default=self.last + 1)

    def note(self, request_id: str) -> None:
        """Number a request that has just arrived."""
        self.last += 1
        self._numbers[request_id] = self.last

    def of(self, request_id: str) -> int:
        """The number of a request; of a session, that of its first input."""
        return self._numbers[request_id]

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._numbers.pop(request_id, None)


class Holds(Protocol):
    """What keeps blocks from being evicted, beside running requests and pins."""

    def forget(self, blocks: Collection[int]) -> None:
        """Let go of blocks that are to be forgotten."""


class Expiry:
    """Finds blocks that have become too old.

    Args:
        days: The age; None: they never do.
    """

    def __init__(self, days: float | None) -> None:
        self._seconds = None if days is None else days * DAY_S
        self._next = 0.0
        self._warned = False

    def look(self, records: Mapping[int, Record], kept: Container[int]) -> list[int]:
        """Blocks that are too old; none if the last look was not long ago.

        A clock that was set back lets blocks live longer, and a warning says so. One that was set
        forward lets them be computed anew.

        Args:
            records: Records of the stored blocks, by their numbers.
            kept: Blocks that stay, however old.
        """
        if self._seconds is None or time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + PERIOD_S
        now = time.time()
        ahead = max((record.created for record in records.values()), default=0) - now
        if ahead > TOLERATED_S and not self._warned:
            self._warned = True
            logger.warning(
                "store: blocks were stored %d s from now, so the clock has been set back; they "
                "will be forgotten so much later.",
                ahead,
            )
        end = now - self._seconds
        return [
            block for block, record in records.items() if record.created < end and block not in kept
        ]


class Leftovers:
    """Contents of blocks that have no record: of what was dropped, and of what was never stored.

    A context seldom ends with a block, and what is dropped may be in use by running requests. When
    no request has such a block any more, workers erase it before their next step; a later request
    may have it again, but in a later step.

    Args:
        blocks: vLLM's.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._known = blocks
        self._blocks = set[int]()

    def add(self, blocks: Iterable[int]) -> None:
        """Note blocks that are about to be written, or that have lost their records."""
        self._blocks.update(blocks)

    def take(self, stored: Container[int], running: bool = True) -> list[int]:
        """The blocks that can be erased before the step that has just been scheduled.

        Args:
            stored: Blocks that have a record, or will have one.
            running: Whether requests may run; otherwise none has any block.
        """
        taken = []
        for number in [*self._blocks]:
            block = self._known[number]
            if block.block_hash is not None or number in stored:
                self._blocks.discard(number)
            elif not running or not block.ref_cnt:
                self._blocks.discard(number)
                taken.append(number)
        return taken


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Meanwhile Python looks for no garbage: many objects are made then, which all stay.

    They would have it look through all objects of the engine, which takes longer than making them.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class SchedulerStore:
    """Blocks of a store in vLLM's block pools.

    Args:
        directory: The directory of all stores.
        name: What the names of the workers' own directories begin with; they have opened them.
        blocks: vLLM's, not yet used by any request.
        levels: Gets the levels of the blocks that are restored.
        arrivals: The order in which requests arrive.
        days: Age at which blocks are forgotten; None: they never are.
        specs: vLLM's, of its groups of layers, if there are several.
        retained: What else keeps blocks, and has to let go of what is forgotten; None: nothing.

    Raises:
        RetrievalConfigError: Another process uses the store, or it is damaged, or of other groups.
    """

    def __init__(
        self,
        directory: str,
        name: str,
        blocks: Blocks,
        levels: BlockLevels,
        arrivals: Arrivals,
        days: float | None = None,
        specs: Sequence[Any] = (),
        retained: Holds | None = None,
    ) -> None:
        self._blocks, self._levels, self._retained = blocks, levels, retained
        self._arrivals = arrivals
        self._expiry = Expiry(days)
        self._store = open_ranks(directory, name, write=True)
        self._numbers, self._groups = [0], [Group(self._blocks.hash_size)]
        if specs:
            self._numbers, self._groups = numbers_of(specs), groups_of(specs)
        self._sizes = [spec.block_size for spec in specs] or [self._blocks.hash_size]
        if specs and self._groups != stored_groups(self._store.identity):
            raise RetrievalConfigError(
                f"store: {name} was made for other groups of layers "
                f"({stored_groups(self._store.identity)}) than vLLM's scheduler has "
                f"({self._groups}); leave the store out, and tell us of the model."
            )
        self._locks = self._store.take_locks([LOCK], PATIENCE_S)
        self._next_use = int(self._store.used.max(initial=0)) + 1
        self._order_fault = Fault("the order in which blocks were used cannot be written")
        self._void_fault = Fault("what is forgotten stays on the disk")
        self._kept_fault = Fault("names and pins cannot be read")
        self._session_fault = Fault("what sessions pin is not kept")
        self._inbox = Inbox(self._store.folder)
        self._leftovers = Leftovers(self._blocks)
        self._counts = Counter[str]()
        self.numbers = StoredLevels(
            self._store.folder, lambda: {record.level for record in self._stored.values()}
        )
        self._stored: dict[int, Record] = {}  # of blocks that have one, or will
        self._restored: set[int] = set()  # those of earlier runs
        self._unchecked: dict[int, Record] = {}
        self._absent: set[int] = set()  # what they have outside of home is not in memory yet
        self._pinned: dict[int, Any] = {}  # vLLM's blocks by their numbers
        self._kept = set[bytes]()  # keys of contexts with names and pins, when last read
        self._unpinned = set[bytes]()  # keys that pinned contexts lack
        self._look_at = math.inf  # when to look for them again, by the monotonic clock
        self._dropped: dict[bytes, int] = {}  # keys, and the last arrival before
        self._ahead: list[int] = []  # what is read ahead, in the order of contexts
        self._hits: dict[str, list[int]] = {}  # what requests would share, when last looked up
        self._checkers = started(CHECKERS, "store-check")
        self._checks: dict[int, Future[bool]] = {}
        self._step = StoreStep()
        self._read_kept()
        with without_collection():
            self._restore()

    def _restore(self) -> None:
        """Put the blocks of earlier runs into the prefix cache."""
        start = time.perf_counter()
        found = self._store.records()
        found.pop(self._blocks.null, None)
        whole = reachable(found)
        records = whole | beside(found, whole)
        order = sorted(records, key=lambda block: (self._store.used[block], -records[block].number))
        blocks = [self._blocks[number] for number in order]
        self._blocks.touch(blocks)
        for block in blocks:
            record = records[block.block_id]
            key = self._hash_of(record)
            tokens = (record.number + 1) * self._groups[record.group].size
            self._blocks.cache(block, key, tokens)
            self._levels.note(block, self.numbers.level(record.level))
        # Also copies of what others have, and what lies behind a gap: to be forgotten with them.
        self._stored = found
        self._restored, self._absent, self._unchecked = set(records), set(records), records
        self._pin(records)
        self._blocks.free(blocks)
        tokens = len(whole) * self._groups[0].size
        self._counts["store_tokens_restored"] = tokens
        logger.info(
            "store: %d tokens of earlier runs are in the prefix cache (%d pinned), after %.3f s.",
            tokens,
            len(self._pinned.keys() & whole) * self._groups[0].size,
            time.perf_counter() - start,
        )

    def _hash_of(self, record: Record) -> bytes:
        """The hash by which vLLM finds a block with this record."""
        return make_block_hash_with_group_id(BlockHash(record.key), self._numbers[record.group])

    def _pin(self, records: Mapping[int, Record], level: int = logging.WARNING) -> None:
        """Hold the blocks of the contexts that are pinned, and no others.

        Where there are too many, those of sessions give way, of which the oldest first.

        Args:
            records: Records of blocks that may be in the prefix cache.
            level: How the log is told of it.
        """
        self._look_at = time.monotonic() + RETRY_S  # if reading fails
        latest = list[bytes]()
        with self._kept_fault.noted():
            names = read_names(self._store.folder)
            latest = [names[name] for name in sessions(names)]
        pins = read_pins(self._store.folder)
        ordered = [*sorted(pins.difference(latest)), *(key for key in latest if key in pins)]
        self._look_at = math.inf
        self._unpinned = set()
        if not ordered and not self._pinned:
            return
        cached = {number: records[number] for number in records if self._cached(number)}
        wanted, self._unpinned = pinned(ordered, cached, self._groups)
        kept = self._blocks.first(wanted, PINNED_SHARE)
        if len(wanted) > len(kept):
            logger.log(
                level,
                "store: %d of %d pinned blocks are kept; requests need the others.",
                len(kept),
                len(wanted),
            )
        before = self._pinned
        self._pinned = {number: self._blocks[number] for number in kept}
        self._blocks.touch(self._pinned.values())
        self._blocks.free(before.values())

    def tend(self) -> None:
        """Forget what has become too old, or is found damaged, and do what users have asked for.

        Called before each look-up of a prefix, so that no request finds any of it.
        """
        if old := self._expiry.look(self._stored, self._pinned):
            self._counts["store_blocks_expired"] += len(old)
            self._drop(old)
        try:
            self._inbox.follow(self._follow)
            if time.monotonic() >= self._look_at:
                self._pin(self._stored)
        except (OSError, RetrievalConfigError) as error:
            logger.error("store: a change has failed, and will be tried again (%s).", error)
        self._take_checks()

    def _follow(self, change: Change) -> None:
        """Pin, unpin or drop a context as another process has asked.

        Raises:
            OSError, RetrievalConfigError: A pin or unpin has failed and is tried again; a drop is
                not, since the document may have been read again by then.
        """
        dropped = set[bytes]()
        if change.action == DROP:
            gone = forgotten(change.key, self._stored, self._read_kept())
            dropped = {self._stored[block].owner for block in gone}
            first, last = self._arrivals.first, self._arrivals.last
            self._dropped = {key: at for key, at in self._dropped.items() if at >= first}
            self._dropped |= dict.fromkeys(dropped | {change.key}, last)
            self._drop(gone)
        try:
            note(self._store.folder, change, dropped)
            self._pin(self._stored)
        except (OSError, RetrievalConfigError) as error:
            if change.action != DROP:
                raise
            logger.error("store: names and pins of what is dropped stay (%s).", error)
        logger.info("store: %s %s, as asked for.", change.action, id_of(change.key))

    def pin_session(self, name: str, request: Request, blocks: Sequence[Any]) -> None:
        """Pin what is stored of a request's context, in place of what the session had pinned.

        Nothing is done if nothing is stored, or if the context has been dropped meanwhile.

        Args:
            name: What the session is called in the store.
            request: It has ended, and still has its blocks.
            blocks: vLLM's, of the store's first group of layers.
        """
        stored = [n for n, block in enumerate(blocks) if block.block_id in self._stored]
        if not stored:
            return
        record = self._stored[blocks[stored[-1]].block_id]
        following = _key(request, self._end(0, record.number + 1))
        if self._dropped.get(following, 0) < self._arrivals.of(request.request_id):
            self._keep_session(name, record.key)

    def unpin_session(self, name: str) -> None:
        """Forget a session, and let what it has pinned be evicted."""
        self._keep_session(name, None)

    def _keep_session(self, name: str, key: bytes | None) -> None:
        with self._session_fault.noted():
            note_session(self._store.folder, name, key)
            self._pin(self._stored, logging.DEBUG)

    def read_ahead(self, name: str) -> None:
        """Check what a session has pinned, and read it into memory with the steps that follow.

        Args:
            name: What the session is called in the store; one that has pinned nothing is ignored.
        """
        if not self._unchecked and not self._absent:
            return
        with self._kept_fault.noted():
            if (key := read_names(self._store.folder).get(name)) is None:
                return
            records = {n: self._stored[n] for n in self._pinned if n in self._stored}
            blocks, _ = pinned({key}, records, self._groups)
            for number in blocks:
                if number in self._unchecked:
                    self._check(number)
            self._ahead += [number for number in blocks if number not in self._ahead]

    def _next_ahead(self) -> list[int]:
        """The next blocks to be read ahead, which have been checked; not too many for a step."""
        self._take_checks()
        wanted = [n for n in self._ahead if n in self._absent and n in self._stored]
        ready = [number for number in wanted if number not in self._unchecked]
        ready = ready[: max(AHEAD_BYTES // self._store.block_bytes, 1)]
        self._absent.difference_update(ready)
        self._ahead = [number for number in wanted if number in self._absent]
        self._counts["store_blocks_read_ahead"] += len(ready)
        return ready

    def _read_kept(self) -> set[bytes]:
        """Keys of the contexts with names and pins; if they cannot be read, those of before."""
        with self._kept_fault.noted():
            self._kept = read_kept(self._store.folder)
        return self._kept

    def _drop(self, blocks: Collection[int]) -> None:
        """Take blocks out of the prefix cache, and forget them, whatever happens to the server."""
        self._blocks.evict(blocks)
        held = [block for block in blocks if block in self._pinned]
        self._unpinned |= {self._stored[block].owner for block in held}
        self._blocks.free([self._pinned.pop(block) for block in held])
        if self._retained is not None:
            self._retained.forget(blocks)
        self._forget(blocks)
        self._leftovers.add(blocks)
        if blocks:
            with self._void_fault.noted():  # the worker tries it, too
                self._store.void(blocks)

    def note_hit(self, request: Request, by_group: Iterable[Sequence[Any]]) -> None:
        """Note what a request would share.

        Args:
            request: The request, whose prefix has just been looked up.
            by_group: The blocks that were found, by group of layers.
        """
        if self._unchecked:
            blocks = (block.block_id for blocks in by_group for block in blocks)
            self._hits[request.request_id] = [*self._unchecked.keys() & blocks]

    def waits(self, request: Request) -> bool:
        """Whether a request has to wait, since blocks that it is about to share are being checked.

        Args:
            request: The request, whose prefix has just been looked up.
        """
        waits = False
        for number in self._hits.pop(request.request_id, ()):
            if number in self._unchecked:
                waits = True
                self._check(number)
        return waits

    def _check(self, number: int) -> None:
        """Have a block compared with its sum, unless that is being done."""
        if number not in self._checks:
            record = self._unchecked[number]
            self._checks[number] = self._checkers.submit(self._store.intact, number, record)

    def _take_checks(self) -> None:
        """Take the results of checks that have ended; what is damaged leaves the prefix cache."""
        damaged = list[int]()
        for number in [number for number, check in self._checks.items() if check.done()]:
            check = self._checks.pop(number)
            intact = check.exception() is None and check.result()
            self._counts["store_bytes_checked"] += self._store.block_bytes
            if self._unchecked.pop(number, None) is not None and not intact:
                damaged.append(number)
        if damaged:
            logger.warning(
                "store: %d blocks are damaged and will be computed anew (%s).",
                len(damaged),
                ", ".join(map(str, damaged[:20])),
            )
            self._counts["store_blocks_damaged"] += len(damaged)
            self._drop(damaged)

    def _forget(self, blocks: Collection[int]) -> None:
        """Void the records of blocks with the next step, those that are yet to be written, too."""
        for number in blocks:
            if self._stored.pop(number, None) is not None:
                self._step.void.append(number)
            self._restored.discard(number)
            self._unchecked.pop(number, None)
        late = self._step.commit
        self._step.commit = [entry for entry in late if entry[0] not in blocks]

    def begin_step(self, scheduler_output: Any) -> None:
        """Follow a step that has been scheduled, before any of its blocks is offered."""
        by_group = allotted_blocks(scheduler_output, dict(enumerate(self._sizes)))
        of_first = by_group[self._numbers[0]][0]
        shared, new = set[int](), set[int]()
        for computed, written in by_group:
            shared.update(computed)
            new.update(written)
        for source, target in scheduler_output.kv_cache_block_copies or ():
            # The source is read; it may be written to further, or have left the prefix cache.
            shared.add(source)
            shared.discard(target)
            new.add(target)
            if source in self._stored and not self._cached(source):
                self._forget([source])
        shared.discard(self._blocks.null)
        new.discard(self._blocks.null)
        if self._absent:
            # Also of blocks that have just been forgotten: a request may share them already.
            self._step.load += (found := self._absent.intersection(shared))
            self._absent.difference_update(found, new)
        if self._ahead:
            self._step.load += self._next_ahead()
        hits = sum(block in self._restored for block in of_first)
        self._counts["store_tokens_hit"] += hits * self._groups[0].size
        if overwritten := self._stored.keys() & new:
            self._counts["store_blocks_evicted"] += len(overwritten)
            self._forget(overwritten)
        self._leftovers.add(new)
        self._step.erase += self._leftovers.take(self._stored)

    def offer(
        self, request: Request, number: int, first: int, blocks: Sequence[Any], arrived: int
    ) -> None:
        """Store blocks when the next step has run, but for those of a context that was dropped.

        Args:
            request: The request that has computed the blocks, or computes them in this step.
            number: vLLM's number of the group of layers; that of the store's first group comes
                before the others.
            first: How many blocks of the context are before them.
            blocks: vLLM's; full ones.
            arrived: The request's number in the order of arrivals. Contexts that were dropped
                later are not stored for it, nor what goes on behind them.
        """
        if request.lora_request is not None or request.mm_features:
            return  # hashes have them by names that clients choose
        group, now = self._numbers.index(number), int(time.time())
        for place, block in enumerate(blocks, first):
            if block.block_hash is None:
                continue
            key = _key(request, self._end(group, place))
            if group:
                parent = _key(request, self._end_of_owner(group, place))
            else:
                parent = _key(request, self._end(0, place - 1)) if place else NO_PARENT
            record = Record(key, parent, place, 0, now, group=group)
            # A part of a block may be in the prefix cache, too, by the hash of its last token.
            if not parent or block.block_hash != self._hash_of(record):
                continue
            known = (parent,) if group else (key, parent)
            dropped = max(self._dropped.get(one, 0) for one in known)
            if arrived <= dropped:
                self._dropped[record.owner] = dropped
                self._blocks.evict([block.block_id])
                self._leftovers.add([block.block_id])
                continue
            if record.owner in self._unpinned:
                self._look_at = 0.0
            record = record._replace(level=self.numbers.number(self._levels.of(block)))
            self._stored[block.block_id] = record
            self._step.commit.append((block.block_id, record))
            if group:  # a running request may let go of it at any time
                self._note_use([block.block_id])

    def _end(self, group: int, number: int) -> int:
        """How many hashes a request has up to the end of a group's block."""
        return (number + 1) * self._groups[group].size // self._blocks.hash_size

    def _end_of_owner(self, group: int, number: int) -> int:
        """The same for the first group's block in which it ends."""
        size = self._groups[0].size
        return self._end(0, -(-(number + 1) * self._groups[group].size // size) - 1)

    def _cached(self, number: int) -> bool:
        """Whether the prefix cache has a stored block by its hash."""
        return bool(self._blocks[number].block_hash == self._hash_of(self._stored[number]))

    def end_step(self, scheduler_output: Any) -> None:
        """Add to a step what becomes of the store's blocks."""
        setattr(scheduler_output, FIELD, self._step)
        self._step = StoreStep()

    def finish(self, request: Request, by_group: Iterable[Sequence[int]]) -> None:
        """Note that a request lets go of its blocks, the last one of each group first.

        Args:
            request: It has ended, or was aborted.
            by_group: The blocks' numbers, in the order of the context, by group of layers.
        """
        null = self._blocks.null
        self._note_use([b for blocks in by_group for b in reversed(blocks) if b != null])

    def _note_use(self, blocks: Sequence[int]) -> None:
        """Note that blocks are let go of, in this order."""
        if blocks:
            with self._order_fault.noted():
                self._store.note_use(blocks, self._next_use)
            self._next_use += len(blocks)

    def unpin(self) -> None:
        """Let go of the blocks that are never evicted, so that vLLM can empty its cache."""
        self._blocks.free(self._pinned.values())

    def pin(self) -> None:
        """Hold them again, if it could not."""
        self._blocks.touch(self._pinned.values())

    def clear(self) -> None:
        """Forget everything: vLLM has emptied its prefix cache.

        Raises:
            OSError: The disk still has what is forgotten, until the next step has voided it.
        """
        stored = [*self._stored]
        # Also what workers have yet to write, and what they have not been told of.
        self._step = StoreStep(void=stored)
        self._leftovers.add(stored)
        for known in (self._stored, self._restored, self._absent, self._unchecked):
            known.clear()
        self._pinned = {}
        self._unpinned.clear()
        self._store.void(stored)
        note_reset(self._store.folder)

    def take_counts(self) -> dict[str, int]:
        """What ``COUNTERS`` of the connector count of the scheduler's half since the last call."""
        counts, self._counts = +self._counts, Counter()
        return counts

    def close(self) -> None:
        """Close the store; others may use it then. The workers have ended before."""
        self._checkers.shutdown(cancel_futures=True)
        self._store.void(self._step.void)
        with self._void_fault.noted():
            self._store.erase(self._leftovers.take(self._stored, running=False))
        self._store.close()
        release(self._locks)


def _key(request: Request, end: int) -> bytes:
    """A request's hash that ends there; empty if its tokens are not known so far."""
    keys = request.block_hashes
    return bytes(keys[end - 1]) if end <= len(keys) else b""
