"""KV in a file: the parts that all kinds share."""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.kernels import RecallCache, TokenRecall
from vllm_kvretrieval.kernels.cpu import MappingGuard
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.base import LayerCache, StepContexts, StorageFacts, Usage
from vllm_kvretrieval.storage.home_file import HomeFile, check_room, directory_for, free_space
from vllm_kvretrieval.storage.lost import LostBlocks
from vllm_kvretrieval.storage.mapped import DiskHome, page_runs
from vllm_kvretrieval.storage.memory import IN_PLACE, InPlace, MemoryLayer
from vllm_kvretrieval.storage.tier_sizes import Cache, Tiers


class Reads(NamedTuple):
    """The parts of home that a step reads in place: :func:`page_runs`; None: nothing.

    Attributes:
        dense: In layers that attend to everything.
        retrieving: In the others.
    """

    dense: np.ndarray | None
    retrieving: np.ndarray | None


class InHome:
    """A layer in home, whose whole contexts are read there.

    Attributes:
        number: The layer's number in home.
    """

    def _lie_in(self, storage: "FileStorage", name: str) -> None:
        self._file, self.number = storage.home, storage.slow_layers.index(name)
        self._dense = name in storage.dense
        following = storage.slow_layers[self.number + 1 : self.number + 2]
        self._dense_follows = bool(storage.dense.intersection(following))

    def contexts(self, reads: Any) -> AbstractContextManager[object]:
        """Map the :class:`Reads` of the layer; begin to read those of the next one."""
        runs = None if reads is None else self._of(reads, self._dense)
        return nullcontext() if reads is None or runs is None else self._mapped(reads, runs)

    @contextmanager
    def _mapped(self, reads: Reads, runs: np.ndarray) -> Iterator[None]:
        self._file.stage(self.number, runs, self._of(reads, self._dense_follows))
        try:
            yield
        finally:
            self._file.unmap(self.number)

    @staticmethod
    def _of(reads: Reads, dense: bool) -> np.ndarray | None:
        return reads.dense if dense else reads.retrieving


class DenseFileLayer(InHome, InPlace):
    """A layer that attends to everything, from home."""

    def __init__(self, storage: "FileStorage", name: str) -> None:
        self._lie_in(storage, name)


class FileLayer(InHome, MemoryLayer):
    """A retrieval layer in home, with slots in fast memory.

    Args:
        storage: All layers.
        cache: The layer.

    Attributes:
        slots: The slots.
    """

    slots: torch.Tensor

    def __init__(self, storage: "FileStorage", cache: LayerCache) -> None:
        super().__init__(cache)
        self._lie_in(storage, cache.name)


