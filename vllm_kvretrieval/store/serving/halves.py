"""The parts that both halves of a store share: orders of a step, lasting errors, threads."""

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.logger import init_logger

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.system_limits import remedy

logger = init_logger("vllm.kvretrieval.store")

FIELD = "kv_retrieval_store"
"""Attribute of vLLM's ``SchedulerOutput`` with a :class:`StoreStep`; missing without a store."""


@dataclass
class StoreStep:
    """The orders of a step about vLLM's blocks, by their numbers.

    Attributes:
        void: Stored blocks that this step overwrites, or that are to be forgotten.
        erase: Blocks that no request of this step or a later one relies on, and whose contents
            nobody may find any more.
        load: Blocks of an earlier run that a request of this step shares for the first time.
        commit: Blocks that are full after this step, with their records, whose sums are missing.
    """

    void: list[int] = field(default_factory=list)
    erase: list[int] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    commit: list[tuple[int, Record]] = field(default_factory=list)


class Fault:
    """Logs the first of several errors in a row, and that there are no more.

    Args:
        what: The failure, as a clause.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lasts = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Log an error of the block that follows, which ends there."""
        try:
            yield
        except (OSError, RetrievalConfigError) as error:
            if not self._lasts:
                logger.error("store: %s (%s).", self._what, error)
            self._lasts = True
        else:
            if self._lasts:
                logger.info("store: this is over: %s.", self._what)
            self._lasts = False


def started(count: int, name: str, first: Callable[[], None] = lambda: None) -> ThreadPoolExecutor:
    """Threads that all run: one that cannot be started later would end the engine.

    Args:
        count: How many.
        name: The start of their names.
        first: Called by each of them first; must not fail.

    Raises:
        RetrievalConfigError: The process may not have so many.
    """
    threads = ThreadPoolExecutor(count, name, initializer=first)
    together = threading.Barrier(count)  # a thread that is idle would be given the next task, too
    try:
        for waits in [threads.submit(together.wait) for _ in range(count)]:
            waits.result()
    except RuntimeError as error:
        together.abort()
        threads.shutdown()
        raise RetrievalConfigError(
            f"kv_retrieval.store: its threads cannot be started ({error}). {remedy(errno.EAGAIN)}."
        ) from error
    return threads
