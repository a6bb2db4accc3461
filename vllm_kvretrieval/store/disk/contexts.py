"""Contexts: runs of blocks in a store, from the first token of a text to its last full block.

They are runs of the first group's blocks; see ``vllm_kvretrieval.store.disk.groups`` for others.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from typing import NamedTuple

from vllm_kvretrieval.store.disk.records import Record

NO_PARENT = bytes(32)
ID_DIGITS = 12
PINNED_SHARE = 0.5
"""Share of the blocks that may be pinned at most: requests need the others."""


class Context(NamedTuple):
    """A context that is stored whole.

    Attributes:
        key: The key of its last block; its first digits are what users name it by.
        length: How many blocks it has.
        level: The worst kind of level of these, see :attr:`Record.kind`.
        created: When the last of them was written, in seconds since 1970.
    """

    key: bytes
    length: int
    level: int
    created: int

    @property
    def id(self) -> str:
        """What users name it by."""
        return id_of(self.key)


def id_of(key: bytes) -> str:
    """What users call the context that ends with this key."""
    return key.hex()[:ID_DIGITS]


def reachable(records: Mapping[int, Record]) -> dict[int, Record]:
    """Records whose context is there from its first block on, the best one of each key.

    vLLM finds a block only behind the blocks before it. Of several with one key the most exact
    counts, and the latest of these.

    Returns:
        Those of the first group by block, in order of their numbers in their contexts.
    """
    found: dict[int, Record] = {}
    known = {NO_PARENT: -1}
    first = [block for block in _best(records) if not records[block].group]
    for block in sorted(first, key=lambda block: records[block].number):
        record = records[block]
        if known.get(record.parent) == record.number - 1:
            known[record.key] = record.number
            found[block] = record
    return found


def beside(records: Mapping[int, Record], whole: Mapping[int, Record]) -> dict[int, Record]:
    """Records of other groups that belong to blocks of the first group, the best one of each key.

    Args:
        records: All that there are.
        whole: See :func:`reachable`.
    """
    keys = {record.key for record in whole.values()}
    return {
        block: records[block]
        for block in _best(records)
        if records[block].group and records[block].owner in keys
    }


def _best(records: Mapping[int, Record]) -> Iterable[int]:
    """Of the blocks with one key in a group the most exact one, and the latest of these."""
    best: dict[tuple[int, bytes], int] = {}
    for block, record in records.items():
        other = best.get((record.group, record.key))
        if other is None or _rank(record) < _rank(records[other]):
            best[record.group, record.key] = block
    return best.values()


def contexts(records: Mapping[int, Record], kept: Collection[bytes] = ()) -> list[Context]:
    """The contexts of a store, latest first: the longest ones, and those with names or pins.

    Args:
        records: See :func:`reachable`.
        kept: See :func:`read_kept`.
    """
    inner = {record.parent for record in records.values()}.difference(kept)
    until = {NO_PARENT: (0, 0)}  # level and time of what ends with a key
    found = []
    for record in records.values():
        level, created = until[record.parent]
        until[record.key] = max(level, record.kind), max(created, record.created)
        if record.key not in inner:
            found.append(Context(record.key, record.number + 1, *until[record.key]))
    return sorted(found, key=lambda context: -context.created)


def paths(contexts: Iterable[Context], records: Mapping[int, Record]) -> list[list[int]]:
    """The blocks of contexts, in order.

    Args:
        contexts: Some of those that :func:`contexts` gives.
        records: The records that the contexts were made of.
    """
    blocks = {record.key: block for block, record in records.items()}
    return [_path(context.key, blocks, records) for context in contexts]


def forgotten(key: bytes, records: Mapping[int, Record], kept: Collection[bytes]) -> set[int]:
    """Blocks that are dropped with a context, and with what goes on behind it.

    Args:
        key: The key of the context's last block.
        records: All that the store has, also behind gaps.
        kept: See :func:`read_kept`; such contexts stay, if this one goes on behind them.

    Returns:
        Blocks of all groups that no other context has, and others with the same contents, which
        would take their place. What a context has before a gap is not known to be of it.
    """
    known = {record.key: record for record in records.values() if not record.group}
    gone = {key}
    for record in sorted(known.values(), key=lambda record: record.number):
        if record.parent in gone:
            gone.add(record.key)
    following = Counter(record.parent for record in known.values())
    while (own := known.get(key)) and following[own.parent] == 1 and own.parent not in kept:
        gone.add(key := own.parent)
    return {block for block, record in records.items() if record.owner in gone}


def held(
    key: bytes, pins: Collection[bytes], records: Mapping[int, Record]
) -> tuple[int, list[bytes]]:
    """How much of a context other contexts' pins hold.

    Args:
        key: The key of its last block.
        pins: Keys of last blocks; its own does not count.
        records: See :func:`reachable`.

    Returns:
        How many of its first blocks are never evicted, and the keys of the pins that hold the last
        one of these.
    """
    blocks = {record.key: block for block, record in records.items()}
    if key not in blocks:
        return 0, []
    own = {*_path(key, blocks, records)}
    by_length: dict[int, list[bytes]] = {}
    for pin in sorted(pins):
        if pin != key and pin in blocks:
            length = len(own.intersection(_path(pin, blocks, records)))
            by_length.setdefault(length, []).append(pin)
    by_length.pop(0, None)
    return max(by_length.items(), default=(0, []))


def pinned_blocks(pins: Collection[bytes], records: Mapping[int, Record]) -> list[int]:
    """Blocks of the contexts that are pinned, as far as they are there, in the order of the pins.

    Args:
        pins: Keys of last blocks.
        records: See :func:`reachable`.
    """
    blocks = {record.key: block for block, record in records.items()}
    found: dict[int, None] = {}
    for key in pins:
        if key in blocks:
            found.update(dict.fromkeys(_path(key, blocks, records, found)))
    return list(found)


def missing_keys(pins: Collection[bytes], records: Mapping[int, Record]) -> set[bytes]:
    """The key of the last block that each incomplete pinned context lacks.

    Args:
        pins: Keys of last blocks.
        records: All that there are.
    """
    parents = {record.key: record.parent for record in records.values() if not record.group}
    found, seen = set[bytes](), {NO_PARENT}
    for key in pins:
        while key in parents and key not in seen:
            seen.add(key)
            key = parents[key]
        if key not in seen:
            found.add(key)
    return found


def _rank(record: Record) -> tuple[int, int]:
    return record.kind, -record.created


def _path(
    key: bytes,
    blocks: Mapping[bytes, int],
    records: Mapping[int, Record],
    known: Container[int] = (),
) -> list[int]:
    """The blocks that end with a key, in order, but for those up to one that is known."""
    path = list[int]()
    while key != NO_PARENT and blocks[key] not in known:
        path.append(blocks[key])
        key = records[path[-1]].parent
    return path[::-1]
