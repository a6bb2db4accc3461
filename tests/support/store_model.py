"""A small store for tests, what it should hold, and disks that fail."""

import errno
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from vllm_kvretrieval.store.disk.contexts import NO_PARENT
from vllm_kvretrieval.store.disk.files import Folder, write_at
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.store.disk.store import Geometry, Store, make_store, name_of, open_store

IDENTITY = {"model": "test", "dtype": "bfloat16"}
GEOMETRY = Geometry(blocks=16, layers=3, layer_block_bytes=40, side_bytes=24)
DIVIDED = Geometry(10, layers=3, layer_block_bytes=40, side_bytes=24, others=6, other_bytes=72)
"""As many blocks, some of which do not lie in the slow home."""


class Crash(BaseException):
    """The process ends here."""


def truncate(fd, size, directory):
    """Give a file its size."""
    os.ftruncate(fd, size)


def new_store(path: Path, geometry: Geometry = GEOMETRY, identity=IDENTITY) -> Store:
    root = Folder.at(str(path), make=True)
    make_store(root, identity, geometry, truncate)
    root.close()
    return open_store(str(path), name_of(identity), write=True)


def again(store: Store) -> Store:
    """The same store, opened anew."""
    path = store.folder.path
    store.close()
    return open_store(str(path.parent), path.name, write=True)


def contents(store: Store, block: int) -> bytes:
    """All bytes of a block, in pages and beside them."""
    sizes = store.geometry
    parts = []
    for layer in range(sizes.layers if block < sizes.blocks else 0):
        place = (layer * sizes.blocks + block) * sizes.layer_block_bytes
        parts.append(os.pread(store.pages_fd, sizes.layer_block_bytes, place))
    return b"".join(parts) + bytes(store.read_side(block))


def write(store: Store, block: int, data: bytes) -> None:
    """Give a block such contents, as a step of the engine does."""
    sizes = store.geometry
    layers = sizes.layers if block < sizes.blocks else 0
    for layer in range(layers):
        place = (layer * sizes.blocks + block) * sizes.layer_block_bytes
        begin = layer * sizes.layer_block_bytes
        write_at(store.pages_fd, data[begin : begin + sizes.layer_block_bytes], place)
    store.write_side(block, [data[layers * sizes.layer_block_bytes :]])


def block_bytes(sizes: Geometry, block: int = 0) -> int:
    beside = sizes.beside(block)[1]
    return beside + (sizes.layers * sizes.layer_block_bytes if block < sizes.blocks else 0)


@dataclass
class Model:
    """What a store should hold, and what it may.

    Attributes:
        live: By block, the record without its sum, and the contents: it has to be found.
        written: Contents of every record that was ever to be written: nothing else may be found.
    """

    random: random.Random
    live: dict[int, tuple[Record, bytes]] = field(default_factory=dict)
    written: dict[Record, bytes] = field(default_factory=dict)
    clock: int = 0

    def record(self, level: int = 0) -> Record:
        """A record of a new block; few keys, so that many records have the same."""
        self.clock += 1
        key = bytes([self.random.randrange(8)]) * 32
        return Record(key, NO_PARENT, 0, level, self.clock)

    def fill(self, store: Store, block: int) -> None:
        """Write a block and its record."""
        record = self.record(self.random.randrange(3))
        data = self.random.randbytes(block_bytes(store.geometry, block))
        self.live.pop(block, None)
        self.written[record] = data
        write(store, block, data)
        store.commit(block, record)
        self.live[block] = record, data

    def check(self, store: Store, complete: bool = True) -> None:
        """Compare: nothing wrong is offered and, if ``complete``, nothing is missing."""
        offered = {}
        for block, record in store.records().items():
            if store.intact(block, record):
                offered[block] = record._replace(sum=bytes(32)), contents(store, block)
        for record, data in offered.values():
            assert self.written[record] == data
        if complete:
            assert offered == self.live


class FailingDisk:
    """Takes the place of ``os.pwrite``: fails, writes less, or ends the process.

    Attributes:
        left: Writes until then; None: never.
        error: What happens: a number of an error, ``"short"``, or ``"crash"``.
        part: Share of the write that is done before.
    """

    def __init__(self, monkeypatch) -> None:
        self.left: int | None = None
        self.error: int | str = errno.ENOSPC
        self.part = 0.5
        self.calls = 0
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, fd, data, offset):
        self.calls += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                return self._fail(fd, memoryview(data), offset)
        return self._pwrite(fd, data, offset)

    def _fail(self, fd, data, offset):
        self.left = None
        done = self._pwrite(fd, data[: int(self.part * len(data))], offset)
        if self.error == "crash":
            raise Crash
        if not isinstance(self.error, int):
            return done
        raise OSError(self.error, os.strerror(self.error))
