"""Levels: how exact the keys and values in vLLM's blocks are.

Keys and values at a position are exact if every layer attended to the whole context before it, and
if that context is exact itself. So a context is exact up to some position, and nowhere beyond.
Levels say how the rest was computed, and decide which requests may share blocks.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions

NEVER = sys.maxsize
"""A position that no context reaches."""


class Level(IntEnum):
    """How a block's keys and values were computed; a larger level is worse."""

    EXACT = 0
    DECODED = 1
    """A decode step attended to a part of the context; or the context before was of this level."""
    PREFILLED = 2
    """A chunk of a prompt attended to a part of the context; or the context before did."""


UNKNOWN = Level.PREFILLED


class Block(Protocol):
    """One of vLLM's blocks (``KVCacheBlock``)."""

    block_id: int

    @property
    def block_hash(self) -> bytes | None: ...
    @property
    def is_null(self) -> bool: ...


class Taint(NamedTuple):
    """The end of the exact part of a context.

    Attributes:
        position: The first position that is not exact; ``NEVER`` if all are.
        level: The worst level from there on.
    """

    position: int = NEVER
    level: Level = Level.EXACT

    def level_of(self, end: int) -> Level:
        """The level of a block whose last position is before ``end``."""
        return self.level if end > self.position else Level.EXACT

    def plus(self, other: "Taint") -> "Taint":
        """The exactness of a context to which both apply."""
        return Taint(min(self.position, other.position), max(self.level, other.level))


class BlockLevels:
    """Levels of the blocks in the prefix cache.

    A note belongs to a block's contents, which the hash names. It counts as long as the block has
    this hash, so blocks that vLLM recycles or forgets need no further note.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[bytes | None, Level]] = {}

    def note(self, block: Block, level: Level) -> None:
        """Note the level of what is, or will be in this step, written to a hashed block."""
        self._notes[block.block_id] = block.block_hash, level

    def copy(self, source: int, target: int) -> None:
        """A block (by number) gets the contents of another, and perhaps its hash."""
        if (note := self._notes.get(source)) is not None:
            self._notes[target] = note

    def of(self, block: Block) -> Level:
        """A block's level; the null block, which is never read, is exact."""
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
        """Find out how much of a prefix may be shared, and how exact that part is.

        Args:
            groups: For each group of layers, the blocks that hold the prefix, in order, and the
                tokens of a block.
            tolerance: The worst level that may be shared.

        Returns:
            Tokens before the first block beyond that level, in any group; ``NEVER`` if there is no
            such block. And the exactness of the blocks before it.
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
    """The consequences of a request's options for exact contexts.

    Attributes:
        tolerance: Worst level of the blocks that the request may share.
        reads_cache: Whether the request may share blocks at all: methods that rate tokens by all
            queries of a prompt have to compute them all.
        decodes_exactly: Tokens; a decode step attends to the whole context if it is no longer.
        prefills_exactly: Tokens at the start of a prompt that attend to everything before them.
    """

    tolerance: Level
    reads_cache: bool
    decodes_exactly: int
    prefills_exactly: int

    @classmethod
    def of(cls, options: RequestOptions, config: RetrievalConfig) -> "Exactness":
        """Derive the exactness from a request's options on this engine.

        Where only the worker knows more (a share of the prompt as a budget, tokens that were kept
        by methods that drop others), this is the worst possible case.
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
        """The exactness of the context after a step.

        Args:
            start: Tokens that were computed before.
            tokens: Tokens of the step.
            decodes: Whether the step has a single token behind the prompt.
        """
        if decodes:
            return Taint(start, Level.DECODED) if start >= self.decodes_exactly else EXACT
        if start + tokens > self.prefills_exactly:
            return Taint(max(start, self.prefills_exactly), Level.PREFILLED)
        return EXACT
