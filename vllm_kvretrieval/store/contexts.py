"""Contexts: runs of blocks in a store, from the first token of a text to its last full block."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.files import Folder
from vllm_kvretrieval.store.records import Record
from vllm_kvretrieval.store.store import NAMES, PINS

NO_PARENT = bytes(32)
ID_DIGITS = 12
REMEDIES = {PINS: "pin", NAMES: "name"}
Said = TypeVar("Said")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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


def meant(records: Mapping[int, Record], name: str, names: Mapping[str, bytes]) -> list[bytes]:
    """Keys of the last blocks of what a user may mean.

    Args:
        records: As :func:`reachable` gives them.
        name: The name of a context, or the first digits of its key, in hexadecimal. A context with
            a name may go on: others then begin with it.
        names: Keys of last blocks by name.
    """
    if names.get(name) in {record.key for record in records.values()}:
        return [names[name]]
    ends = (context.key for context in contexts(records))
    return [key for key in ends if name and key.hex().startswith(name.lower())]


def forgotten(key: bytes, records: Mapping[int, Record]) -> set[int]:
    """Blocks that are dropped with a context, and with what goes on behind it.

    Args:
        key: The key of the context's last block.
        records: All that the store has.

    Returns:
        Blocks that no other context has, and others with the same contents, which would take their
        place.
    """
    known = reachable(records)
    ending = {block for block, record in known.items() if record.key == key}
    dropped, kept = set[int](), set[int]()
    for context in contexts(known):
        (kept if ending.isdisjoint(context.blocks) else dropped).update(context.blocks)
    gone = {records[block].key for block in dropped - kept}
    return {block for block, record in records.items() if record.key in gone}


def read_pins(folder: Folder) -> set[bytes]:
    """Keys of the contexts that are never evicted.

    Raises:
        RetrievalConfigError: The file is damaged.
    """
    return _read(folder, PINS, lambda keys: {bytes.fromhex(key) for key in keys}, set())


def write_pins(folder: Folder, pins: Collection[bytes]) -> None:
    """Replace the keys of the contexts that are never evicted."""
    folder.replace(PINS, json.dumps(sorted(key.hex() for key in pins)).encode())


def read_names(folder: Folder) -> dict[str, bytes]:
    """Keys of contexts by the names that users have given them.

    Raises:
        RetrievalConfigError: The file is damaged.
    """
    return _read(
        folder, NAMES, lambda keys: {name: bytes.fromhex(key) for name, key in keys.items()}, {}
    )


def write_names(folder: Folder, names: Mapping[str, bytes]) -> None:
    """Replace the names of contexts."""
    folder.replace(NAMES, json.dumps({name: names[name].hex() for name in names}).encode())


def check_name(name: str) -> None:
    """Refuse a name that a command line or a log could take for something else.

    Raises:
        RetrievalConfigError: It is one.
    """
    if not NAME.fullmatch(name):
        raise RetrievalConfigError(
            f"store: {name!r} cannot be a context's name; take up to 128 letters, digits, dots, "
            "dashes and underscores, a letter or a digit first (--name)."
        )


def _read(folder: Folder, file: str, parse: Callable[[Any], Said], empty: Said) -> Said:
    """What a small file says; ``empty`` if there is none."""
    try:
        text = folder.read(file)
    except FileNotFoundError:
        return empty
    try:
        return parse(json.loads(text))
    except (ValueError, TypeError, AttributeError):
        raise RetrievalConfigError(
            f"store: {folder.path / file} is damaged. Remove it, and {REMEDIES[file]} anew."
        ) from None


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