def plan_file(
    config: RetrievalConfig, cache: Cache, fast: int, staging: int, blocks: int | None, workers: int
) -> Tiers:
    """The division of memory with a home in a file.

    Args:
        config: Options of the engine.
        cache: The KV cache of the worker.
        fast: Bytes of fast memory for everything together.
        staging: Bytes of the staging buffer.
        blocks: Number of blocks, if the user has fixed it.
        workers: Number of workers that share the disk; all ask before any makes its file.

    Raises:
        RetrievalConfigError: See :meth:`Tiers.plan`; or the disk has too little room.
    """
    directory = directory_for(config.home_directory)
    tiers = Tiers.plan(config, cache, fast, staging, blocks, free_space(directory) // workers)
    check_room(directory, tiers.home, workers, tiers.fast)
    return tiers


class FileStorage:
    """An engine's KV in a file.

    Args:
        config: Options of the engine.
        facts: The layers, and the division of memory.

    Attributes:
        home: The file, once it is allocated.
        slow_layers: Names of the layers in it.
        dense: Names of those that attend to everything.
        slots: Slots of each retrieval layer in fast memory, by name.
        pages: Recall caches of layers, where pages are recalled.
        tokens: Recalls of layers and filters, where single tokens are.
        lost: Blocks that cannot be read any more.
    """

    in_place, at_hand = True, False
    allocates = True
    encoded_pages: Sequence[RecallCache] = ()
    home: HomeFile
    lost: LostBlocks

    def __init__(self, config: RetrievalConfig, facts: StorageFacts) -> None:
        assert facts.tiers is not None
        self.config, self.tiers, self._stored = config, facts.tiers, facts.stored
        self._groups = facts.groups
        self.slots = dict(zip(facts.retrieving, facts.tiers.slots, strict=True))
        self.block_size, self.block_pages = facts.block_size, facts.block_size // config.page_size
        self.slow_layers: Sequence[str] = ()
        self.dense = frozenset[str]()
        self.pages: list[RecallCache] = []
        self._ends: dict[str, int] = {}  # tokens of the contexts of requests, drafts included
        self.tokens: list[TokenRecall] = []

    def allocate(
        self, names: Sequence[str], layer_bytes: int
    ) -> Sequence[tuple[Sequence[str], torch.Tensor]]:
        """See :meth:`Storage.allocate`."""
        at_home = names if self.tiers.streams_dense else [n for n in names if n in self.slots]
        self.slow_layers, self.dense = at_home, frozenset(at_home).difference(self.slots)
        beside = [name for name in names if name not in at_home]
        directory = directory_for(self.config.home_directory)
        stored = None if self._stored is None else self._stored(len(at_home))
        self.home = self._make_home(directory, len(at_home), layer_bytes, stored)
        self.lost = LostBlocks(
            self.home,
            self.pages,
            directory,
            self.tiers.blocks,
            self.block_size,
            self.block_pages,
            self._groups,
        )
        memory = torch.zeros(len(beside) * layer_bytes, dtype=torch.int8)
        return (beside, memory), (at_home, self.home.memory)

    def _make_home(
        self, directory: str, layers: int, layer_bytes: int, stored: io.FileIO | None
    ) -> HomeFile:
        return DiskHome(directory, layers, layer_bytes, MappingGuard, stored)

    @property
    def page_bytes(self) -> int:
        """Bytes in home of a layer's page."""
        return self.home.layer_bytes // (self.tiers.blocks * self.block_pages)

    @property
    def _recalls(self) -> Sequence[RecallCache | TokenRecall]:
        return self.pages or self.tokens

    def dense_layer(self, name: str) -> InPlace:
        """See :meth:`Storage.dense_layer`."""
        return DenseFileLayer(self, name) if name in self.slow_layers else IN_PLACE

    def plan(self, step: StepContexts) -> Any:
        """The parts of home that the layers read in place, if a context exceeds all budgets."""
        self._unpin(step)
        retrieving = self._runs(step, step.whole)
        if step.whole is None:
            return Reads(retrieving, retrieving)
        return Reads(self._runs(step, None) if self.dense else None, retrieving)

    def _unpin(self, step: StepContexts) -> None:
        """Let go of pages that rejected drafts have begun, which begin anew in the step."""
        size = self.config.page_size
        tokens = step.before.tolist(), step.lens.tolist()
        for request, seat, before, end in zip(
            step.requests, step.seats.tolist(), *tokens, strict=False
        ):
            if -(-before // size) * size < self._ends.get(request, 0):
                for cache in self.pages:
                    cache.release(seat)
            self._ends[request] = end

    def _runs(self, step: StepContexts, requests: np.ndarray | None) -> np.ndarray | None:
        chosen = slice(None) if requests is None else requests
        pages = -(-step.lens[chosen] // self.config.page_size)
        if not (pages > step.most_pages).any():
            return None
        table = step.block_table[chosen]
        used = table[np.arange(table.shape[1]) < pages[:, None]]
        return page_runs(used, self.page_bytes)

    def begin_step(self, scheduler_output: Any) -> None:
        """See :meth:`Storage.begin_step`."""
        self.lost.begin_step(scheduler_output)
        per_block = range(self.block_pages)
        for cache in self.pages:
            for _, target in scheduler_output.kv_cache_block_copies or ():
                if target >= self.tiers.blocks:
                    continue  # of layers that do not lie here
                cache.drop_pages([target * len(per_block) + page for page in per_block])

    def end_step(self, tokens: int) -> None:
        """See :meth:`Storage.end_step`."""
        capacity = self.tiers.blocks * self.block_size
        self.home.note_written(tokens * self.home.memory.numel() // capacity)

    def leave(self, seats: Iterable[int], requests: Iterable[str]) -> None:
        """See :meth:`Storage.leave`."""
        for seat in seats:
            for recall in self._recalls:
                recall.release(seat)
        for request in requests:
            self._ends.pop(request, None)

    def check(self) -> str:
        """See :meth:`Storage.check`."""
        return "; ".join(filter(None, (recall.check() for recall in self._recalls)))

    @property
    def usage(self) -> Usage:
        """See :attr:`Storage.usage`."""
        recalls, slots = self._recalls, sum(self.tiers.slots)
        read = recalls[0].bytes_per_read if recalls else 0
        return Usage(slots, sum(recall.used for recall in recalls), read)
