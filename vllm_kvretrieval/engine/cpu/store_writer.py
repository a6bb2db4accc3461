"""Blocks on their way into a store: a thread writes them, sums them, and records them."""

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future

from vllm.logger import init_logger

from vllm_kvretrieval.engine.store_threads import started
from vllm_kvretrieval.store.records import Record
from vllm_kvretrieval.store.store import Store

logger = init_logger("vllm.kvretrieval.store")

PATIENCE = 3
"""Blocks that cannot be stored, one after the other, before no more are tried."""


class BlockWriter:
    """Stores complete blocks while the engine goes on.

    Copying and hashing a block takes milliseconds, and lets other threads run meanwhile. A complete
    block does not change any more; one that is about to be overwritten has to be given up before.

    Args:
        store: Where blocks are stored; open for writing.
        cores: Logical CPUs that the thread may run on. vLLM binds the thread that computes to one
            of them, which a new thread would share.

    Attributes:
        written: How many blocks have been stored.

    Raises:
        RetrievalConfigError: The process may not have the thread.
    """

    def __init__(self, store: Store, cores: Collection[int]) -> None:
        self._store = store

        def spread() -> None:
            with contextlib.suppress(OSError):  # it is slower then
                os.sched_setaffinity(0, cores)

        self._thread = started(1, "store-write", spread)
        self._waiting: dict[int, Future[None]] = {}
        self._failures = 0
        self.written = 0

    def write(self, block: int, record: Record, side: Sequence[memoryview]) -> None:
        """Store a block.

        Args:
            block: The block's number; its pages are complete in home.
            record: The block's record, whose sum is missing.
            side: What it has outside of home, in bytes.
        """
        if self._failures < PATIENCE:
            self._waiting[block] = self._thread.submit(self._write, block, record, side)

    def give_up(self, blocks: Iterable[int]) -> None:
        """Store none of these blocks, or have stored them before this returns."""
        for block in blocks:
            if block in self._waiting and self._waiting[block].cancel():
                del self._waiting[block]
            elif block in self._waiting:
                self._end(block)

    def look(self) -> None:
        """Take the results of blocks that have been stored, or could not be."""
        for block in [block for block, write in self._waiting.items() if write.done()]:
            self._end(block)

    def close(self) -> None:
        """Wait until all blocks are stored."""
        self._thread.shutdown()
        self.look()

    def _write(self, block: int, record: Record, side: Sequence[memoryview]) -> None:
        self._store.write_side(block, side)
        self._store.commit(block, record)

    def _end(self, block: int) -> None:
        """Wait for a block, and take its result."""
        try:
            self._waiting.pop(block).result()
            self._failures, self.written = 0, self.written + 1
        except Exception as error:
            self._failures += 1
            more = "" if self._failures < PATIENCE else " No more are stored until the next start."
            logger.error("store: a block cannot be stored (%s).%s", error, more)
