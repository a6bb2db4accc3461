"""Threads of a store."""

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.limits import remedy


def started(count: int, name: str, first: Callable[[], None] = lambda: None) -> ThreadPoolExecutor:
    """Threads that all run: one that cannot be started later would end the engine.

    Args:
        count: How many.
        name: What their names begin with.
        first: What each of them does first; must not fail.

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
