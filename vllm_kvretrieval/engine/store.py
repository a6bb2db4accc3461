"""The scheduler's half of a store: which blocks it has, which are to be stored, who may share them.

Blocks of an earlier run stand in vLLM's prefix cache from the start on, in their old order of use.
Before a request shares one for the first time, its contents are read and compared with its sum.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import Request

from vllm_kvretrieval.engine.allotments import allotted_blocks
from vllm_kvretrieval.engine.levels import BlockLevels, Level
from vllm_kvretrieval.engine.store_steps import FIELD, StoreStep
from vllm_kvretrieval.store.contexts import NO_PARENT, pinned_blocks, reachable, read_pins
from vllm_kvretrieval.store.files import Folder
from vllm_kvretrieval.store.records import Record
from vllm_kvretrieval.store.store import LOCK, open_store, release, take_locks

logger = init_logger("vllm.kvretrieval.store")

CHECKERS = 2
"""Threads that compare blocks with their sums; hashing lets others run."""
PINNED_SHARE = 0.5
"""Share of the blocks that may be pinned at most: requests need the others."""
PATIENCE_S = 10.0
"""How long a command that looks at the store may keep the server waiting."""


class StoredBlocks:
    """Blocks of a store in vLLM's block pool.

    Args:
        directory: The directory of all stores.
        name: Of the store's own directory; the worker has opened it before.
        pool: vLLM's block pool, not yet used by any request.
        levels: Gets the levels of the blocks that are restored.

    Raises:
        RetrievalConfigError: Another process uses the store, or it is damaged.
    """

    def __init__(self, directory: str, name: str, pool: Any, levels: BlockLevels) -> None:
        self._pool, self._levels = pool, levels
        with closing(Folder.at(directory)) as root, closing(root.folder(name)) as folder:
            self._locks = take_locks(folder, [LOCK], PATIENCE_S)
        self._store = open_store(directory, name, write=True)
        self._next_use = int(self._store.used.max(initial=0)) + 1
        self._stored: set[int] = set()  # blocks that have a record, or will
        self._unchecked: dict[int, Record] = {}
        self._absent: set[int] = set()  # what they have outside of home is not in memory yet
        self._pinned: list[Any] = []
        self._checkers = ThreadPoolExecutor(CHECKERS, thread_name_prefix="store-check")
        self._checks: dict[int, Future[bool]] = {}
        self._waiting: set[str] = set()
        self._step = StoreStep()
        self._restore()

    def _restore(self) -> None:
        """Put the blocks of earlier runs into the prefix cache."""
        start = time.perf_counter()
        records = reachable(self._store.records())
        records.pop(self._pool.null_block.block_id, None)
        order = sorted(records, key=lambda block: (self._store.used[block], -records[block].number))
        blocks = [self._pool.blocks[number] for number in order]
        self._pool.touch(blocks)
        for block in blocks:
            record = records[block.block_id]
            key = make_block_hash_with_group_id(record.key, 0)
            tokens = (record.number + 1) * self._pool.hash_block_size
            block.set_block_hash(key, num_tokens=tokens)
            self._pool.cached_block_hash_to_block.insert(key, block)
            self._levels.note(block, Level(record.level))
        pinned = self._pins(records)
        self._pinned = [block for block in blocks if block.block_id in pinned]
        self._pool.free_blocks(block for block in blocks if block.block_id not in pinned)
        self._stored, self._absent, self._unchecked = set(records), set(records), records
        size = self._pool.hash_block_size
        logger.info(
            "store: %d tokens of earlier runs are in the prefix cache (%d pinned), after %.3f s.",
            len(blocks) * size,
            len(self._pinned) * size,
            time.perf_counter() - start,
        )

    def _pins(self, records: dict[int, Record]) -> set[int]:
        """Blocks that are never evicted; the first ones, if more are pinned than may be."""
        pinned = pinned_blocks(read_pins(self._store.folder), records)
        most = int(PINNED_SHARE * len(self._pool.blocks))
        if len(pinned) > most:
            logger.warning(
                "store: %d of %d pinned blocks are kept; requests need the others.",
                most,
                len(pinned),
            )
        return set(pinned[:most])

    def ready(self, request: Request) -> bool:
        """Whether every block that a request could share may be shared.

        If not, they are being checked, and the request has to ask again.
        """
        self._waiting.discard(request.request_id)
        self._take_checks()
        if not self._unchecked:
            return True
        wanted = list[int]()
        for key in request.block_hashes:
            found = self._pool.cached_block_hash_to_block.get_one_block(
                make_block_hash_with_group_id(key, 0)
            )
            if found is None:
                break
            if found.block_id in self._unchecked:
                wanted.append(found.block_id)
        for number in wanted:
            if number not in self._checks:
                record = self._unchecked[number]
                self._checks[number] = self._checkers.submit(self._store.intact, number, record)
        if wanted:
            self._waiting.add(request.request_id)
        return not wanted

    def waits(self, request: Request) -> bool:
        """Whether a request, when it asked last, had to wait for a check."""
        return request.request_id in self._waiting

    def _take_checks(self) -> None:
        """Take the results of checks that have ended; what is damaged leaves the prefix cache."""
        damaged = list[int]()
        for number in [number for number, check in self._checks.items() if check.done()]:
            intact = self._checks.pop(number).result()
            if self._unchecked.pop(number, None) is not None and not intact:
                damaged.append(number)
        if damaged:
            logger.warning(
                "store: %d blocks are damaged and will be computed anew (%s).",
                len(damaged),
                ", ".join(map(str, damaged[:20])),
            )
            self._pool.evict_blocks(set(damaged))
            self._forget(damaged)

    def _forget(self, blocks: Iterable[int]) -> None:
        """Void the records of blocks with the next step."""
        for number in blocks:
            if number in self._stored:
                self._stored.discard(number)
                self._step.void.append(number)
            self._absent.discard(number)
            self._unchecked.pop(number, None)

    def begin_step(self, scheduler_output: Any) -> None:
        """Follow a step that has been scheduled, before any of its blocks is offered."""
        shared, new = allotted_blocks(scheduler_output, self._pool.hash_block_size)
        if self._absent:
            self._step.load += (found := self._absent.intersection(shared))
            self._absent -= found
        if overwritten := self._stored.intersection(new):
            self._forget(overwritten)
            late = self._step.commit
            self._step.commit = [entry for entry in late if entry[0] not in overwritten]

    def offer(self, request: Request, first: int, blocks: Sequence[Any]) -> None:
        """Store blocks when the next step has run.

        Args:
            request: Whose context they are of; it has computed them, or does so in this step.
            first: How many blocks of the context are before them.
            blocks: vLLM's; full ones.
        """
        if request.lora_request is not None or request.mm_features:
            return  # hashes have them by names that clients choose
        keys, now = request.block_hashes, int(time.time())
        for number, block in enumerate(blocks, first):
            if block.block_hash is None:
                continue
            parent = keys[number - 1] if number else NO_PARENT
            record = Record(keys[number], parent, number, self._levels.of(block), now)
            self._stored.add(block.block_id)
            self._step.commit.append((block.block_id, record))

    def end_step(self, scheduler_output: Any) -> None:
        """Add to a step what becomes of the store's blocks."""
        setattr(scheduler_output, FIELD, self._step)
        self._step = StoreStep()

    def finish(self, request: Request, blocks: Sequence[int]) -> None:
        """Note that a request lets go of its blocks, the last one first.

        Args:
            request: It has ended, or was aborted.
            blocks: Their numbers, in the order of the context.
        """
        self._waiting.discard(request.request_id)
        end = self._next_use + len(blocks)
        self._store.used[list(reversed(blocks))] = np.arange(self._next_use, end)
        self._next_use = end

    def unpin(self) -> None:
        """Let go of the blocks that are never evicted, so that vLLM can empty its cache."""
        self._pool.free_blocks(self._pinned)

    def pin(self) -> None:
        """Hold them again, if it could not."""
        self._pool.touch(self._pinned)

    def clear(self) -> None:
        """Forget everything: vLLM has emptied its prefix cache."""
        self._pinned = []
        self._store.void(self._stored)
        # Also what workers have yet to write, and what they have not been told of.
        self._step = StoreStep(void=[*self._stored])
        for blocks in (self._stored, self._absent, self._unchecked):
            blocks.clear()

    def close(self) -> None:
        """Close the store; others may use it then. The workers have ended before."""
        self._checkers.shutdown(cancel_futures=True)
        self._store.void(self._step.void)
        self._store.close()
        release(self._locks)
