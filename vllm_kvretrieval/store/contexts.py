"""Contexts: runs of blocks in a store, from the first token of a text to its last full block."""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.files import Folder
from vllm_kvretrieval.store.records import Record
from vllm_kvretrieval.store.store import PINS

NO_PARENT = bytes(32)
ID_DIGITS = 12


class Context(NamedTuple):
    """A context that is stored whole.

    Attributes:
        key: The key of its last block; its first digits are what users name it by.
        blocks: Its blocks in order.
        level: The worst level of these.
        created: When the last of them was written, in seconds since 1970.
    """

    key: bytes
    blocks: tuple[int, ...]
    level: int
    created: int

    @property
    def id(self) -> str:
        """What users name it by."""
        return self.key.hex()[:ID_DIGITS]


def reachable(records: Mapping[int, Record]) -> dict[int, Record]:
    """Those records whose context is there from its first block on, the best one of each key.

    vLLM finds a block only behind the blocks before it. Of several with one key the most exact
    counts, and the latest of these.

    Returns:
        By block, in order of their numbers in their contexts.
    """
    best: dict[bytes, int] = {}
    for block, record in records.items():
        other = best.get(record.key)
        if other is None or _rank(record) < _rank(records[other]):
            best[record.key] = block
    found: dict[int, Record] = {}
    known = {NO_PARENT: -1}
    for block in sorted(best.values(), key=lambda block: records[block].number):
        record = records[block]
        if known.get(record.parent) == record.number - 1:
            known[record.key] = record.number
            found[block] = record
    return found


def contexts(records: Mapping[int, Record]) -> list[Context]:
    """The longest contexts of a store, latest first.

    Args:
        records: As :func:`reachable` gives them.
    """
    blocks = {record.key: block for block, record in records.items()}
    inner = {record.parent for record in records.values()}
    found = [
        _context(leaf, blocks, records)
        for leaf, record in records.items()
        if record.key not in inner
    ]
    return sorted(found, key=lambda context: -context.created)


def named(found: Iterable[Context], name: str) -> Context:
    """The one context that a user means.

    Args:
        found: All contexts.
        name: First digits of its key, in hexadecimal.

    Raises:
        RetrievalConfigError: None is meant, or several.
    """
    meant = [context for context in found if name and context.key.hex().startswith(name.lower())]
    if len(meant) != 1:
        why = "no context" if not meant else f"{len(meant)} contexts"
        raise RetrievalConfigError(
            f"store: {name!r} names {why}; give the id as `vllm-kvretrieval store ls` shows it."
        )
    return meant[0]


def own_blocks(context: Context, others: Iterable[Context]) -> set[int]:
    """Blocks of a context that no other one has."""
    shared = {block for other in others if other.key != context.key for block in other.blocks}
    return {*context.blocks} - shared


def read_pins(folder: Folder) -> set[bytes]:
    """Keys of the contexts that are never evicted.

    Raises:
        RetrievalConfigError: The file is damaged.
    """
    try:
        text = folder.read(PINS)
    except FileNotFoundError:
        return set()
    try:
        return {bytes.fromhex(key) for key in json.loads(text)}
    except (ValueError, TypeError):
        raise RetrievalConfigError(
            f"store: {folder.path / PINS} is damaged. Remove it, and pin anew."
        ) from None


def write_pins(folder: Folder, pins: Collection[bytes]) -> None:
    """Replace the keys of the contexts that are never evicted."""
    folder.replace(PINS, json.dumps(sorted(key.hex() for key in pins)).encode())


def pinned_blocks(pins: Collection[bytes], records: Mapping[int, Record]) -> list[int]:
    """Blocks of the contexts that are pinned, as far as they are there.

    Args:
        pins: Keys of last blocks.
        records: As :func:`reachable` gives them.
    """
    blocks = {record.key: block for block, record in records.items()}
    found: dict[int, None] = {}
    for key in sorted(pins):
        if key in blocks:
            found.update(dict.fromkeys(_context(blocks[key], blocks, records).blocks))
    return list(found)


def _rank(record: Record) -> tuple[int, int]:
    return record.level, -record.created


def _context(leaf: int, blocks: Mapping[bytes, int], records: Mapping[int, Record]) -> Context:
    """The context that ends with a block."""
    path = [leaf]
    while (parent := records[path[-1]].parent) != NO_PARENT:
        path.append(blocks[parent])
    path.reverse()
    own = [records[block] for block in path]
    level, created = max(r.level for r in own), max(r.created for r in own)
    return Context(own[-1].key, tuple(path), level, created)
