"""Blocks that requests have asked to keep for a time when they have ended."""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm.logger import init_logger

from vllm_kvretrieval.store.serving.blocks import Blocks

logger = init_logger("vllm.kvretrieval.scheduler")

RETAINED_SHARE = 0.25
"""Share of the blocks that may be kept for requests that have ended at most."""


@dataclass
class Hold:
    """Blocks that are kept for a session, or for a request without one.

    Attributes:
        blocks: Their numbers, in the order of the context.
        ends: When they may be evicted again, by the monotonic clock.
    """

    blocks: list[int]
    ends: float


class RetainedBlocks:
    """Blocks that vLLM does not evict, each until a time of its own.

    Args:
        blocks: vLLM's.
        pinned: The share of the blocks that pins may hold beside.
    """

    def __init__(self, blocks: Blocks, pinned: float) -> None:
        self._blocks, self._pinned = blocks, pinned
        self._holds: dict[str, Hold] = {}
        self._next = math.inf  # when the first of them ends

    def hold(self, owner: str, wanted: Sequence[int], seconds: float) -> None:
        """Keep blocks, as far as there is room; in place of those that the owner has kept before.

        Args:
            owner: The session, or the request.
            wanted: Numbers of blocks in the prefix cache, in the order of the context.
            seconds: For how long; 0: not at all.
        """
        before = self._holds.pop(owner, None)
        if seconds and wanted:
            held = (block for hold in self._holds.values() for block in hold.blocks)
            both = dict.fromkeys([*held, *wanted])
            room = {*self._blocks.first(both, RETAINED_SHARE, self._pinned)}
            kept = [block for block in wanted if block in room]
            if len(kept) < len(wanted):
                logger.info(
                    "%d of %d blocks of %s are retained; requests need the others.",
                    len(kept),
                    len(wanted),
                    owner,
                )
            self._blocks.touch(self._blocks[block] for block in kept)
            self._holds[owner] = Hold(kept, time.monotonic() + seconds)
        if before is not None:
            self._free(before.blocks)
        self._look()

    def tend(self) -> None:
        """Let go of blocks whose time is over; quick if there are none."""
        if (now := time.monotonic()) < self._next:
            return
        for owner in [owner for owner, hold in self._holds.items() if hold.ends <= now]:
            self._free(self._holds.pop(owner).blocks)
        self._look()

    def forget(self, blocks: Collection[int]) -> None:
        """Let go of blocks that are to be forgotten."""
        gone = {*blocks}
        for hold in self._holds.values():
            self._free([block for block in hold.blocks if block in gone])
            hold.blocks = [block for block in hold.blocks if block not in gone]

    def clear(self) -> None:
        """Let go of all blocks, so that vLLM can empty its cache."""
        for hold in self._holds.values():
            self._free(hold.blocks)
        self._holds.clear()
        self._look()

    def _free(self, numbers: Sequence[int]) -> None:
        """Let go of blocks of a context: the last ones are evicted first."""
        self._blocks.free([self._blocks[number] for number in reversed(numbers)])

    def _look(self) -> None:
        self._next = min((hold.ends for hold in self._holds.values()), default=math.inf)
