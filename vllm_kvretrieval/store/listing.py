"""What users see of stores: their sizes, and the latest contexts of each."""

from dataclasses import dataclass

from vllm_kvretrieval.store.disk.changes import each_store
from vllm_kvretrieval.store.disk.contexts import (
    beside,
    contexts,
    paths,
    pinned_blocks,
    reachable,
)
from vllm_kvretrieval.store.disk.groups import Parts, groups_of
from vllm_kvretrieval.store.disk.names import read_names, read_pins
from vllm_kvretrieval.store.disk.ranks import Ranks

LEVELS = ("exact", "decoded", "prefilled")
"""Words for ``vllm_kvretrieval.retrieval.exactness_levels.Kind``."""


@dataclass(frozen=True)
class ListedContext:
    """A context.

    Attributes:
        id: First digits of its key.
        tokens: How many a request would find.
        level: How exact it is.
        written: When its last block was stored, in seconds since 1970.
        pinned: Whether it has a pin.
        pinned_tokens: How many of its first tokens are never evicted, whichever pin holds them.
        names: The context's names.
        begins_with: Names of the contexts behind which it goes on, the first one first.
    """

    id: str
    tokens: int
    level: str
    written: int
    pinned: bool
    pinned_tokens: int
    names: list[str]
    begins_with: list[str]


@dataclass(frozen=True)
class ListedStore:
    """A store.

    Attributes:
        name: The name of the store's directory.
        model: The model's class.
        dtype: In which it computes.
        codec: The codec of pages in home.
        vllm: The version of vLLM.
        bytes: Bytes of all files.
        tokens: How many are stored.
        room: How many can be, if all groups of layers keep all blocks.
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
    identity, groups = store.identity, groups_of(store.identity)
    size, every = groups[0].size, store.records()
    records = reachable(every)
    parts = Parts(groups, beside(every, records))
    pins, by_key = read_pins(store.folder), dict[bytes, list[str]]()
    for name, key in read_names(store.folder).items():
        by_key.setdefault(key, []).append(name)
    found = contexts(records, pins.union(by_key))
    held = {records[block].key for block in pinned_blocks(pins, records)}
    rows = []
    shown = found[:most]
    for context, path in zip(shown, paths(shown, records), strict=True):
        keys = [records[block].key for block in path]
        rows.append(
            ListedContext(
                id=context.id,
                tokens=parts.whole(keys) * size,
                level=LEVELS[context.level],
                written=context.created,
                pinned=context.key in pins,
                pinned_tokens=sum(key in held for key in keys) * size,
                names=by_key.get(context.key, []),
                begins_with=[name for key in keys[:-1] for name in by_key.get(key, ())],
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
        room=round(store.blocks / sum(1 / group.size for group in groups)),
        count=len(found),
        contexts=rows,
    )
