"""Contexts: runs of blocks in a store, from the first token of a text to its last full block."""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
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
    inner = {record.parent for record in records.values()}
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
        records: The same records.
    """
    blocks = {record.key: block for block, record in records.items()}
    return [_path(context.key, blocks, records) for context in contexts]


def meant(records: Mapping[int, Record], name: str, names: Mapping[str, bytes]) -> list[bytes]:
    """Keys of the last blocks of what a user may mean.

    Args:
        records: As :func:`reachable` gives them.
        name: The name of a context, or the first digits of its key, in hexadecimal. A context with
            a name may go on: others then begin with it.
        names: Keys of last blocks by name.
    """
    if name in names:
        there = {record.key for record in records.values()}
        return [names[name]] if names[name] in there else []
    ends = (context.key for context in contexts(records))
    return [key for key in ends if name and key.hex().startswith(name.lower())]


def lost(
    records: Mapping[int, Record], name: str, names: Mapping[str, bytes], pins: Collection[bytes]
) -> list[bytes]:
    """Keys of the last blocks of what a user may mean that is named or pinned, and not whole.

    Args:
        records: As :func:`reachable` gives them.
        name: The name of a context, or the first digits of its key, in hexadecimal.
        names: Keys of last blocks by name.
        pins: Keys of last blocks.
    """
    there = {record.key for record in records.values()}
    if name in names:
        return [] if names[name] in there else [names[name]]
    known = {*names.values(), *pins} - there
    return [key for key in known if name and key.hex().startswith(name.lower())]


def forgotten(key: bytes, records: Mapping[int, Record]) -> set[int]:
    """Blocks that are dropped with a context, and with what goes on behind it.

    Args:
        key: The key of the context's last block.
        records: All that the store has, also behind gaps.

    Returns:
        Blocks that no other context has, and others with the same contents, which would take their
        place. What a context has before a gap is not known to be of it.
    """
    known = {record.key: record for record in records.values()}
    gone = {key}
    for record in sorted(known.values(), key=lambda record: record.number):
        if record.parent in gone:
            gone.add(record.key)
    following = Counter(record.parent for record in known.values())
    while (own := known.get(key)) and following[own.parent] == 1:
        gone.add(key := own.parent)
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
            found.update(dict.fromkeys(_path(key, blocks, records, found)))
    return list(found)


def missing_keys(pins: Collection[bytes], records: Mapping[int, Record]) -> set[bytes]:
    """Of each pinned context that is not whole, the key of the last block that it lacks.

    Args:
        pins: Keys of last blocks.
        records: All that there are.
    """
    parents = {record.key: record.parent for record in records.values()}
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
