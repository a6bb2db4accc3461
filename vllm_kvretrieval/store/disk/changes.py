"""What users may do to a context: pin it, unpin it, drop it, whether or not a server runs."""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk.contexts import (
    PINNED_SHARE,
    forgotten,
    held,
    pinned_blocks,
    reachable,
)
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.groups import groups_of, pinned
from vllm_kvretrieval.store.disk.inbox import DROP, PIN, UNPIN, Change, put
from vllm_kvretrieval.store.disk.names import (
    Forgotten,
    Known,
    UnknownContextError,
    called,
    meant,
    read_forgotten,
    read_kept,
    read_names,
    read_pins,
    sessions,
    unknown,
    write_forgotten,
    write_names,
    write_pins,
)
from vllm_kvretrieval.store.disk.ranks import Ranks, names_of_all, open_ranks
from vllm_kvretrieval.store.disk.store import LOCK, WORKER_LOCK, StoreInUseError, release

Found = TypeVar("Found")
MOST_SESSIONS = 1000
"""Sessions whose pins are kept; the one that pinned longest ago goes first."""


def each_store(directory: str, look: Callable[[Ranks], Found]) -> tuple[list[Found], list[str]]:
    """Look at the stores of a directory, which are open for reading meanwhile.

    Args:
        directory: The directory of all stores.
        look: Looks at one; may raise the errors below.

    Returns:
        What it has found, and why other entries of the directory could not be looked at.

    Raises:
        RetrievalConfigError: Others may write to the directory.
        OSError: There is no such directory.
    """
    with closing(Folder.at(directory)) as root:
        names = names_of_all(root)
    found, refused = list[Found](), list[str]()
    for name in names:
        try:
            with closing(open_ranks(directory, name)) as store:
                found.append(look(store))
        except (RetrievalConfigError, OSError) as error:
            refused.append(f"store: {name} is left out ({str(error).rstrip('.')}).")
    return found, refused


@contextmanager
def locked(directory: str, name: str, patience: float = 0.0) -> Iterator[Ranks]:
    """A store for writing, which nobody else uses meanwhile.

    Args:
        directory: The directory of all stores.
        name: The store's name.
        patience: Seconds to wait for others.

    Raises:
        RetrievalConfigError: Somebody uses it.
    """
    with closing(open_ranks(directory, name, write=True)) as store:
        locks = store.take_locks([LOCK, WORKER_LOCK], patience)
        try:
            yield store
        finally:
            release(locks)


@dataclass(frozen=True)
class Made:
    """A change of one store.

    Attributes:
        store: The store's name.
        asked: Whether a server uses the store; it makes the change before its next request.
        remark: A sentence about what else is so; empty: nothing.
    """

    store: str
    asked: bool
    remark: str


def change(directory: str, context: str, action: str) -> tuple[list[Made], list[str]]:
    """Change what becomes of a context, in every store that has it.

    Args:
        directory: The directory of all stores.
        context: The context's name, or the first digits of its id; see :func:`meant`. Lost ones
            can be dropped and unpinned, too.
        action: One of ``vllm_kvretrieval.store.disk.inbox.ACTIONS``.

    Returns:
        What has been changed where; nothing: the name of what is to be dropped has been dropped
        before. And why other entries of the directory could not be looked at.

    Raises:
        UnknownContextError: No context is meant, or several.
        RetrievalConfigError: A store has not been changed; says in which ones the change is made.
        OSError: There is no such directory.
    """
    stores, refused = each_store(directory, Known.of)
    try:
        keys = meant(context, stores)
        wanted = [(store, key) for store in stores for key in _wanted(store, keys, context, action)]
        if not wanted and any(keys & store.keys for store in stores):
            raise unknown(context, "no context that is whole")
        if not wanted and action != DROP:
            raise UnknownContextError(f"store: {context!r} is forgotten; it has to be read anew.")
    except UnknownContextError as error:
        raise UnknownContextError(" ".join([str(error), *refused])) from None
    made, failed = list[Made](), list[str]()
    for store, key in wanted:
        try:
            made.append(_make(directory, store.store, context, Change(action, key)))
        except (RetrievalConfigError, OSError) as error:
            failed.append(f"store: {store.store}: {action} has failed ({str(error).rstrip('.')}).")
    if failed:
        done = [f"It is done in {', '.join(one.store for one in made)}."] if made else []
        raise RetrievalConfigError(" ".join([*failed, *done, *refused]))
    return made, refused


def _wanted(store: Known, keys: Set[bytes], context: str, action: str) -> Set[bytes]:
    """Keys of a store among the keys that a user means."""
    if action == DROP:
        # A server may be about to store again what has been dropped.
        return keys & store.keys.union(store.forgotten.keys)
    if action == UNPIN:
        return keys & store.keys
    # Elsewhere an older version may have the same name.
    own = {store.names[context]} if context in store.names else keys
    return own & store.whole


def _make(directory: str, name: str, context: str, asked: Change) -> Made:
    """Make a change of one store, or ask its server to."""
    try:
        with locked(directory, name) as store:
            remark = _remark(store, context, asked)
            blocks, dropped = _dropped(store, asked)
            store.void(blocks)
            note(store.folder, asked, dropped)
            store.erase(blocks)
            return Made(name, False, remark)
    except StoreInUseError:
        with closing(open_ranks(directory, name)) as store:
            remark = _remark(store, context, asked)
            put(store.folder, asked)
        return Made(name, True, remark)


