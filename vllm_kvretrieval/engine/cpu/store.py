"""The worker's half of a store: it writes what a step has completed, and reads what one needs."""

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib

from vllm_kvretrieval.engine.store_steps import StoreStep
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import RecallCache
from vllm_kvretrieval.limits import explained
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.file import FileStorage
from vllm_kvretrieval.storage.lost import LostBlocks
from vllm_kvretrieval.store.files import Folder, Lock
from vllm_kvretrieval.store.records import Record
from vllm_kvretrieval.store.store import (
    LOCK,
    WORKER_LOCK,
    Geometry,
    Store,
    make_store,
    name_of,
    release,
    store_names,
    take_locks,
)
from vllm_kvretrieval.tiers.cache import Cache
from vllm_kvretrieval.tiers.place import check_room, reserve
from vllm_kvretrieval.tiers.sizes import Tiers

logger = init_logger("vllm.kvretrieval.store")

PATIENCE = 3
"""Blocks that cannot be stored, one after the other, before no more are tried."""
WAIT_S = 60.0
"""How long a new worker waits for one of an earlier server that has yet to end its last step."""
STOPS_S = 5.0
"""How long it waits for a scheduler that may be about to stop."""


class HomeStore:
    """The store of a worker's slow home.

    Args:
        directory: The directory of all stores.
        identity: All that the meaning of the bytes depends on.

    Attributes:
        name: Of the store's directory.
        blocks: Blocks of the store that there is; None: it has yet to be made.

    Raises:
        RetrievalConfigError: Another server uses the store, or it is damaged, or open to others.
    """

    def __init__(self, directory: str, identity: Mapping[str, Any]) -> None:
        self._directory, self._identity = directory, identity
        self.name = name_of(identity)
        self._parts: list[torch.Tensor] = []
        self._caches: Sequence[RecallCache] = ()
        self._pages = 1
        self._lost: LostBlocks | None = None
        self._pending: dict[int, Record] = {}
        self._failures = 0
        self._written = self._found = 0
        self._store: Store | None = None
        self.blocks: int | None = None
        with self._explained(), closing(Folder.at(directory, make=True)) as root:
            others = [name for name in store_names(root) if name != self.name]
            if others:
                logger.info(
                    "store: %s holds %d stores of other models or options, too; see "
                    "`vllm-kvretrieval store ls`.",
                    directory,
                    len(others),
                )
            if self.name in store_names(root):
                self._open(root)

    def _explained(self) -> Any:
        return explained(f"kv_retrieval.store={self._directory!r} cannot be used")

    def _open(self, root: Folder) -> None:
        with closing(root.folder(self.name)) as folder:
            self._lock = take_worker_lock(folder)
        self._store = Store(root.folder(self.name), write=True)
        self.blocks = self._store.geometry.blocks

    def blocks_for(self, cache: Cache, config: RetrievalConfig, wanted: int | None) -> int:
        """How many blocks the engine has to have, since the store has them.

        Args:
            cache: The KV cache of the worker.
            config: Options of the engine.
            wanted: What the user wants (``--num-gpu-blocks-override``), or None.

        Raises:
            RetrievalConfigError: The user wants another number, or the longest request more.
        """
        assert self._store is not None
        assert self.blocks is not None
        path, has = self._store.folder.path, f"{self.blocks} blocks"
        given = f"--num-gpu-blocks-override {wanted}"
        if wanted is None and config.home_bytes is not None:
            sizes = self._store.geometry
            wanted = config.home_bytes // (sizes.layers * sizes.layer_block_bytes)
            given = f"kv_retrieval.home_bytes={config.home_bytes} ({wanted} blocks)"
        if wanted is not None and wanted != self.blocks:
            raise RetrievalConfigError(
                f"{given}: the store {path} has {has}, and its size cannot change. Leave the "
                "option out, or remove the store with `vllm-kvretrieval store gc --all`."
            )
        if self.blocks < cache.blocks_for(1):
            raise RetrievalConfigError(
                f"--max-model-len {cache.max_model_len}: one request needs {cache.blocks_for(1)} "
                f"blocks, and the store {path} has {has}. Lower it, or remove the store with "
                "`vllm-kvretrieval store gc --all`."
            )
        return self.blocks

    def has_dense(self, cache: Cache) -> bool:
        """Whether dense layers are in home, too."""
        assert self._store is not None
        return self._store.geometry.layers > cache.retrieval_layers

    def file(self, geometry: Geometry) -> io.FileIO:
        """The home's file; makes the store if there is none.

        Args:
            geometry: What the engine needs.

        Raises:
            RetrievalConfigError: The store has other sizes, or there is no room for it.
        """
        if self._store is None:
            with self._explained(), closing(Folder.at(self._directory)) as root:
                locks = take_locks(root, [LOCK], WAIT_S)
                try:
                    if self.name not in store_names(root):  # another server may have been faster
                        check_room(self._directory, geometry.bytes)
                        make_store(root, self._identity, geometry, reserve)
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
                "store with `vllm-kvretrieval store gc --all`."
            )
        return os.fdopen(self._store.pages_fd, "r+b", buffering=0, closefd=False)

    def attach(self, parts: Sequence[torch.Tensor], storage: FileStorage) -> None:
        """Say what blocks have outside of home.

        Args:
            parts: Dense layers and page indexes, uint8 [blocks, bytes of a block] each.
            storage: What is in front of home.
        """
        assert self._store is not None
        assert sum(part.shape[1] for part in parts) == self._store.geometry.side_bytes
        self._parts, self._caches = list(parts), storage.encoded_pages
        self._lost, self._pages = storage.lost, storage.facts.pages_per_block

    def begin_step(self, step: StoreStep) -> None:
        """Follow a step before it computes; what it relies on and cannot be read is lost."""
        assert self._store is not None
        assert self._lost is not None
        for block in step.void:
            self._pending.pop(block, None)
        try:
            self._store.void(step.void)
        except OSError as error:
            # A record of other contents is found out by its sum.
            logger.error("store: records cannot be written (%s).", error)
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
        for part in self._parts:
            size = part.shape[1]
            if size:
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
        if self._lost.some:
            self._pending.clear()
            return
        self._pending.update(step.commit)
        complete = [block for block in self._pending if self._closed(block)]
        for block in complete:
            self._commit(block, self._pending.pop(block))

    def _commit(self, block: int, record: Record) -> None:
        assert self._store is not None
        if self._failures >= PATIENCE:
            return
        try:
            side = [part[block].numpy() for part in self._parts]
            self._store.write_side(block, b"".join(data.tobytes() for data in side))
            self._store.commit(block, record)
            self._failures, self._written = 0, self._written + 1
        except OSError as error:
            self._failures += 1
            more = "" if self._failures < PATIENCE else " No more are stored until the next start."
            logger.error("store: a block cannot be stored (%s).%s", error, more)

    def take_counts(self) -> dict[str, int]:
        """Blocks written, and blocks of an earlier run that were found, since the last call."""
        counts = {"store_blocks_written": self._written, "store_blocks_found": self._found}
        self._written = self._found = 0
        return counts

    def _closed(self, block: int) -> bool:
        """Whether all pages of a block have got their final form in home, in all layers."""
        return all(cache.closed(self._pages_of(block)) for cache in self._caches)

    def _pages_of(self, block: int) -> list[int]:
        return [block * self._pages + page for page in range(self._pages)]


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
