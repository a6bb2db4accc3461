"""The stores of all workers of an engine, each of which has its part of every block, as one."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk.files import Folder, Lock
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.store.disk.store import Store, open_store, release, store_names, take_locks


class Ranks:
    """The open stores of an engine; a block is there if every worker has its part.

    Names, pins and the order of use are in the store of the first worker.

    Args:
        stores: One per worker, in order.

    Attributes:
        name: What the names of their directories begin with.
        folder: The first one's directory.
        identity: All that the meaning of the bytes depends on.
        blocks: vLLM's blocks.
        block_bytes: Bytes of a block in all stores.
        bytes: Bytes of all files.
        used: uint64 [blocks]; of the blocks that were let go of later the larger numbers.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        first = stores[0]
        self.stores = stores
        self.name = name_of_all(first.folder.path.name)
        self.folder, self.identity, self.used = first.folder, first.identity, first.used
        self.blocks = first.geometry.all_blocks
        self.block_bytes = sum(store.geometry.block_bytes for store in stores)
        self.bytes = sum(store.geometry.bytes for store in stores)

    def records(self) -> dict[int, Record]:
        """The first worker's records of the blocks that all of them have, by block."""
        first, *others = (store.records() for store in self.stores)
        return {
            block: record
            for block, record in first.items()
            if all(_same(other.get(block), record) for other in others)
        }

    def note_use(self, blocks: Sequence[int], first: int) -> None:
        """Number blocks in their order of use; see :meth:`Store.note_use`."""
        self.stores[0].note_use(blocks, first)

    def void(self, blocks: Iterable[int]) -> None:
        """Forget what blocks hold.

        Raises:
            OSError: A store could not be written; the others have forgotten it.
        """
        self._in_each(Store.void, blocks)

    def erase(self, blocks: Iterable[int]) -> None:
        """Replace by zeros what blocks hold; their records are void.

        Raises:
            OSError: A store could not be written; in the others it is done.
        """
        self._in_each(Store.erase, blocks)

    def _in_each(self, do: Callable[[Store, list[int]], None], blocks: Iterable[int]) -> None:
        numbers, failed = [*blocks], list[OSError]()
        for store in self.stores:
            try:
                do(store, numbers)
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def intact(self, block: int, record: Record) -> bool:
        """Whether the contents are in all stores those that the record was written for."""
        return all(_intact(store, block, record) for store in self.stores)

    def take_locks(self, names: Sequence[str], patience: float = 0.0) -> list[Lock]:
        """Take locks of all stores; see :func:`vllm_kvretrieval.store.disk.store.take_locks`."""
        taken = list[Lock]()
        try:
            for store in self.stores:
                taken += take_locks(store.folder, names, patience)
        except BaseException:
            release(taken)
            raise
        return taken

    def close(self) -> None:
        """Close all stores."""
        for store in self.stores:
            store.close()


def open_ranks(directory: str, name: str, write: bool = False) -> Ranks:
    """Open the stores of an engine.

    Args:
        directory: The directory of all stores.
        name: What the names of their directories begin with.
        write: Whether to write to them.

    Raises:
        RetrievalConfigError: One is damaged, of another format, or open to others.
        OSError: One is missing, or cannot be opened.
    """
    with closing(Folder.at(directory)) as root:
        names = [found for found in store_names(root) if _is_share(found, name)]
    stores = list[Store]()
    with ExitStack() as opened:
        for found in names or [name]:
            stores.append(open_store(directory, found, write))
            opened.callback(stores[-1].close)
        stores.sort(key=lambda store: store.share)
        if [store.share.rank for store in stores] != [*range(stores[0].share.ranks)]:
            raise RetrievalConfigError(
                f"store: {name} of {directory} lacks the part of a worker; start the server, which "
                f"makes it, or remove {', '.join(names)} there."
            )
        opened.pop_all()  # they stay open
    return Ranks(stores)


def names_of_all(root: Folder) -> list[str]:
    """What the names of the directories of all engines begin with."""
    return sorted({name_of_all(name) for name in store_names(root)})


def name_of_all(name: str) -> str:
    """What the name of a store's directory has in common with those of the other workers."""
    return name.partition(".")[0]


def _is_share(found: str, name: str) -> bool:
    """Whether an entry of the directory is a store of an engine, and no copy that somebody made."""
    begin, _, rank = found.partition(".")
    return found == name or (begin == name and rank.isdecimal())


def _same(own: Record | None, record: Record) -> bool:
    """Whether two workers' records are of the same block; each has the sum of its own part."""
    return own is not None and own._replace(sum=record.sum) == record


def _intact(store: Store, block: int, record: Record) -> bool:
    try:
        own = store.record(block)
    except OSError:
        return False
    return own is not None and _same(own, record) and store.intact(block, own)
