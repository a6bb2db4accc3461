"""Blocks whose contents nobody may find any more, until they are erased."""

from collections.abc import Container, Iterable
from typing import Any


class Leftovers:
    """Contents of blocks that have no record: of what was dropped, and of what was never stored.

    A context seldom ends with a block, and what is dropped may be in use by running requests. When
    no request has such a block any more, workers erase it before their next step; a later request
    may have it again, but in a later step.

    Args:
        pool: vLLM's block pool.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
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
            block = self._pool.blocks[number]
            if block.block_hash is not None or number in stored:
                self._blocks.discard(number)
            elif not running or not block.ref_cnt:
                self._blocks.discard(number)
                taken.append(number)
        return taken
