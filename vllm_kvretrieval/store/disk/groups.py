"""Groups of layers: which blocks a context needs beside those of the first group.

A model may mix layers with full attention, with sliding windows, with chunks of the context, and
with recurrent states. vLLM divides them into groups of one kind each, and every group has blocks of
its own. The first group of a store has full attention: a request needs all of its blocks. Of a
window it needs the last blocks, of chunks those of the one that it goes on with, and of a recurrent
state the one block at whose end the state was saved. So a context is found up to the last position
at which every group has what it needs.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_kvretrieval.store.disk.contexts import (
    beside,
    missing_keys,
    pinned_blocks,
    reachable,
)
from vllm_kvretrieval.store.disk.records import Record

GROUPS, HASH_SIZE = "groups", "hash_size"
"""Entries of a store's identity; missing if all layers are of one kind."""


class Group(NamedTuple):
    """A group of layers that share blocks.

    Attributes:
        size: Tokens of a block.
        needs: How many blocks before a position a request needs that goes on there; None: all.
        chunk: Tokens of a chunk of the context, if it needs those of the last one; None: no chunks.
    """

    size: int
    needs: int | None = None
    chunk: int | None = None

    def first(self, end: int) -> int:
        """The number of the first block that a request needs that goes on behind ``end`` blocks."""
        if self.chunk is not None:
            return end * self.size // self.chunk * self.chunk // self.size
        return 0 if self.needs is None else max(end - self.needs, 0)


class Place(NamedTuple):
    """Where a block of another group than the first belongs.

    Attributes:
        group: The group's number.
        number: How many of its blocks are before it.
        owner: See :attr:`Record.owner`.
    """

    group: int
    number: int
    owner: bytes


def groups_of(identity: Mapping[str, Any]) -> list[Group]:
    """The groups of a store by their numbers, as its identity says."""
    said = identity.get(GROUPS, [{"size": identity["block_size"], "needs": None}])
    return [Group(one["size"], one["needs"], one.get("chunk")) for one in said]


def hash_size(identity: Mapping[str, Any]) -> int:
    """Tokens of which vLLM makes a hash each; blocks of all groups are multiples."""
    return int(identity.get(HASH_SIZE, identity["block_size"]))


class Parts:
    """The blocks of other groups than the first.

    Args:
        groups: All groups by their numbers.
        records: Of a store's blocks, by block.
    """

    def __init__(self, groups: Sequence[Group], records: Mapping[int, Record]) -> None:
        self._groups = groups
        self._unit = math.lcm(*(group.size for group in groups)) // groups[0].size
        self.blocks = {
            Place(record.group, record.number, record.owner): block
            for block, record in records.items()
            if record.group
        }
        """Their numbers by their places."""

    def end(self, length: int) -> int:
        """The last end of blocks of all groups in so many of the first group's blocks."""
        return length // self._unit * self._unit

    def whole(self, keys: Sequence[bytes]) -> int:
        """How many of the first group's blocks of a context a request would find.

        Args:
            keys: The keys of these blocks, in order; all of them are there.
        """
        for end in range(self.end(len(keys)), 0, -self._unit):
            if all(place in self.blocks for place in self.needed(keys[:end])):
                return end
        return 0

    def of_whole(self, keys: Sequence[bytes]) -> Iterator[Place]:
        """What a context needs, as far as a request would find it; see :meth:`whole`."""
        return self.needed(keys[: self.whole(keys)])

    def needed(self, keys: Sequence[bytes]) -> Iterator[Place]:
        """What a request needs that goes on behind a context.

        Args:
            keys: See :meth:`whole`; as many as :meth:`end` says.
        """
        size = self._groups[0].size
        for number, group in enumerate(self._groups[1:], 1):
            end = len(keys) * size // group.size
            for place in range(group.first(end), end):
                owner = keys[-(-(place + 1) * group.size // size) - 1]
                yield Place(number, place, owner)


def pinned(
    pins: Collection[bytes], records: Mapping[int, Record], groups: Sequence[Group]
) -> tuple[list[int], set[bytes]]:
    """What pins hold.

    Args:
        pins: Keys of last blocks of contexts.
        records: All that there are.
        groups: All groups by their numbers.

    Returns:
        Blocks of the contexts, as far as they are there, in the order of the pins: the first
        group's, and those of others that a request needs. And the keys of the first group's blocks
        at which something is missing that would make contexts whole.
    """
    whole = reachable(records)
    missing = missing_keys(pins, records)
    if len(groups) == 1:
        return pinned_blocks(pins, whole), missing
    parts = Parts(groups, beside(records, whole))
    found: dict[int, None] = {}
    for pin in pins:
        path = pinned_blocks([pin], whole)
        keys = [whole[block].key for block in path]
        found.update(dict.fromkeys(path))
        found.update((parts.blocks[place], None) for place in parts.of_whole(keys))
        needed = parts.needed(keys[: parts.end(len(keys))])
        missing.update(place.owner for place in needed if place not in parts.blocks)
    return [*found], missing