def _dropped(store: Ranks, asked: Change) -> tuple[set[int], set[bytes]]:
    """Blocks that a change drops, and keys that are gone with them."""
    if asked.action != DROP:
        return set(), set()
    records = store.records()
    blocks = forgotten(asked.key, records, read_kept(store.folder))
    return blocks, {asked.key, *(records[block].owner for block in blocks)}


def _remark(store: Ranks, context: str, asked: Change) -> str:
    """What a user may not expect of a change that is about to be made."""
    names, pins = read_names(store.folder), read_pins(store.folder)
    if asked.action == DROP:
        _, gone = _dropped(store, asked)
        others = sorted(name for name, key in names.items() if key in gone and name != context)
        return f"Forgotten with it: {', '.join(others)}." if others else ""
    records = store.records()
    if asked.action == PIN:
        blocks, _ = pinned(pins | {asked.key}, records, groups_of(store.identity))
        count = len(blocks)
        if count <= PINNED_SHARE * store.blocks:
            return ""
        return (
            f"{count} of {store.blocks} blocks are to be pinned, and a server keeps half of the "
            "store pinned at most; unpin or drop others."
        )
    whole = reachable(records)
    count, by = held(asked.key, pins, whole)
    if not count:
        return ""
    all_of_it = any(r.key == asked.key and r.number + 1 == count for r in whole.values())
    tokens = count * groups_of(store.identity)[0].size
    what = "all of it" if all_of_it else f"its first {tokens} tokens"
    return f"Others keep {what} pinned: {called(by, names)}."


def note(folder: Folder, change: Change, dropped: Set[bytes] = frozenset()) -> None:
    """Write down what becomes of a context, in a store that is locked or one's own.

    Args:
        folder: The store's directory.
        change: What has been done.
        dropped: Keys of blocks that have been dropped with the context, which have neither names
            nor pins. What is missing for another reason keeps its own: it may be computed anew.
    """
    pins = read_pins(folder)
    if change.action == PIN:
        pins.add(change.key)
    elif change.action == UNPIN:
        pins.discard(change.key)
    else:
        dropped = dropped | {change.key}
        pins -= dropped
        _forget_names(folder, lambda key: key in dropped, change.key)
    write_pins(folder, pins)


def note_session(folder: Folder, name: str, key: bytes | None) -> None:
    """Write down what a session has pinned, in a store that is one's own.

    Args:
        folder: The store's directory.
        name: What the session is called.
        key: The key of the context's last block; None: it has nothing pinned any more.
    """
    names, pins = read_names(folder), read_pins(folder)
    others = [known for known in sessions(names) if known != name]
    gone = {name, *others[MOST_SESSIONS - 1 :]}
    before = {names.pop(known) for known in gone if known in names}
    pins -= before.difference(names.values())
    if key is not None:
        names[name] = key
        pins.add(key)
    write_pins(folder, pins)
    write_names(folder, names)
    known = read_forgotten(folder)
    if name in known.names:
        write_forgotten(folder, known._replace(names=known.names - {name}))


def note_reset(folder: Folder) -> None:
    """Write down that everything has been dropped, in a store that is one's own."""
    write_pins(folder, ())
    try:
        _forget_names(folder, lambda key: True)
    except RetrievalConfigError:  # nobody knows any more what there was
        write_names(folder, {})


def _forget_names(
    folder: Folder, of: Callable[[bytes], bool], dropped: bytes | None = None
) -> None:
    """Take names away, and remember them.

    Args:
        folder: The store's directory.
        of: Whether the names of a context go, by the key of its last block.
        dropped: The key of the context that a user has dropped, which is remembered, too.
    """
    names, known = read_names(folder), read_forgotten(folder)
    gone = {name for name, key in names.items() if of(key)}
    keys = known.keys
    if dropped is not None:
        keys = (*(key for key in keys if key != dropped), dropped)
    # First, since a name that is gone must not be unknown.
    write_forgotten(folder, Forgotten(known.names | gone, keys))
    write_names(folder, {name: key for name, key in names.items() if name not in gone})


def give_names(store: Ranks, given: Mapping[str, bytes], pin: bool) -> dict[str, bytes]:
    """Name contexts, in a store that is locked; a name that moves takes its pin along.

    Args:
        store: The store.
        given: Keys of last blocks by name.
        pin: Whether to pin them.

    Returns:
        Keys of last blocks of older versions that the store still has, by the name that has moved.
    """
    folder, records = store.folder, reachable(store.records())
    names, pins = read_names(folder), read_pins(folder)
    moved = {name: names[name] for name, key in given.items() if names.get(name, key) != key}
    names |= given
    unnamed = {*moved.values()}.difference(names.values())
    pins |= {key for name, key in given.items() if pin or moved.get(name) in pins}
    write_pins(folder, pins - unnamed)
    write_names(folder, names)
    known = read_forgotten(folder)
    if not known.names.isdisjoint(given):
        write_forgotten(folder, known._replace(names=known.names.difference(given)))
    # What the new version goes on behind is a part of it.
    begins = {records[block].key for block in pinned_blocks(given.values(), records)}
    older = (unnamed & {record.key for record in records.values()}) - begins
    return {name: key for name, key in moved.items() if key in older}
