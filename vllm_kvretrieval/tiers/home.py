"""The home of a KV cache that does not fit in fast memory: a file."""

import contextlib
import io
import itertools
import mmap
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from vllm_kvretrieval.tiers.file import HomeFile

TRIM_BYTES = 64 << 20
MADV_POPULATE_READ = 22  # Linux 5.14; not named by Python 3.11


class Guard(Protocol):
    """Keeps a mapping usable; see :class:`vllm_kvretrieval.kernels.cpu.MappingGuard`."""

    def take(self) -> list[tuple[int, int]]:
        """Parts of the mapping found unreadable since the last call: first byte, and end."""
        ...


def page_runs(pages: np.ndarray, page_bytes: int) -> np.ndarray:
    """Byte ranges of pages within a layer.

    Args:
        pages: Ids in any order, with repetitions; at least one.
        page_bytes: Bytes of a layer's page.

    Returns:
        int64 [n, 2]; first byte and length of every run of adjacent pages, rising.
    """
    pages = np.unique(pages).astype(np.int64)
    starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    counts = np.diff(starts, append=len(pages))
    return np.stack([pages[starts], counts], axis=1) * page_bytes


class DiskHome:
    """KV cache of some layers in a file, mapped into memory, one layer after the other.

    ``read`` calls see at once what is written to ``memory``: both go through the operating system's
    page cache, which writes to the disk when it sees fit, and grows and shrinks with the free
    memory. The mapping is released regularly, so that the resident memory of the process is
    bounded: by ``TRIM_BYTES`` of new tokens, and by one layer's share of the contexts that a step
    reads in place. A second mapping, for reading single tokens, is released at the same times;
    until then it keeps the pages that were read, which the system may take back.

    Parts that cannot be read count as zeros, and :meth:`take_lost` reports them.

    Unless it is the file of a store, it never has a name that outlives the call that makes it, so
    nothing is left behind when the process ends. Its space is reserved when it is made, so a full
    disk is found at start-up.

    Args:
        directory: The directory of the file.
        layers: Number of layers.
        layer_bytes: Bytes of each layer.
        guard: Keeps the process alive where a part of the file cannot be read, and reports it; made
            of the mapping, the descriptor, and whether the system leaves out neighbours of the
            parts that are read (``MADV_RANDOM``).
        stored: See :class:`HomeFile`.

    Raises:
        RetrievalConfigError: There is not enough space, or the system refuses to make the file or
            to map it; then nothing is left of it.
    """

    def __init__(
        self,
        directory: str,
        layers: int,
        layer_bytes: int,
        guard: Callable[[torch.Tensor, int, bool], Guard],
        stored: io.FileIO | None = None,
    ) -> None:
        self.layers, self.layer_bytes = layers, layer_bytes
        self.file = HomeFile(directory, layers * layer_bytes, stored)
        self.fd = self.file.fd
        self._mapped = 0
        self._guard_of = guard
        self._guards: list[Guard] = []
        self._map, self.memory = self._mapping()
        self._scattered: tuple[mmap.mmap, torch.Tensor] | None = None

    def _mapping(self, scattered: bool = False) -> tuple[mmap.mmap, torch.Tensor]:
        """A guarded mapping of the whole file, and the same as a tensor, int8 [bytes]."""
        with self.file.needed():
            mapping = mmap.mmap(self.fd, self.layers * self.layer_bytes)
            if scattered:
                mapping.madvise(mmap.MADV_RANDOM)
            memory = torch.frombuffer(mapping, dtype=torch.int8)
            self._guards.append(self._guard_of(memory, self.fd, scattered))
        return mapping, memory

    def begin(self, layer: int) -> int:
        """First byte of a layer, by its number."""
        return layer * self.layer_bytes

    def note_written(self, size: int) -> None:
        """Count bytes written to ``memory``; release the mapping after ``TRIM_BYTES`` of them."""
        self._mapped += size
        if self._mapped > TRIM_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            if self._scattered is not None:
                self._scattered[0].madvise(mmap.MADV_DONTNEED)
            self._mapped = 0

    def scattered(self, layer: int) -> torch.Tensor:
        """A layer for reading single tokens: the system does not read their neighbours.

        Args:
            layer: The layer's number.

        Returns:
            int8 [layer_bytes]; in a mapping of its own, which the first call makes.
        """
        if self._scattered is None:
            self._scattered = self._mapping(scattered=True)
        begin = self.begin(layer)
        return self._scattered[1][begin : begin + self.layer_bytes]

    def stage(self, layer: int, runs: np.ndarray, following: np.ndarray | None) -> None:
        """Bring parts of a layer into the page cache and map them, and start on the next layer's.

        The next layer's parts travel while this layer computes. Nothing is copied, so there is no
        staging buffer to outgrow.

        Args:
            layer: The layer's number.
            runs: The parts, see :func:`page_runs`.
            following: The parts of the next layer; None if it is not read in place.
        """
        start = self.begin(layer)
        # A hint: touching a part brings it in, or shows that it is lost.
        with contextlib.suppress(OSError):
            for first, size in runs.tolist():
                begin = (start + first) // mmap.PAGESIZE * mmap.PAGESIZE
                self._map.madvise(MADV_POPULATE_READ, begin, start + first + size - begin)
        if following is not None and layer + 1 < self.layers:
            self.file.read_ahead(self.begin(layer + 1), following)

    def unmap(self, layer: int) -> None:
        """Release a layer's part of the mapping; the page cache keeps what it has room for."""
        begin = self.begin(layer) // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, begin, self.begin(layer + 1) - begin)

    def take_lost(self, page_bytes: int) -> set[int]:
        """Ids of pages that could not be read in some layer.

        Each page is reported once, or as long as the file cannot be mapped there again.

        Args:
            page_bytes: Bytes of a layer's page.
        """
        pages, lost = self.layer_bytes // page_bytes, set[int]()
        for first, end in itertools.chain.from_iterable(guard.take() for guard in self._guards):
            parts = range(first // page_bytes, -(-end // page_bytes))
            lost.update(part % pages for part in parts[:pages])  # further parts repeat the pages
        return lost
