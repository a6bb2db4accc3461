"""KV in a file, encoded; pages that requests are filling are raw in memory."""

import io
import mmap
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.allocation import addresses
from vllm_kvretrieval.storage.base import StepContexts, StorageFacts
from vllm_kvretrieval.storage.file import Reads
from vllm_kvretrieval.storage.file_pages import FilePages, FilePagesLayer
from vllm_kvretrieval.storage.home_file import HomeFile
from vllm_kvretrieval.storage.mapped import page_runs
from vllm_kvretrieval.system_limits import explained


class EncodedHome(HomeFile):
    """KV cache of some layers: full pages encoded in a file, the others raw in ``memory``.

    To vLLM ``memory`` is the cache, and it writes there. ``memory`` has addresses for the whole
    cache, but takes memory only for pages that have been written and not yet released. A page is
    released when it is full and the recall cache has encoded it. Reading it there would give zeros,
    so attention reads slots, or the staging buffer.

    The file is read and written by calls only, through the operating system's page cache. Recall
    caches report pages that cannot be read or written.

    Args:
        directory, layers, layer_bytes, stored: See :class:`HomeFile`.
        raw_bytes: Bytes of each layer in vLLM's cache.

    Raises:
        RetrievalConfigError: See :class:`HomeFile`; or the system refuses the addresses.
    """

    def __init__(
        self,
        directory: str,
        layers: int,
        raw_bytes: int,
        layer_bytes: int,
        stored: io.FileIO | None = None,
    ) -> None:
        super().__init__(directory, layers, layer_bytes, stored)
        refused = "kv_retrieval.codec: no addresses are left for the KV cache as it would be raw"
        with self.needed(), explained(refused):
            self._map, self.memory = addresses(layers * raw_bytes)
        with suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_NOHUGEPAGE)


@dataclass
class _Written:
    """The open pages that a request has written, in the order of its context."""

    first: int  # position in the context of the first page
    pages: list[int] = field(default_factory=list)
    tokens: int = 0  # in the context, without drafts


class OpenPages:
    """Follows running requests and says which pages are to be encoded, and when.

    A page is open for the request that writes it. Other requests that share the page read it as it
    is: raw while it is among that request's latest pages, decoded afterwards.

    Args:
        page_size: Tokens per page.
        keeps: Full pages at the end of a context that stay open, beside the one being filled.
    """

    def __init__(self, page_size: int, keeps: int) -> None:
        self._page_size, self._keeps = page_size, keeps
        self._of: dict[str, _Written] = {}

    def advance(
        self,
        requests: Iterable[str],
        before: np.ndarray,
        after: np.ndarray,
        certain: np.ndarray,
        pages: np.ndarray,
    ) -> list[int]:
        """Follow a step.

        Args:
            requests: The requests in the batch, by id.
            before: int [R]; tokens of each context before the step.
            after: int [R]; tokens of each context after the step.
            certain: int [R]; the same without drafts. A page with drafts stays open, since other
                tokens may take their places.
            pages: int [R, >= pages of a context]; ids in context order.

        Returns:
            Pages to be encoded at the end of the step.
        """
        closing = []
        size = self._page_size
        tokens = before.tolist(), after.tolist(), certain.tolist()
        rows = zip(requests, *tokens, pages, strict=False)
        for request, start, end, stay, table in rows:
            if (own := self._of.get(request)) is None:
                own = self._of[request] = _Written(start // size)
            have = own.first + len(own.pages)
            own.pages += table[have : -(-end // size)].tolist()
            own.tokens = stay
            leaving = max(0, stay // size - self._keeps - own.first)
            closing += own.pages[:leaving]
            del own.pages[:leaving]
            own.first += leaving
        return closing

    def end(self, requests: Iterable[str]) -> tuple[list[int], list[int]]:
        """Forget requests that no longer run.

        Args:
            requests: Their ids; unknown ones are ignored.

        Returns:
            Pages to be encoded now, and partly filled pages, which will never be read.
        """
        full, unfinished = list[int](), list[int]()
        for request in requests:
            own = self._of.pop(request, None)
            if own is None:
                continue
            count = own.tokens // self._page_size - own.first
            full += own.pages[:count]
            unfinished += own.pages[count:]
        return full, unfinished


class EncodedReads(NamedTuple):
    """The work of a step with home.

    Attributes:
        ahead: The pages that layers lay out, for the system to read ahead.
        leaving: int64 [n]; pages to be encoded at the end of the step.
    """

    ahead: Reads
    leaving: torch.Tensor


class EncodedLayer(FilePagesLayer):
    """A retrieval layer; only its slots, and pages laid out, can be read."""

    def contexts(self, reads: EncodedReads | None) -> AbstractContextManager[object]:
        """Read ahead, and encode afterwards the pages that are due."""
        return nullcontext() if reads is None else self._closing(reads)

    @contextmanager
    def _closing(self, reads: EncodedReads) -> Iterator[None]:
        with super().contexts(reads.ahead):
            yield
        if len(reads.leaving):
            self.cache.close(reads.leaving)

    def lay_out(self, pages: torch.Tensor, target: torch.Tensor, layout: str) -> None:
        """See :meth:`RecallCache.stage`."""
        self.cache.stage(pages, target)


class Encoded(FilePages):
    """An engine's encoded KV; see :class:`FileStorage`."""

    in_place = False
    layer_kind = EncodedLayer

    def __init__(self, config: RetrievalConfig, facts: StorageFacts) -> None:
        super().__init__(config, facts)
        self.encoded_pages = self.pages
        self._open = OpenPages(config.page_size, config.open_pages)
        self._leaving: torch.Tensor | None = None  # of this step, once it is planned

    def _make_home(
        self, directory: str, layers: int, layer_bytes: int, stored: io.FileIO | None
    ) -> EncodedHome:
        encoded = self.tiers.home // layers
        return EncodedHome(directory, layers, layer_bytes, encoded, stored)

    def refuse_two_directions(self, config: RetrievalConfig) -> None:
        """See :meth:`Storage.refuse_two_directions`."""
        raise RetrievalConfigError(
            f"kv_retrieval.codec={config.codec} is not supported for models that attend to some of "
            "their input in both directions, as this one; use raw."
        )

    def plan(self, step: StepContexts) -> EncodedReads:
        """Find the pages that have become full, and those to be laid out.

        Every metadata builder asks once in a step, and all of them are told the same full pages.
        """
        if self._leaving is None:
            self._unpin(step)
            full = self._open.advance(
                step.requests, step.before, step.lens, step.certain, step.block_table
            )
            self._leaving = torch.tensor(full, dtype=torch.int64)
        runs = None
        if step.laid_out:
            pages = torch.cat([*step.laid_out]).numpy()
            runs = page_runs(pages[pages >= 0], self.page_bytes)
        return EncodedReads(Reads(None, runs), self._leaving)

    def begin_step(self, scheduler_output: Any) -> None:
        """See :meth:`Storage.begin_step`."""
        super().begin_step(scheduler_output)
        self._leaving = None
        copies = scheduler_output.kv_cache_block_copies or ()
        if any(target < self.tiers.blocks for _, target in copies):
            raise RuntimeError("vLLM copies blocks of a KV cache that is encoded elsewhere")

    def leave(self, seats: Iterable[int], requests: Iterable[str]) -> None:
        """See :meth:`Storage.leave`."""
        super().leave(seats, requests)
        full, unfinished = self._open.end(requests)
        for cache in self.pages:
            cache.close(torch.tensor(full, dtype=torch.int64))
            cache.abandon(unfinished)
