"""The age at which a store forgets blocks, by a clock that may jump."""

import time
from collections.abc import Container, Mapping

from vllm.logger import init_logger

from vllm_kvretrieval.store.records import Record

logger = init_logger("vllm.kvretrieval.store")

PERIOD_S = 60.0
"""Seconds between two looks; on a clock that never jumps."""
DAY_S = 86400
TOLERATED_S = 3600
"""How far blocks may be from the future: clocks are set now and then."""


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
