"""The worker's half of a store: it hands on blocks that are complete, and reads those needed."""

import contextlib
import io
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import RecallCache
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.home_file import check_room, reserve
from vllm_kvretrieval.storage.lost import Lost
from vllm_kvretrieval.storage.tier_sizes import Cache, Tiers
from vllm_kvretrieval.store.disk.files import Folder, Lock
from vllm_kvretrieval.store.disk.ranks import name_of_all, names_of_all
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.store.disk.store import (
    LOCK,
    WHOLE,
    WORKER_LOCK,
    Geometry,
    Store,
    WorkerShare,
    make_store,
    name_of,
    release,
    remove_unfinished,
    size_of_unfinished,
    store_names,
    take_locks,
)
from vllm_kvretrieval.store.serving.halves import Fault, StoreStep, started
from vllm_kvretrieval.system_limits import explained

logger = init_logger("vllm.kvretrieval.store")

GIB = 1 << 30
WAIT_S = 60.0
"""How long a new worker waits for one of an earlier server that has yet to end its last step."""
STOPS_S = 5.0
"""How long it waits for a scheduler that may be about to stop."""
PATIENCE = 3
"""Blocks that cannot be stored, one after the other, before no more are tried."""


class BlockWriter:
    """Stores complete blocks while the engine goes on.

    Copying and hashing a block takes milliseconds, and lets other threads run meanwhile. A complete
    block does not change any more; one that is about to be overwritten has to be given up before.

    Args:
        store: Where blocks are stored; open for writing.
        cores: Logical CPUs that the thread may run on. vLLM binds the thread that computes to one
            of them, which a new thread would share.

    Attributes:
        written: How many blocks have been stored.

    Raises:
        RetrievalConfigError: The process may not have the thread.
    """

    def __init__(self, store: Store, cores: Collection[int]) -> None:
        self._store = store

        def spread() -> None:
            with contextlib.suppress(OSError):  # it is slower then
                os.sched_setaffinity(0, cores)

        self._thread = started(1, "store-write", spread)
        self._waiting: dict[int, Future[None]] = {}
        self._failures = 0
        self.written = 0

    def write(self, block: int, record: Record, side: Sequence[memoryview]) -> None:
        """Store a block.

        Args:
            block: The block's number; its pages are complete in home.
            record: The block's record, whose sum is missing.
            side: What it has outside of home, in bytes.
        """
        if self._failures < PATIENCE:
            self._waiting[block] = self._thread.submit(self._write, block, record, side)

    def give_up(self, blocks: Iterable[int]) -> None:
        """Store none of these blocks, or have stored them before this returns."""
        for block in blocks:
            if block in self._waiting and self._waiting[block].cancel():
                del self._waiting[block]
            elif block in self._waiting:
                self._end(block)

    def look(self) -> None:
        """Take the results of blocks that have been stored, or could not be."""
        for block in [block for block, write in self._waiting.items() if write.done()]:
            self._end(block)

    def close(self) -> None:
        """Wait until all blocks are stored."""
        self._thread.shutdown()
        self.look()

    def _write(self, block: int, record: Record, side: Sequence[memoryview]) -> None:
        self._store.write_side(block, side)
        self._store.commit(block, record)

    def _end(self, block: int) -> None:
        """Wait for a block, and take its result."""
        try:
            self._waiting.pop(block).result()
            self._failures, self.written = 0, self.written + 1
        except Exception as error:
            self._failures += 1
            more = "" if self._failures < PATIENCE else " No more are stored until the next start."
            logger.error("store: a block cannot be stored (%s).%s", error, more)


