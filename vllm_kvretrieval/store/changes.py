"""What users may do to a context: pin it, unpin it, drop it, whether or not a server runs."""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import closing, contextmanager
from typing import TypeVar

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.contexts import (
    forgotten,
    lost,
    meant,
    pinned_blocks,
    reachable,
    read_names,
    read_pins,
    write_names,
    write_pins,
)
from vllm_kvretrieval.store.files import Folder
from vllm_kvretrieval.store.inbox import DROP, PIN, UNPIN, Change, put
from vllm_kvretrieval.store.ranks import Ranks, names_of_all, open_ranks
from vllm_kvretrieval.store.records import Record
from vllm_kvretrieval.store.store import LOCK, WORKER_LOCK, StoreInUseError, release

Found = TypeVar("Found")


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
        name: Of the store.
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


def change(directory: str, context: str, action: str) -> bool:
    """Change what becomes of a context.

    Args:
        directory: The directory of all stores.
        context: Its name, or first digits of its id. What is lost can be dropped and unpinned, too,
            where no other context is meant.
        action: One of ``vllm_kvretrieval.store.inbox.ACTIONS``.

    Returns:
        Whether a server uses the store, which is asked to do it before its next request.

    Raises:
        RetrievalConfigError: No context is meant, or several; or its store is damaged.
    """

    gone = list[tuple[str, bytes]]()

    def look(store: Ranks) -> list[tuple[str, bytes]]:
        records, names = reachable(store.records()), read_names(store.folder)
        keys = meant(records, context, names)
        if not keys and action != PIN:
            without = lost(records, context, names, read_pins(store.folder))
            gone.extend((store.name, key) for key in without)
        return [(store.name, key) for key in keys]

    by_store, refused = each_store(directory, look)
    found = [one for several in by_store for one in several] or gone
    if len(found) != 1:
        why = "no context" if not found else f"{len(found)} contexts"
        remedy = "give the name or the id that `vllm-kvretrieval store ls` shows."
        raise RetrievalConfigError(
            " ".join([f"store: {context!r} names {why}; {remedy}", *refused])
        )
    ((name, key),) = found
    asked = Change(action, key)
    try:
        with locked(directory, name) as store:
            records, dropped = store.records(), set[int]()
            if action == DROP:
                store.void(dropped := forgotten(key, records))
            note(store.folder, asked, records, {records[block].key for block in dropped})
            return False
    except StoreInUseError:
        with closing(open_ranks(directory, name)) as store:
            put(store.folder, asked)
        return True


def note(
    folder: Folder, change: Change, records: Mapping[int, Record], dropped: Set[bytes]
) -> None:
    """Write down what becomes of a context, in a store that is locked or one's own.

    Args:
        folder: The store's directory.
        change: What has been done.
        records: All that the store has now.
        dropped: Keys of blocks that have been dropped with the context, which have neither names
            nor pins. What is missing for another reason keeps its own: it may be computed anew.
    """
    pins = read_pins(folder)
    if change.action == PIN:
        pins.add(change.key)
    elif change.action == UNPIN:  # also what it has begun with
        path = pinned_blocks([change.key], reachable(records))
        pins -= {change.key} | {records[block].key for block in path}
    else:
        dropped = dropped | {change.key}
        pins -= dropped
        names = read_names(folder)
        write_names(folder, {name: key for name, key in names.items() if key not in dropped})
    write_pins(folder, pins)
