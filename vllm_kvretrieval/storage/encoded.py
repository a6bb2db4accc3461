"""KV in a file, encoded; pages that requests are filling are raw in memory."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.codec import Codec
from vllm_kvretrieval.storage.base import LayerPlace, StepContexts
from vllm_kvretrieval.storage.file import FileFacts, Reads
from vllm_kvretrieval.storage.file_pages import FilePages, FilePagesLayer
from vllm_kvretrieval.tiers.fast import FastTier
from vllm_kvretrieval.tiers.home import page_runs


class EncodedReads(NamedTuple):
    """What a step does with home.

    Attributes:
        ahead: What layers lay out, for the system to read ahead.
        leaving: int64 [n]; pages to be encoded at the end of the step.
    """

    ahead: Reads
    leaving: torch.Tensor


class EncodedLayer(FilePagesLayer):
    """A retrieval layer; only slots and what is laid out of it can be read."""

    def contexts(self, reads: EncodedReads | None) -> AbstractContextManager[object]:
        """Read ahead, and encode afterwards the pages that are due."""
        return nullcontext() if reads is None else self._closing(reads)

    @contextmanager
    def _closing(self, reads: EncodedReads) -> Iterator[None]:
        with self.reader.contexts(reads.ahead):
            yield
        if len(reads.leaving):
            self.cache.close(reads.leaving)

    def lay_out(self, pages: torch.Tensor, target: torch.Tensor, layout: str) -> None:
        """See :meth:`RecallCache.stage`."""
        self.cache.stage(pages, target)


class Encoded(FilePages):
    """An engine's encoded KV; see :class:`FileStorage`.

    Args:
        facts: The home, and the fast memory in front of it.
        streams: See :class:`FilePagesLayer`.
        codec: What pages are encoded by.
        open_pages: Full pages at the end of a context that are not yet encoded.
    """

    in_place = False

    def __init__(self, facts: FileFacts, streams: bool, codec: Codec, open_pages: int) -> None:
        super().__init__(facts, streams)
        self._codec, self.encoded_pages = codec, self.pages
        self._open = FastTier(facts.page_size, open_pages)
        self._leaving: torch.Tensor | None = None  # of this step, once it is planned

    def refuse_two_directions(self, config: RetrievalConfig) -> None:
        """See :meth:`Storage.refuse_two_directions`."""
        raise RetrievalConfigError(
            f"kv_retrieval.codec={config.codec} is not supported for models that attend to some of "
            "their input in both directions, as this one; use raw."
        )

    def layer(self, place: LayerPlace) -> EncodedLayer:
        """See :meth:`Storage.layer`."""
        layer = EncodedLayer(self.facts, place, self.streams, self._codec)
        self.pages.append(layer.cache)
        return layer

    def plan(self, step: StepContexts) -> EncodedReads:
        """Find the pages that have become full, and those to be laid out.

        Every metadata builder asks once in a step, and all of them are told the same full pages.
        """
        if self._leaving is None:
            full = self._open.advance(step.requests, step.before, step.lens, step.block_table)
            self._leaving = torch.tensor(full, dtype=torch.int64)
        runs = None
        if step.laid_out:
            pages = torch.cat([*step.laid_out]).numpy()
            runs = page_runs(pages[pages >= 0], self.facts.page_bytes)
        return EncodedReads(Reads(None, runs), self._leaving)

    def begin_step(self, scheduler_output: Any) -> None:
        """See :meth:`Storage.begin_step`."""
        super().begin_step(scheduler_output)
        self._leaving = None
        if scheduler_output.kv_cache_block_copies:
            raise RuntimeError("vLLM copies blocks of a KV cache that is encoded elsewhere")

    def leave(self, seats: Iterable[int], requests: Iterable[str]) -> None:
        """See :meth:`Storage.leave`."""
        super().leave(seats, requests)
        full, unfinished = self._open.end(requests)
        for cache in self.pages:
            cache.close(torch.tensor(full, dtype=torch.int64))
            cache.abandon(unfinished)
