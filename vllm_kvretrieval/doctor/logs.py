"""Silence of what logs while something is tried."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let loggers say nothing that is less than an error."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def errors_of(name: str) -> Iterator[list[BaseException]]:
    """Keep a logger from printing errors that were raised; yields a list that they are put into."""
    raised: list[BaseException] = []

    def take(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        raised.extend([] if error is None else [error])
        return error is None

    logger = logging.getLogger(name)
    logger.addFilter(take)
    try:
        yield raised
    finally:
        logger.removeFilter(take)