class WorkerStore:
    """The store of a worker's slow home.

    Args:
        directory: The directory of all stores.
        identity: All that the meaning of the bytes depends on.
        share: Which of the workers this is.

    Attributes:
        name: The name of the store's directory.
        blocks: Blocks of the store that there is; None: it has yet to be made.

    Raises:
        RetrievalConfigError: Another server uses the store, or it is damaged, or open to others.
    """

    def __init__(
        self, directory: str, identity: Mapping[str, Any], share: WorkerShare = WHOLE
    ) -> None:
        self._directory, self._identity, self._share = directory, identity, share
        self.name = name_of(identity, share)
        self._parts: list[torch.Tensor] = []
        self._others: Sequence[torch.Tensor] = ()
        self._caches: Sequence[RecallCache] = ()
        self._pages, self._has_home = 1, False
        self._lost: Lost | None = None
        self._pending: dict[int, Record] = {}
        self._found = 0
        self._void_fault = Fault("records cannot be written")
        self._erase_fault = Fault("keys and values of what is forgotten stay in the files")
        self._store: Store | None = None
        self._writer: BlockWriter | None = None
        self.blocks: int | None = None
        with self._explained(), closing(Folder.at(directory, make=True)) as root:
            others = {*names_of_all(root)} - {name_of_all(self.name)}
            if others:
                logger.info(
                    "store: %s holds %d stores of other models or options, too; see "
                    "`vllm-kvretrieval store ls`.",
                    directory,
                    len(others),
                )
            _clear(root)
            if self.name in store_names(root):
                self._open(root)

    @property
    def _removal(self) -> str:
        """The command that removes the store of all workers, and no other."""
        path = shlex.quote(f"{self._directory}/{name_of_all(self.name)}")
        return f"`rm -r {path}{'' if self._share == WHOLE else '.*'}`"

    def _explained(self) -> Any:
        return explained(f"kv_retrieval.store={self._directory!r} cannot be used")

    def _open(self, root: Folder) -> None:
        with closing(root.folder(self.name)) as folder:
            self._lock = take_worker_lock(folder)
        self._store = Store(root.folder(self.name), write=True)
        if self._store.lacking:
            raise RetrievalConfigError(
                f"kv_retrieval.store: the files of {self._store.folder.path} lack a part of their "
                "space, as after a backup that leaves zeros out, and the disk has "
                f"{self._store.lacking / GIB:.2f} GiB too little for it. Free as much, or remove "
                f"the store ({self._removal})."
            )
        with self._erase_fault.noted():  # what a server has left that was killed
            recorded = self._store.records()
            left = [n for n in range(self._store.geometry.all_blocks) if n not in recorded]
            self._store.erase(left, slowly=False)
        self._writer = BlockWriter(self._store, os.sched_getaffinity(os.getppid()))
        self.blocks = self._store.geometry.all_blocks

    def blocks_for(self, cache: Cache, config: RetrievalConfig, wanted: int | None) -> int:
        """How many blocks the engine has to have, since the store has them.

        Args:
            cache: The KV cache of the worker.
            config: Options of the engine.
            wanted: The user's number (``--num-gpu-blocks-override``), or None.

        Raises:
            RetrievalConfigError: The user wants another number, or the longest request more.
        """
        assert self._store is not None
        given = f"--num-gpu-blocks-override {wanted}"
        if wanted is None and config.home_bytes is not None:
            sizes = self._store.geometry
            wanted = config.home_bytes // (sizes.layers * sizes.layer_block_bytes) + sizes.others
            given = f"kv_retrieval.home_bytes={config.home_bytes} ({wanted} blocks)"
        self._check_blocks(wanted, given)
        assert self.blocks is not None
        if self._store.geometry.blocks < cache.blocks_for(1):
            raise RetrievalConfigError(
                f"--max-model-len {cache.max_model_len}: one request needs {cache.blocks_for(1)} "
                f"blocks, and the store {self._store.folder.path} has "
                f"{self._store.geometry.blocks}. Lower it, or remove the store ({self._removal})."
            )
        return self.blocks

    def memory_for(self, available: int, block_bytes: int, wanted: int | None) -> int:
        """Bytes that the KV cache has to have in memory, since the store has the blocks.

        Args:
            available: Bytes that it may have.
            block_bytes: Bytes of a block in all layers.
            wanted: How many blocks the user wants (``--num-gpu-blocks-override``), or None.

        Raises:
            RetrievalConfigError: The user wants another number, or there is too little memory.
        """
        if self.blocks is None:
            return available
        assert self._store is not None
        self._check_blocks(wanted, f"--num-gpu-blocks-override {wanted}")
        needed = self.blocks * block_bytes
        if needed > available:
            raise RetrievalConfigError(
                f"kv_retrieval.store: {self._store.folder.path} has {self.blocks} blocks, of "
                f"{format_gib(needed)} GiB, and the KV cache may have {format_gib(available)} GiB. "
                "Give it more memory (--kv-cache-memory-bytes), or remove the store "
                f"({self._removal})."
            )
        return needed

    def _check_blocks(self, wanted: int | None, given: str) -> None:
        assert self._store is not None
        if wanted is not None and wanted != self.blocks:
            raise RetrievalConfigError(
                f"{given}: the store {self._store.folder.path} has {self.blocks} blocks, and its "
                f"size cannot change. Leave the option out, or remove the store ({self._removal})."
            )

    def has_dense(self, cache: Cache) -> bool:
        """Whether dense layers are in home, too."""
        assert self._store is not None
        return self._store.geometry.layers > cache.retrieval_layers

    def make(self, geometry: Geometry) -> None:
        """Make the store if there is none.

        Args:
            geometry: The engine's.

        Raises:
            RetrievalConfigError: The store has other sizes, or there is no room for it.
        """
        if self._store is None:
            with self._explained(), closing(Folder.at(self._directory)) as root:
                # As long as it takes another worker to write zeros.
                locks = take_locks(root, [LOCK], WAIT_S, lambda: size_of_unfinished(root))
                try:
                    if self.name not in store_names(root):  # another server may have been faster
                        remove_unfinished(root)  # which takes room
                        check_room(self._directory, geometry.bytes)
                        make_store(root, self._identity, geometry, reserve, self._share)
                finally:
                    release(locks)
                self._open(root)
            assert self._store is not None
            logger.info(
                "store: %s was made in %s, %s GiB.",
                self.name,
                self._directory,
                format_gib(geometry.bytes),
            )
        if self._store.geometry != geometry:
            raise RetrievalConfigError(
                f"kv_retrieval.store: {self._store.folder.path} was made for another division of "
                f"memory ({self._store.geometry}) than there is room for now ({geometry}): give "
                "the KV cache as much memory as then (--kv-cache-memory-bytes), or remove the "
                f"store ({self._removal})."
            )

    def file(self, geometry: Geometry) -> io.FileIO:
        """The home's file; see :meth:`make`."""
        self.make(geometry)
        self._has_home = True
        assert self._store is not None
        return os.fdopen(self._store.pages_fd, "r+b", buffering=0, closefd=False)

    def attach(
        self,
        parts: Sequence[torch.Tensor],
        lost: Lost,
        caches: Sequence[RecallCache] = (),
        pages: int = 1,
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        """Say what blocks have outside of a slow home; without one, that is all of them.

        Args:
            parts: Layers and page indexes, uint8 [blocks, bytes of a block] each.
            lost: Is told of blocks that cannot be read.
            caches: The recall caches of pages that are encoded in home.
            pages: Per block.
            others: The same as ``parts``, of blocks that do not lie in the slow home; they have
                rows for all numbers.
        """
        size = sum(part.shape[1] for part in parts)
        if not self._has_home:
            self.make(Geometry(len(parts[0]), 0, 0, size))
        assert self._store is not None
        assert size == self._store.geometry.side_bytes
        assert sum(part.shape[1] for part in others) == self._store.geometry.other_bytes
        self._parts, self._caches = [part for part in parts if part.shape[1]], caches
        self._others = others
        self._lost, self._pages = lost, pages

    def begin_step(self, step: StoreStep) -> None:
        """Follow a step before it computes; what it relies on and cannot be read is lost."""
        assert self._store is not None
        assert self._writer is not None
        assert self._lost is not None
        for block in step.void:
            self._pending.pop(block, None)
        self._writer.give_up(step.void)
        if step.void:
            with self._void_fault.noted():  # a record of other contents is found out by its sum
                self._store.void(step.void)
        if step.erase:
            with self._erase_fault.noted():
                self._store.erase(step.erase)
        self._lost.add({block for block in step.load if not self._load(block)})

    def _load(self, block: int) -> bool:
        """Bring into memory what a block has outside of home; whether that was possible."""
        assert self._store is not None
        try:
            data = self._store.read_side(block)
        except OSError as error:
            logger.error("store: block %d cannot be read (%s).", block, error)
            return False
        begin = 0
        for part in self._parts_of(block):
            size = part.shape[1]
            part[block] = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=begin)
            begin += size
        for cache in self._caches:
            cache.adopt(self._pages_of(block))
        self._found += 1
        return True

    def end_step(self, step: StoreStep) -> None:
        """Store the blocks that are complete after a step.

        If home has lost something that the step may have read, nothing is stored.
        """
        assert self._lost is not None
        assert self._writer is not None
        self._writer.look()
        if self._lost.some:
            self._pending.clear()
            return
        self._pending.update(step.commit)
        complete = [block for block in self._pending if self._closed(block)]
        for block in complete:
            side = [part[block].numpy().data for part in self._parts_of(block)]
            self._writer.write(block, self._pending.pop(block), side)

    def take_counts(self) -> dict[str, int]:
        """Blocks written, and blocks of an earlier run that were found, since the last call."""
        assert self._writer is not None
        assert self._store is not None
        written, self._writer.written = self._writer.written, 0
        found, self._found = self._found, 0
        size = self._store.geometry.block_bytes
        return {
            "store_blocks_written": written,
            "store_bytes_written": written * size,
            "store_blocks_found": found,
        }

    def close(self) -> None:
        """Store what has yet to be stored; others may use the store then."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._lock.close()

    def _parts_of(self, block: int) -> Sequence[torch.Tensor]:
        """What memory has of a block."""
        assert self._store is not None
        return self._parts if block < self._store.geometry.blocks else self._others

    def _closed(self, block: int) -> bool:
        """Whether all pages of a block have got their final form in home, in all layers."""
        return all(cache.closed(self._pages_of(block)) for cache in self._caches)

    def _pages_of(self, block: int) -> list[int]:
        assert self._store is not None
        if block >= self._store.geometry.blocks:
            return []
        return [block * self._pages + page for page in range(self._pages)]


def _clear(root: Folder) -> None:
    """Remove what was left unfinished, whose room can be used, unless a store is being made."""
    with closing(Lock(root, LOCK)) as lock:
        if lock.take():
            remove_unfinished(root)


def geometry_of(tiers: Tiers, layers: int) -> Geometry:
    """Sizes of the store that fits a division of memory.

    Args:
        tiers: The division.
        layers: Layers in home.
    """
    return Geometry(
        blocks=tiers.blocks,
        layers=layers,
        layer_block_bytes=tiers.home // layers // tiers.blocks,
        side_bytes=(tiers.dense + tiers.index) // tiers.blocks,
        others=tiers.other_blocks,
        other_bytes=tiers.others // tiers.other_blocks if tiers.other_blocks else 0,
    )


def take_worker_lock(folder: Folder) -> Lock:
    """The lock of a store's worker; waits for one that has yet to end its last step.

    Raises:
        RetrievalConfigError: A server, or a command, uses the store.
    """
    release(take_locks(folder, [LOCK], STOPS_S))
    lock = Lock(folder, WORKER_LOCK)
    if not lock.take():
        owner = lock.owner
        lock.close()
        logger.info("store: waiting for process %s, which uses %s.", owner, folder.path)
        (lock,) = take_locks(folder, [WORKER_LOCK], WAIT_S)
    return lock
