"""Errors of a store's disk that come again and again, without a log that does."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.logger import init_logger

from vllm_kvretrieval.errors import RetrievalConfigError

logger = init_logger("vllm.kvretrieval.store")


class Fault:
    """Logs the first of several errors in a row, and that there are no more.

    Args:
        what: What fails, as a clause.
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
