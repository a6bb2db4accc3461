"""A store: the keys and values of one model, as one engine lays them out, in a directory.

Under its name it is always whole: it is made, and removed, under another one.
"""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_kvretrieval.disk_space import allocate
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk.files import (
    PIECE,
    Folder,
    Lock,
    read_at,
    read_into,
    read_pieces,
    write_at,
    zero,
)
from vllm_kvretrieval.store.disk.records import RECORD_BYTES, VOID, Record, unpack

FORMAT = 1
"""The directory's format; other formats are refused."""
MOST_USES = 1 << 62
"""No store lets go of so many blocks."""
SECTOR = 512
"""Bytes of the unit in which the system counts the space of a file."""
PREFIX, UNFINISHED = "kv-", ".new-"
IDENTITY, PAGES, SIDE, RECORDS, USED = "identity.json", "pages", "side", "records", "used"
LOCK, WORKER_LOCK = "lock", "worker-lock"
"""The first is held in a store by the server's scheduler, or a command, and in the directory of all
stores by a process that makes or removes one. The other one is held by the worker, which may
outlive the scheduler by a step."""


class WorkerShare(NamedTuple):
    """Which worker of an engine a store is of.

    Attributes:
        rank: The worker's.
        ranks: How many workers there are.
    """

    rank: int
    ranks: int


WHOLE = WorkerShare(0, 1)


