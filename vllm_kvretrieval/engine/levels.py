"""Levels: how exact the keys and values in vLLM's blocks are.

Keys and values at a position are exact if every layer attended to the whole context before the
position, and if that context is exact, too. So a context is exact up to some position, and no
further. A level says how the rest was computed, and so which requests may share its blocks.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions

NEVER = sys.maxsize
"""A position beyond every context."""


class Level(IntEnum):
    """How the keys and values of a block were computed. A larger level is worse."""

    EXACT = 0
    DECODED = 1
    """A decode step attended to a part of the context, or to keys and values of this level."""
    PREFILLED = 2
    """A chunk of a prompt attended to a part of the context, or to keys and values of this
    level."""


UNKNOWN = Level.PREFILLED


class Block(Protocol):
    """One of vLLM's blocks (``KVCacheBlock``)."""

    block_id: int

    @property
    def block_hash(self) -> bytes | None: ...
    @property
    def is_null(self) -> bool: ...


class Taint(NamedTuple):
    """The end of the exact part of a context, and how bad the rest is.

    Attributes:
        position: The first position that is not exact; ``NEVER`` if all positions are exact.
        level: The worst level from this position on.
    """

    position: int = NEVER
    level: Level = Level.EXACT

    def level_of(self, end: int) -> Level:
        """The level of a block whose last position is before ``end``."""
        return self.level if end > self.position else Level.EXACT

    def plus(self, other: "Taint") -> "Taint":
        """The taint of a context that has both taints."""
        return Taint(min(self.position, other.position), max(self.level, other.level))


class BlockLevels:
    """The levels of the blocks in the prefix cache.

    A note is valid as long as the block has the hash that it had when the note was made. So nothing
    has to be done when vLLM recycles a block or takes it out of the cache.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[bytes | None, Level]] = {}

    def note(self, block: Block, level: Level) -> None:
        """Note the level of the contents of a hashed block, which this step may still write."""
        self._notes[block.block_id] = block.block_hash, level

    def copy(self, source: int, target: int) -> None:
        """Note that the block ``target`` gets the contents of the block ``source`` (ids)."""
        if (note := self._notes.get(source)) is not None:
            self._notes[target] = note

    def of(self, block: Block) -> Level:
        """The level of a block. The null block, which is never read, counts as exact."""
        if block.is_null:
            return Level.EXACT
        noted, level = self._notes.get(block.block_id, (None, UNKNOWN))
        return level if noted is not None and noted == block.block_hash else UNKNOWN

    def clear(self) -> None:
        """Forget everything."""
        self._notes.clear()

    def look(
        self, groups: Iterable[tuple[Sequence[Block], int]], tolerance: Level
    ) -> tuple[int, Taint]:
        """Find out how many tokens of a prefix may be shared, and how exact they are.

        Args:
            groups: For each group of layers, the blocks of the prefix in order, and the tokens per
                block.
            tolerance: The worst level that may be shared.

        Returns:
            The tokens before the first block of any group that is worse than ``tolerance``
            (``NEVER`` if there is no such block), and the taint of the blocks before it.
        """
        notes, shared, first, worst = self._notes, NEVER, NEVER, Level.EXACT
        for blocks, size in groups:
            for place, block in enumerate(blocks):
                note = notes.get(block.block_id)
                if note is not None and note[0] == block.block_hash:
                    level = note[1]
                    if not level:
                        continue
                elif block.is_null:
                    continue
                else:
                    level = UNKNOWN
                if level > tolerance:
                    shared = min(shared, place * size)
                    break
                first, worst = min(first, place * size), max(worst, level)
        return shared, Taint(first, worst)


EXACT = Taint()


@dataclass(frozen=True)
class Exactness:
    """What follows from the options of a request for how exact its context is.

    Attributes:
        tolerance: The worst level of the blocks that the request may share.
        reads_cache: Whether the request may share blocks. It may not if its method rates tokens by
            all queries of the prompt, since all of them have to be computed then.
        decodes_exactly: Tokens of the longest context that a decode step attends to as a whole.
        prefills_exactly: Tokens at the start of a prompt that attend to all tokens before them.
    """

    tolerance: Level
    reads_cache: bool
    decodes_exactly: int
    prefills_exactly: int

    @classmethod
    def of(cls, options: RequestOptions, config: RetrievalConfig) -> "Exactness":
        """The exactness of a request with ``options`` on an engine with ``config``.

        It is the worst case where only the worker knows more: if the budget is a share of the
        prompt, or if the method drops tokens.
        """
        sparse = options.prefill_budget is not None
        tolerance = Level.PREFILLED if sparse else Level.DECODED
        if options.wants_exact_prefix(config):
            tolerance = Level.EXACT
        return cls(
            tolerance,
            not options.observes_all(config),
            NEVER if options.exact else options.certain_budget(config),
            config.exact_prefill if sparse else NEVER,
        )

    def taint(self, start: int, tokens: int, decodes: bool) -> Taint:
        """The taint that a step gives to a context.

        Args:
            start: Tokens that were computed before the step.
            tokens: Tokens of the step.
            decodes: Whether the step computes a single token behind the prompt.
        """
        if decodes:
            return Taint(start, Level.DECODED) if start >= self.decodes_exactly else EXACT
        if start + tokens > self.prefills_exactly:
            return Taint(max(start, self.prefills_exactly), Level.PREFILLED)
        return EXACT
