"""The home of a KV cache with encoded pages: a file, and memory for pages not yet full."""

import io
import mmap
from contextlib import suppress

import numpy as np
import torch

from vllm_kvretrieval.limits import explained
from vllm_kvretrieval.tiers.file import HomeFile

MAP_NORESERVE = 0x4000  # not named by Python 3.11


class EncodedHome:
    """KV cache of some layers: full pages encoded in a file, the others raw in ``memory``.

    To vLLM ``memory`` is the cache, and it writes there. ``memory`` has addresses for the whole
    cache, but takes memory only for pages that have been written and not yet released. A page is
    released when it is full and the recall cache has encoded it. Reading it there would give zeros,
    so attention reads slots, or the staging buffer.

    The file is read and written by calls only, through the operating system's page cache. Its
    name and its space are as :class:`DiskHome`'s.

    Args:
        directory: The directory of the file.
        layers: Number of layers.
        raw_bytes: Bytes of each layer in vLLM's cache.
        layer_bytes: Bytes of each layer in the file.
        stored: See :class:`HomeFile`.

    Raises:
        RetrievalConfigError: There is not enough space, or the system refuses the file, or the
            addresses; then nothing is left of it.
    """

    def __init__(
        self,
        directory: str,
        layers: int,
        raw_bytes: int,
        layer_bytes: int,
        stored: io.FileIO | None = None,
    ) -> None:
        self.layers, self.layer_bytes = layers, layer_bytes
        self.file = HomeFile(directory, layers * layer_bytes, stored)
        self.fd = self.file.fd
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        refused = "kv_retrieval.codec: no addresses are left for the KV cache as it would be raw"
        with self.file.needed(), explained(refused):
            self._map = mmap.mmap(-1, layers * raw_bytes, flags=flags)
        with suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=torch.int8)

    def begin(self, layer: int) -> int:
        """First byte of a layer in the file, by its number."""
        return layer * self.layer_bytes

    def note_written(self, size: int) -> None:
        """Do nothing: no memory is mapped that could be released."""

    def stage(self, layer: int, runs: np.ndarray, following: np.ndarray | None) -> None:
        """Start on the next layer's parts while this one computes; see :meth:`DiskHome.stage`."""
        if following is not None and layer + 1 < self.layers:
            self.file.read_ahead(self.begin(layer + 1), following)

    def unmap(self, layer: int) -> None:
        """See :meth:`note_written`."""

    def take_lost(self, page_bytes: int) -> set[int]:
        """The empty set: recall caches report pages that cannot be read or written."""
        return set()
