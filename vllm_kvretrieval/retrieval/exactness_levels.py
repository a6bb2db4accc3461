"""Levels: how exact the keys and values in vLLM's blocks are.

Keys and values at a position are exact if every layer attended to the whole context before the
position, and if that context is exact, too. So a context is exact up to some position, and no
further. A level says how the rest was computed, and so which requests may share its blocks: those
that would not compute them more exactly themselves. The order of levels is a partial one, and
stands here alone.
"""

import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

NEVER = sys.maxsize
"""A position beyond every context."""


class Kind(IntEnum):
    """What was not exact when the keys and values of a block were computed; a store has this."""

    EXACT = 0
    DECODED = 1
    """Steps that decoded."""
    PREFILLED = 2
    """Chunks of a prompt, and perhaps steps that decoded."""


class Reading(NamedTuple):
    """How steps read a context of which they attend to a part.

    Attributes:
        rule: All on which it depends, but for the measures; readings of different rules cannot be
            compared.
        measures: Numbers of which larger ones are more exact; their order is the rule's.
    """

    rule: str = ""
    measures: tuple[float, ...] = ()

    def serves(self, asked: "Reading") -> bool:
        """Whether it is as exact as another reading, or more exact."""
        if asked == ANYHOW:
            return True
        pairs = zip(self.measures, asked.measures, strict=True)
        return self.rule == asked.rule and all(own >= other for own, other in pairs)

    def plus(self, other: "Reading") -> "Reading":
        """The most exact reading that both are as exact as."""
        if self.rule != other.rule:
            return ANYHOW
        pairs = zip(self.measures, other.measures, strict=True)
        return Reading(self.rule, tuple(map(min, pairs)))


ANYHOW = Reading()
"""A reading of which nothing is known. Every other is as exact."""


class Level(NamedTuple):
    """How the keys and values of a block were computed: by steps that read no less than this.

    Attributes:
        decoded: How steps that decoded read; None: they attended to everything.
        prefilled: How chunks of prompts read; None: likewise.
    """

    decoded: Reading | None = None
    prefilled: Reading | None = None

    @property
    def kind(self) -> Kind:
        """What of it was not exact."""
        if self.prefilled is not None:
            return Kind.PREFILLED
        return Kind.EXACT if self.decoded is None else Kind.DECODED

    def serves(self, asked: "Level") -> bool:
        """Whether blocks of this level may take the place of blocks of another one."""
        return all(
            own is None or (other is not None and own.serves(other))
            for own, other in zip(self, asked, strict=True)
        )

    def plus(self, other: "Level") -> "Level":
        """The most exact level that blocks have whose context has both."""
        made = Level(*(_plus(a, b) for a, b in zip(self, other, strict=True)))
        return next((level for level in (self, other) if level == made), made)


def _plus(one: Reading | None, other: Reading | None) -> Reading | None:
    if one is None or other is None:
        return other if one is None else one
    return one.plus(other)


EXACT = Level()
UNKNOWN = Level(ANYHOW, ANYHOW)


class Block(Protocol):
    """One of vLLM's blocks (``KVCacheBlock``)."""

    block_id: int

    @property
    def block_hash(self) -> bytes | None: ...
    @property
    def is_null(self) -> bool: ...


class Taint(NamedTuple):
    """The end of the exact part of a context, and the level of the rest.

    Attributes:
        position: The first position that is not exact; ``NEVER`` if all positions are exact.
        level: The level of a block that has all positions from this one on.
    """

    position: int = NEVER
    level: Level = EXACT

    def level_of(self, end: int) -> Level:
        """The level of a block whose last position is before ``end``."""
        return self.level if end > self.position else EXACT

    def plus(self, other: "Taint") -> "Taint":
        """The taint of a context that has both taints."""
        return Taint(min(self.position, other.position), self.level.plus(other.level))


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
            return EXACT
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
            tolerance: The level that every block has to serve.

        Returns:
            The tokens before the first block of any group that does not (``NEVER`` if there is no
            such block), and the taint of the blocks before it.
        """
        notes, shared, first, worst = self._notes, NEVER, NEVER, EXACT
        for blocks, size in groups:
            before = EXACT
            for place, block in enumerate(blocks):
                note = notes.get(block.block_id)
                if note is not None and note[0] == block.block_hash:
                    level = note[1]
                    if level is EXACT:
                        continue
                elif block.is_null:
                    continue
                else:
                    level = UNKNOWN
                if level is not before:  # most are the same object
                    if not level.serves(tolerance):
                        shared = min(shared, place * size)
                        break
                    before, worst = level, worst.plus(level)
                first = min(first, place * size)
        return shared, Taint(first, worst)
