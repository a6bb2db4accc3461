"""What users see of stores: their sizes, and the latest contexts of each."""

from dataclasses import dataclass

from vllm_kvretrieval.store.changes import each_store
from vllm_kvretrieval.store.contexts import contexts, paths, reachable, read_names, read_pins
from vllm_kvretrieval.store.ranks import Ranks

LEVELS = ("exact", "decoded", "prefilled")
"""Words for ``vllm_kvretrieval.engine.levels.Kind``."""


@dataclass(frozen=True)
class ListedContext:
    """A context.

    Attributes:
        id: First digits of its key.
        tokens: How many are stored.
        level: How exact it is.
        written: When its last block was stored, in seconds since 1970.
        pinned: Whether it, or what it begins with, is never evicted.
        names: Names of it, and of what it begins with.
    """

    id: str
    tokens: int
    level: str
    written: int
    pinned: bool
    names: list[str]


@dataclass(frozen=True)
class ListedStore:
    """A store.

    Attributes:
        name: Of its directory.
        model: The model's class.
        dtype: In which it computes.
        codec: Of pages in home.
        vllm: The version of vLLM.
        bytes: Of all files.
        tokens: How many are stored.
        room: How many can be.
        count: How many contexts there are.
        contexts: The latest of them, latest first.
    """

    name: str
    model: str
    dtype: str
    codec: str
    vllm: str
    bytes: int
    tokens: int
    room: int
    count: int
    contexts: list[ListedContext]


def listed(directory: str, most: int) -> tuple[list[ListedStore], list[str]]:
    """The stores of a directory; nobody has to stop using them. And why others are left out.

    Args:
        directory: The directory of all stores.
        most: Contexts per store.

    Raises:
        RetrievalConfigError: Others may write to the directory.
        OSError: There is no such directory.
    """
    return each_store(directory, lambda store: _listed(store, most))


def _listed(store: Ranks, most: int) -> ListedStore:
    identity, size = store.identity, store.identity["block_size"]
    records = reachable(store.records())
    found, pins, names = contexts(records), read_pins(store.folder), read_names(store.folder)
    rows = []
    shown = found[:most]
    for context, path in zip(shown, paths(shown, records), strict=True):
        keys = {records[block].key for block in path}
        own = [name for name, key in names.items() if key in keys]
        rows.append(
            ListedContext(
                id=context.id,
                tokens=context.length * size,
                level=LEVELS[context.level],
                written=context.created,
                pinned=not keys.isdisjoint(pins),
                names=own,
            )
        )
    return ListedStore(
        name=store.name,
        model=identity["model"],
        dtype=identity["dtype"],
        codec=identity["codec"],
        vllm=identity["vllm"],
        bytes=store.bytes,
        tokens=len(records) * size,
        room=store.blocks * size,
        count=len(found),
        contexts=rows,
    )
