"""KV in a file: what all kinds of it have in common."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.kernels import RecallCache, TokenRecall
from vllm_kvretrieval.storage.base import LayerCache, StepContexts, Usage
from vllm_kvretrieval.storage.home_file import HomeFile
from vllm_kvretrieval.storage.lost import LostBlocks
from vllm_kvretrieval.storage.mapped import page_runs
from vllm_kvretrieval.storage.memory import InPlace, MemoryLayer


@dataclass(frozen=True)
class FileFacts:
    """A home and the fast memory in front of it.

    Attributes:
        home: Where the KV is.
        directory: The directory of the home's file, for messages.
        names: Names of the layers in home, in its order.
        dense: Names of those that attend to everything.
        slots: Slots of each retrieval layer, by name.
        seats: Most requests that run at once.
        counts: int64 [S, 3]; units looked up, missed and recalled.
        blocks: vLLM's blocks.
        block_size: Tokens of each.
        page_size: Tokens of a page.
    """

    home: HomeFile
    directory: str
    names: Sequence[str]
    dense: frozenset[str]
    slots: dict[str, int]
    seats: int
    counts: torch.Tensor
    blocks: int
    block_size: int
    page_size: int

    @property
    def page_bytes(self) -> int:
        """Bytes in home of a layer's page."""
        return self.home.layer_bytes // (self.blocks * self.pages_per_block)

    @property
    def pages_per_block(self) -> int:
        return self.block_size // self.page_size


class Reads(NamedTuple):
    """What a step reads of home in place: :func:`page_runs`, None: nothing.

    Attributes:
        dense: In layers that attend to everything.
        retrieving: In the others.
    """

    dense: np.ndarray | None
    retrieving: np.ndarray | None


class HomeReader:
    """One layer's access to whole contexts in home.

    Args:
        facts: The home.
        name: The layer's name.
    """

    def __init__(self, facts: FileFacts, name: str) -> None:
        self.home, self.number = facts.home, facts.names.index(name)
        self._dense = name in facts.dense
        following = facts.names[self.number + 1 : self.number + 2]
        self._dense_follows = bool(facts.dense.intersection(following))

    def contexts(self, reads: Reads | None) -> AbstractContextManager[object]:
        """Map what the step reads of the layer; begin to read what it reads of the next one."""
        runs = None if reads is None else self._of(reads, self._dense)
        return nullcontext() if reads is None or runs is None else self._mapped(reads, runs)

    @contextmanager
    def _mapped(self, reads: Reads, runs: np.ndarray) -> Iterator[None]:
        self.home.stage(self.number, runs, self._of(reads, self._dense_follows))
        try:
            yield
        finally:
            self.home.unmap(self.number)

    @staticmethod
    def _of(reads: Reads, dense: bool) -> np.ndarray | None:
        return reads.dense if dense else reads.retrieving


class DenseFileLayer(InPlace):
    """A layer that attends to everything, from home."""

    def __init__(self, facts: FileFacts, name: str) -> None:
        self._reader = HomeReader(facts, name)

    def contexts(self, reads: Reads | None) -> AbstractContextManager[object]:
        """See :meth:`HomeReader.contexts`."""
        return self._reader.contexts(reads)


class FileLayer(MemoryLayer):
    """A retrieval layer in home, with slots in fast memory.

    Args:
        facts: The home.
        cache: The layer.

    Attributes:
        slots: The slots.
        reader: Access to whole contexts.
    """

    slots: torch.Tensor

    def __init__(self, facts: FileFacts, cache: LayerCache) -> None:
        super().__init__(cache)
        self.reader = HomeReader(facts, cache.name)

    def contexts(self, reads: Any) -> AbstractContextManager[object]:
        """See :meth:`HomeReader.contexts`."""
        return self.reader.contexts(reads)


class FileStorage:
    """An engine's KV in a file.

    Args:
        facts: The home, and the fast memory in front of it.

    Attributes:
        pages: Recall caches of layers, where pages are recalled.
        tokens: Recalls of layers and filters, where single tokens are.
        lost: Blocks that cannot be read any more.
    """

    in_place, at_hand = True, False
    encoded_pages: Sequence[RecallCache] = ()

    def __init__(self, facts: FileFacts) -> None:
        self.facts, self.block_pages = facts, facts.pages_per_block
        self.pages: list[RecallCache] = []
        self.tokens: list[TokenRecall] = []
        self.lost = LostBlocks(
            facts.home,
            self.pages,
            facts.directory,
            facts.blocks,
            facts.block_size,
            facts.pages_per_block,
        )

    @property
    def _recalls(self) -> Sequence[RecallCache | TokenRecall]:
        return self.pages or self.tokens

    def dense_layer(self, name: str) -> InPlace:
        """See :meth:`Storage.dense_layer`."""
        return DenseFileLayer(self.facts, name) if name in self.facts.names else InPlace()

    def plan(self, step: StepContexts) -> Any:
        """The parts of home that the layers read in place, if a context exceeds all budgets."""
        retrieving = self._runs(step, step.whole)
        if step.whole is None:
            return Reads(retrieving, retrieving)
        return Reads(self._runs(step, None) if self.facts.dense else None, retrieving)

    def _runs(self, step: StepContexts, requests: np.ndarray | None) -> np.ndarray | None:
        chosen = slice(None) if requests is None else requests
        pages = -(-step.lens[chosen] // self.facts.page_size)
        if not (pages > step.most_pages).any():
            return None
        table = step.block_table[chosen]
        used = table[np.arange(table.shape[1]) < pages[:, None]]
        return page_runs(used, self.facts.page_bytes)

    def begin_step(self, scheduler_output: Any) -> None:
        """See :meth:`Storage.begin_step`."""
        self.lost.begin_step(scheduler_output)
        per_block = range(self.facts.pages_per_block)
        for cache in self.pages:
            for _, target in scheduler_output.kv_cache_block_copies or ():
                cache.drop_pages([target * len(per_block) + page for page in per_block])

    def end_step(self, tokens: int) -> None:
        """See :meth:`Storage.end_step`."""
        home, capacity = self.facts.home, self.facts.blocks * self.facts.block_size
        home.note_written(tokens * home.memory.numel() // capacity)

    def leave(self, seats: Iterable[int], requests: Iterable[str]) -> None:
        """See :meth:`Storage.leave`."""
        for seat in seats:
            for recall in self._recalls:
                recall.release(seat)

    def check(self) -> str:
        """See :meth:`Storage.check`."""
        return "; ".join(filter(None, (recall.check() for recall in self._recalls)))

    @property
    def usage(self) -> Usage:
        """See :attr:`Storage.usage`."""
        recalls, slots = self._recalls, sum(self.facts.slots.values())
        read = recalls[0].bytes_per_read if recalls else 0
        return Usage(slots, sum(recall.used for recall in recalls), read)