@dataclass(frozen=True)
class Geometry:
    """Sizes of a store.

    Attributes:
        blocks: vLLM's blocks; with a slow home, those of groups of layers there.
        layers: Layers in the slow home; 0: there is none.
        layer_block_bytes: Bytes of a block there, in one layer.
        side_bytes: Bytes of a block outside of home: its part of dense layers and of page indexes.
        others: Blocks behind these by number, of groups of layers that do not lie in the slow home.
        other_bytes: Bytes of each of them.
    """

    blocks: int
    layers: int
    layer_block_bytes: int
    side_bytes: int
    others: int = 0
    other_bytes: int = 0

    @property
    def all_blocks(self) -> int:
        """All of vLLM's blocks."""
        return self.blocks + self.others

    def beside(self, block: int) -> tuple[int, int]:
        """Where a block lies in the file of what is outside of home, and how many bytes it has."""
        if block < self.blocks:
            return block * self.side_bytes, self.side_bytes
        begin = self.blocks * self.side_bytes
        return begin + (block - self.blocks) * self.other_bytes, self.other_bytes

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file that grows with the blocks, by its name."""
        return {
            PAGES: self.blocks * self.layers * self.layer_block_bytes,
            SIDE: self.blocks * self.side_bytes + self.others * self.other_bytes,
            RECORDS: self.all_blocks * RECORD_BYTES,
            USED: self.all_blocks * 8,
        }

    @property
    def block_bytes(self) -> int:
        """Bytes of one of the first blocks, in home and outside of it."""
        return self.layers * self.layer_block_bytes + self.side_bytes

    @property
    def bytes(self) -> int:
        """Bytes of all files together."""
        return sum(self.files.values())


class StoreInUseError(RetrievalConfigError):
    """Another process, or another engine of this one, uses a store."""


class Store:
    """An existing store, whose files are open.

    The home's mapping or codec writes ``pages``, and the worker ``side``. When both are complete
    for a block, :meth:`commit` writes its record. Nobody trusts a record before :meth:`intact` has
    read the block again, so the order in which the system writes to the disk does not matter.

    Args:
        folder: The store's directory; closed with the store.
        write: Whether to write to it. Then the space of its files is reserved again, which copies
            from a backup may lack.

    Attributes:
        lacking: Bytes of its files that the disk has no space for.

    Raises:
        RetrievalConfigError: It is damaged, of another format, or open to others.
        OSError: A file of it cannot be opened.
    """

    def __init__(self, folder: Folder, write: bool = False) -> None:
        self.folder = folder
        self._fds: dict[str, int] = {}
        try:
            described = _described(folder)
            self.identity: Mapping[str, Any] = described["identity"]
            self.share = WorkerShare(*described["part"])
            self.geometry = Geometry(**described["geometry"])
            self.id = bytes.fromhex(described["id"])
            for name, size in self.geometry.files.items():
                self._fds[name] = folder.open(name, size, write)
            self.lacking = self._reserve() if write else 0
        except BaseException:
            self.close()
            raise
        used = read_pieces(self._fds[USED], self.geometry.files[USED])
        self.used = np.frombuffer(used, dtype=np.uint64)
        """uint64 [blocks]; of the blocks that were let go of later the larger numbers."""
        self.used[self.used >= MOST_USES] = 0  # what is damaged

    def _reserve(self) -> int:
        """Reserve what the files have not got of their space; the bytes that cannot be had."""
        sizes = {self._fds[name]: size for name, size in self.geometry.files.items() if size}
        holes = sum(max(size - os.fstat(fd).st_blocks * SECTOR, 0) for fd, size in sizes.items())
        disk = os.fstatvfs(self._fds[RECORDS])
        if (more := holes - disk.f_bavail * disk.f_frsize) > 0:
            return more  # to try it would fill the disk up
        try:
            for fd, size in sizes.items():
                allocate(fd, size)
        except OSError:  # a quota, for instance
            return holes
        return 0

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self.folder.close()

    @property
    def pages_fd(self) -> int:
        """Descriptor of the home's file, which the store closes."""
        return self._fds[PAGES]

    def records(self) -> dict[int, Record]:
        """The records by block, but for those that are void, damaged, or cannot be read."""
        return unpack(bytes(read_pieces(self._fds[RECORDS], self.geometry.files[RECORDS])))

    def record(self, block: int) -> Record | None:
        """The record of a block; None: it is void or damaged."""
        return unpack(bytes(read_at(self._fds[RECORDS], RECORD_BYTES, block * RECORD_BYTES))).get(0)

    def commit(self, block: int, record: Record) -> None:
        """Write the record of a block whose contents are complete.

        Raises:
            OSError: The contents cannot be read, or the record cannot be written.
        """
        record = record._replace(sum=self._sum(block, record))
        write_at(self._fds[RECORDS], record.pack(), block * RECORD_BYTES)

    def void(self, blocks: Iterable[int]) -> None:
        """Forget what blocks hold.

        Raises:
            OSError: Some records cannot be written; the others have been.
        """
        failed: OSError | None = None
        for block in blocks:
            try:
                write_at(self._fds[RECORDS], VOID, block * RECORD_BYTES)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed

    def erase(self, blocks: Iterable[int], slowly: bool = True) -> None:
        """Replace by zeros what blocks hold; their records are void.

        Args:
            blocks: The blocks' numbers.
            slowly: See :func:`zero`.

        Raises:
            OSError: The contents of some blocks cannot be replaced.
        """
        sizes = self.geometry
        for first, count in _runs(sorted(blocks), sizes.blocks):
            for layer in range(sizes.layers if first < sizes.blocks else 0):
                place = (layer * sizes.blocks + first) * sizes.layer_block_bytes
                if not zero(self._fds[PAGES], place, count * sizes.layer_block_bytes, slowly):
                    return
            place, size = sizes.beside(first)
            if size and not zero(self._fds[SIDE], place, count * size, slowly):
                return

    def note_use(self, blocks: Sequence[int], first: int) -> None:
        """Number blocks, which are let go of in this order, from ``first`` on.

        Raises:
            OSError: The file has not got the numbers; ``used`` has.
        """
        self.used[[*blocks]] = np.arange(first, first + len(blocks))
        each = PIECE // self.used.itemsize
        for piece in {block // each for block in blocks}:
            # A whole piece: to change a part of one, the system would have to read it.
            numbers = self.used[piece * each : (piece + 1) * each]
            write_at(self._fds[USED], numbers.tobytes(), piece * PIECE)

    def intact(self, block: int, record: Record) -> bool:
        """Whether the block's contents are those that its record was written for."""
        try:
            return self._sum(block, record) == record.sum
        except OSError:
            return False

    def write_side(self, block: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write all that a block has outside of home."""
        views = [memoryview(part).cast("B") for part in parts]
        place, size = self.geometry.beside(block)
        assert sum(map(len, views)) == size
        for view in views:
            write_at(self._fds[SIDE], view, place)
            place += len(view)

    def read_side(self, block: int) -> bytearray:
        """Read what :meth:`write_side` wrote; raises OSError where that is impossible."""
        place, size = self.geometry.beside(block)
        return read_at(self._fds[SIDE], size, place)

    def _sum(self, block: int, record: Record) -> bytes:
        sizes = self.geometry
        total = hashlib.sha256(self.id + record.seed())
        begin, beside = sizes.beside(block)
        buffer = memoryview(bytearray(max(sizes.layer_block_bytes, beside)))
        part = buffer[: sizes.layer_block_bytes]
        for layer in range(sizes.layers if block < sizes.blocks else 0):
            place = (layer * sizes.blocks + block) * sizes.layer_block_bytes
            read_into(self._fds[PAGES], part, place)
            total.update(part)
        part = buffer[:beside]
        read_into(self._fds[SIDE], part, begin)
        total.update(part)
        return total.digest()


def _runs(numbers: Sequence[int], cut: int) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers: the first one, and how many there are.

    Args:
        numbers: Rising.
        cut: A number that is always the first one of its run.
    """
    first = 0
    for end in range(1, len(numbers) + 1):
        goes_on = end < len(numbers) and numbers[end] == numbers[end - 1] + 1 != cut
        if not goes_on:
            yield numbers[first], end - first
            first = end


def open_store(directory: str, name: str, write: bool = False) -> Store:
    """Open a store by the path of the directory of all stores, and its name there.

    Raises:
        RetrievalConfigError: See :class:`Store`.
        OSError: There is none, or it cannot be opened.
    """
    root = Folder.at(directory)
    try:
        return Store(root.folder(name), write)
    finally:
        root.close()


def name_of(identity: Mapping[str, Any], share: WorkerShare = WHOLE) -> str:
    """The name of a store's directory; other identities have other names.

    Args:
        identity: See :func:`make_store`.
        share: The worker's.
    """
    name = PREFIX + hashlib.sha256(_canonical(identity)).hexdigest()[:16]
    return name if share == WHOLE else f"{name}.{share.rank}"


def take_locks(
    folder: Folder,
    names: Sequence[str],
    patience: float = 0.0,
    progress: Callable[[], object] = lambda: None,
) -> list[Lock]:
    """Take locks of a store, so that nobody else writes to it.

    Args:
        folder: The store's directory.
        names: Names of the locks.
        patience: Seconds to wait for another process.
        progress: See :meth:`Lock.take`.

    Raises:
        StoreInUseError: Another process has one of them; says which.
    """
    taken = list[Lock]()
    for name in names:
        taken.append(Lock(folder, name))
        if not taken[-1].take(patience, progress):
            owner = taken[-1].owner
            release(taken)
            if owner == str(os.getpid()):
                owner += " (another engine of this process, or a process of another container)"
            raise StoreInUseError(
                f"store: {folder.path} is in use by process {owner}; stop it first, or name "
                "another directory."
            )
    return taken


def release(locks: Iterable[Lock]) -> None:
    """Drop locks."""
    for lock in locks:
        lock.close()


def store_names(root: Folder) -> list[str]:
    """Names of the directories of all stores."""
    return [name for name in root.names() if name.startswith(PREFIX)]


def _described(folder: Folder) -> dict[str, Any]:
    """What the file with the identity says."""
    damaged, remedy = f"store: {folder.path / IDENTITY} is damaged", f"Remove {folder.path}."
    try:
        text = folder.read(IDENTITY)
    except FileNotFoundError:
        raise RetrievalConfigError(f"{damaged}. {remedy}") from None
    try:
        described = json.loads(text)
        said = described.pop("sum")
        found = described["format"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RetrievalConfigError(
            f"store: {folder.path / IDENTITY} is damaged. {remedy}"
        ) from None
    if found != FORMAT:
        raise RetrievalConfigError(
            f"store: {folder.path} has format {found}, and this release writes {FORMAT}. {remedy}"
        )
    if said != sum_of(described):
        raise RetrievalConfigError(f"{damaged}. {remedy}")
    if name_of(described["identity"], WorkerShare(*described["part"])) != folder.path.name:
        raise RetrievalConfigError(
            f"store: {folder.path} was given another name than its contents have. {remedy}"
        )
    return dict(described)


def _canonical(described: Any) -> bytes:
    return json.dumps(described, sort_keys=True, separators=(",", ":")).encode()


def sum_of(described: Any) -> str:
    """The sum by which a store's description vouches for itself."""
    return hashlib.sha256(_canonical(described)).hexdigest()


def make_store(
    root: Folder,
    identity: Mapping[str, Any],
    geometry: Geometry,
    reserve: Callable[[int, int, str], None],
    share: WorkerShare = WHOLE,
) -> None:
    """Make an empty store.

    Its directory gets its name when everything in it is complete and on the disk. The caller holds
    the lock of the directory above it, so that others leave alone what is unfinished.

    Args:
        root: The directory of all stores.
        identity: All that the meaning of the bytes depends on; what JSON can hold.
        geometry: The store's sizes.
        reserve: Gives a file its size and space: descriptor, bytes, directory for messages.
        share: Which worker the store is of.
    """
    name = _unfinished()
    folder = root.folder(name, make=True)
    try:
        for file, size in geometry.files.items():
            fd = folder.make(file)
            try:
                if size:
                    reserve(fd, size, str(root.path))
                os.fsync(fd)
            finally:
                os.close(fd)
        described = {
            "format": FORMAT,
            "id": secrets.token_hex(16),
            "identity": identity,
            "part": share,
            "geometry": asdict(geometry),
        }
        sealed = described | {"sum": sum_of(described)}
        folder.replace(IDENTITY, json.dumps(sealed, indent=1).encode())
        folder.sync()
        root.rename(name, name_of(identity, share))
    except BaseException:
        root.remove(name)
        raise
    finally:
        folder.close()


def remove_store(root: Folder, name: str) -> None:
    """Remove a store that is locked; if the process ends before, what is left is unfinished."""
    root.rename(name, new := _unfinished())
    root.remove(new)


def _unfinished() -> str:
    """A new name for a store that is not whole."""
    return UNFINISHED + secrets.token_hex(8)


def _all_unfinished(root: Folder) -> list[str]:
    """Names of what is being made, or was when its process ended, or is being removed."""
    return [name for name in root.names() if name.startswith(UNFINISHED)]


def remove_unfinished(root: Folder) -> int:
    """Remove what processes have left that ended while they made a store; how many there were.

    The caller holds the lock of the directory.
    """
    removed = 0
    for name in _all_unfinished(root):
        with contextlib.suppress(OSError):
            root.remove(name)
            removed += 1
    return removed


def size_of_unfinished(root: Folder) -> int:
    """Bytes of the files of what is being made; they grow while a process writes zeros."""
    size = 0
    for name in _all_unfinished(root):
        leave_out = contextlib.suppress(OSError, RetrievalConfigError)
        with leave_out, contextlib.closing(root.folder(name)) as folder:
            size += sum(folder.stat(file).st_size for file in folder.names())
    return size
