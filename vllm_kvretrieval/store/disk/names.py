"""Names and pins of contexts, what dropped ones were called, and which context a user means."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.of_sessions import PREFIX, SALT_DIGITS
from vllm_kvretrieval.store.disk.contexts import id_of, reachable
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.ranks import Ranks

PINS, NAMES, FORGOTTEN = "pins.json", "names.json", "forgotten.json"
REMEDIES = {PINS: ", and pin anew", NAMES: ", and name anew", FORGOTTEN: ""}
SESSION = re.compile(rf"{PREFIX}(-[0-9a-f]{{{SALT_DIGITS}}})?\.")
"""How names of sessions begin."""
MOST_KEYS = 1000
"""Keys of contexts that were dropped and are remembered."""
MOST_NAMED = 3
"""Contexts that a message names."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
DIGITS = re.compile(r"[0-9A-Fa-f]{8,}")
ID = re.compile(rf"id:([0-9A-Fa-f]+)|({DIGITS.pattern})")
"""With the prefix fewer digits are enough."""
Said = TypeVar("Said")


class Forgotten(NamedTuple):
    """What contexts were called that have been dropped.

    Attributes:
        names: The names that dropped contexts had, which are kept for ever.
        keys: Keys of their last blocks, latest last, but no more than ``MOST_KEYS``.
    """

    names: frozenset[str] = frozenset()
    keys: tuple[bytes, ...] = ()


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


def read_forgotten(folder: Folder) -> Forgotten:
    """What dropped contexts were called.

    Raises:
        RetrievalConfigError: The file is damaged.
    """

    def parse(said: Any) -> Forgotten:
        return Forgotten(frozenset(map(str, said["names"])), (*map(bytes.fromhex, said["keys"]),))

    return _read(folder, FORGOTTEN, parse, Forgotten())


def write_forgotten(folder: Folder, forgotten: Forgotten) -> None:
    """Replace what dropped contexts were called; the oldest of too many keys are left out."""
    keys = [key.hex() for key in forgotten.keys[-MOST_KEYS:]]
    said = {"names": sorted(forgotten.names), "keys": keys}
    folder.replace(FORGOTTEN, json.dumps(said).encode())


def read_kept(folder: Folder) -> set[bytes]:
    """Keys of last blocks of all contexts with names or pins; raises as :func:`read_names`."""
    return read_pins(folder).union(read_names(folder).values())


def sessions(names: Mapping[str, bytes]) -> list[str]:
    """Those names that requests have given to their sessions, the latest first.

    Args:
        names: Keys of last blocks by name, in the order in which names were given.
    """
    return [name for name in [*names][::-1] if SESSION.match(name)]


def _read(folder: Folder, file: str, parse: Callable[[Any], Said], empty: Said) -> Said:
    """What a small file says; ``empty`` if there is none."""
    try:
        text = folder.read(file)
    except FileNotFoundError:
        return empty
    try:
        return parse(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RetrievalConfigError(
            f"store: {folder.path / file} is damaged. Remove it{REMEDIES[file]}."
        ) from None


class UnknownContextError(RetrievalConfigError):
    """A user has named no context, or several."""


@dataclass(frozen=True)
class Known:
    """What a store knows of contexts.

    Attributes:
        store: The store's name.
        whole: Keys of blocks whose context is there from its first block on.
        keys: Keys of all blocks, and of all contexts with names and pins.
        names: Keys of last blocks by name.
        forgotten: What dropped contexts were called.
    """

    store: str
    whole: frozenset[bytes]
    keys: frozenset[bytes]
    names: dict[str, bytes]
    forgotten: Forgotten

    @classmethod
    def of(cls, store: Ranks) -> "Known":
        """What an open store knows.

        Raises:
            RetrievalConfigError: A file of it is damaged.
            OSError: One cannot be read.
        """
        records, names = store.records(), read_names(store.folder)
        whole = frozenset(record.key for record in reachable(records).values())
        keys = {record.owner for record in records.values()}
        return cls(
            store=store.name,
            whole=whole,
            keys=frozenset(keys.union(names.values(), read_pins(store.folder))),
            names=names,
            forgotten=read_forgotten(store.folder),
        )


def meant(context: str, stores: Sequence[Known]) -> set[bytes]:
    """Keys of the last blocks of the context that a user means.

    A name is never taken for the beginning of an id, and neither name nor id of what was dropped
    for another context.

    Args:
        context: The context's name, or the first digits of its id.
        stores: All that are there.

    Returns:
        By a name as many as stores have given it to; none: this name has been dropped.

    Raises:
        UnknownContextError: There is none, or there are several.
    """
    if named := {store.names[context] for store in stores if context in store.names}:
        return named
    if any(context in store.forgotten.names for store in stores):
        return set()
    digits = _digits(context)
    known = (key for store in stores for key in store.keys.union(store.forgotten.keys))
    found = {key for key in known if digits and key.hex().startswith(digits)}
    if len(found) != 1:
        raise unknown(context, f"{len(found)} contexts" if found else "no context")
    return found


def unknown(context: str, why: str) -> UnknownContextError:
    """The error for a context that a user has not named as it is called.

    Args:
        context: What the user has given.
        why: What it is instead.
    """
    return UnknownContextError(
        f"store: {context!r} names {why}; give the name that `vllm-kvretrieval store ls` shows, or "
        "at least 8 digits of the id."
    )


def check_name(name: str) -> None:
    """Refuse a name that a command line, a log or we ourselves could take for something else.

    Raises:
        RetrievalConfigError: It is one.
    """
    if not NAME.fullmatch(name):
        raise RetrievalConfigError(
            f"store: {name!r} cannot be a context's name; take up to 128 letters, digits, dots, "
            "dashes and underscores, a letter or a digit first (--name)."
        )
    if DIGITS.fullmatch(name):
        raise RetrievalConfigError(
            f"store: {name!r} cannot be a context's name, since it could be an id (8 hexadecimal "
            "digits or more); take another one (--name)."
        )


def called(keys: Iterable[bytes], names: dict[str, bytes]) -> str:
    """The names of contexts, in words; of more than ``MOST_NAMED``, the number of the others.

    Args:
        keys: Keys of the contexts' last blocks.
        names: Keys of last blocks by name.
    """
    own = {key: name for name, key in names.items()}
    words = [own.get(key, id_of(key)) for key in keys]
    more = [f"{len(words) - MOST_NAMED} more"] if len(words) > MOST_NAMED else []
    return " and ".join(words[:MOST_NAMED] + more)


def _digits(context: str) -> str | None:
    """The digits of an id; None: it is none."""
    found = ID.fullmatch(context)
    return (found[1] or found[2]).lower() if found else None
