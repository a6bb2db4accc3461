"""What users may do to a context: pin it, unpin it, drop it, whether or not a server runs."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.contexts import (
    forgotten,
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


@contextmanager
def all_stores(directory: str) -> Iterator[list[Ranks]]:
    """The stores of a directory, to be read.

    Raises:
        RetrievalConfigError: One is damaged.
        OSError: There is no such directory.
    """
    with ExitStack() as stack:
        root = stack.enter_context(closing(Folder.at(directory)))
        yield [
            stack.enter_context(closing(open_ranks(directory, name))) for name in names_of_all(root)
        ]


@contextmanager
def locked(store: Ranks, patience: float = 0.0) -> Iterator[Ranks]:
    """The same store for writing, which nobody else uses meanwhile.

    Args:
        store: The store.
        patience: Seconds to wait for others.

    Raises:
        RetrievalConfigError: Somebody uses it.
    """
    directory = str(store.folder.path.parent)
    with closing(open_ranks(directory, store.name, write=True)) as own:
        locks = own.take_locks([LOCK, WORKER_LOCK], patience)
        try:
            yield own
        finally:
            release(locks)


def change(directory: str, name: str, action: str) -> bool:
    """Change what becomes of a context.

    Args:
        directory: The directory of all stores.
        name: The context's name, or first digits of its id.
        action: One of ``vllm_kvretrieval.store.inbox.ACTIONS``.

    Returns:
        Whether a server uses the store, which is asked to do it before its next request.

    Raises:
        RetrievalConfigError: No context is meant, or several; a store is damaged, or used by
            something that is no server.
    """
    with all_stores(directory) as stores:
        found = [
            (store, key)
            for store in stores
            for key in meant(reachable(store.records()), name, read_names(store.folder))
        ]
        if len(found) != 1:
            why = "no context" if not found else f"{len(found)} contexts"
            raise RetrievalConfigError(
                f"store: {name!r} names {why}; give the name or the id that `vllm-kvretrieval "
                "store ls` shows."
            )
        ((store, key),) = found
        asked = Change(action, key)
        try:
            with locked(store) as own:
                if action == DROP:
                    own.void(forgotten(key, own.records()))
                note(own.folder, asked, own.records())
                return False
        except StoreInUseError:
            put(store.folder, asked)
            return True


def note(folder: Folder, change: Change, records: Mapping[int, Record]) -> None:
    """Write down what becomes of a context, in a store that is locked or one's own.

    Args:
        folder: The store's directory.
        change: What has been done.
        records: All that the store has now; what is not there has neither names nor pins.
    """
    keys = {record.key for record in records.values()}
    pins = read_pins(folder)
    if change.action == PIN:
        pins.add(change.key)
    elif change.action == UNPIN:  # also what it has begun with
        path = pinned_blocks([change.key], reachable(records))
        pins -= {records[block].key for block in path}
    write_pins(folder, pins & keys)
    write_names(folder, {name: key for name, key in read_names(folder).items() if key in keys})
