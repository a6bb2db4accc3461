"""KV in a file, of which pages are recalled into slots; see :class:`RecallCache`."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_kvretrieval.kernels import Chooser, DecodeRows, TokenLists, cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.codec import Codec
from vllm_kvretrieval.storage.base import LayerPlace, Part, Ready
from vllm_kvretrieval.storage.file import FileFacts, FileLayer, FileStorage


class FilePagesLayer(FileLayer):
    """A retrieval layer; see :class:`FileLayer`.

    Args:
        facts: The home.
        place: The layer.
        codec: What its pages are encoded by; None: they are not.
    """

    def __init__(self, facts: FileFacts, place: LayerPlace, codec: Codec | None = None) -> None:
        super().__init__(facts, place)
        _, kv_heads, page_size, width = place.kv_cache.shape
        self.cache = cpu.RecallCache(
            place.kv_cache.view(-1, 1, 2 * page_size, width // 2),
            facts.slots[place.name],
            kv_heads,
            facts.counts,
            (facts.home.fd, facts.home.begin(self.reader.number)),
            codec,
        )
        self.slots = self.cache.slots
        self._units = self._as_units(self.slots)

    def written(self, slot_mapping: torch.Tensor) -> None:
        """See :meth:`RecallCache.write`."""
        self.cache.write(slot_mapping)

    def reach(self, rows: DecodeRows, lists: TokenLists, ready: Ready) -> Sequence[Part]:
        """See :meth:`RecallCache.resolve`."""
        self.cache.resolve(rows)
        return ((lists, self._units),)

    def ahead(self, rows: DecodeRows, chooser: Chooser) -> None:
        """See :meth:`RecallCache.prefetch`."""
        self.cache.prefetch(rows, chooser)


class FilePages(FileStorage):
    """An engine's KV in a file, by pages; see :class:`FileStorage`."""

    token_major = False

    def refuse_two_directions(self, config: RetrievalConfig) -> None:
        """vLLM's kernel reads pages in the mapped file."""

    def layer(self, place: LayerPlace) -> FilePagesLayer:
        """See :meth:`Storage.layer`."""
        layer = FilePagesLayer(self.facts, place)
        self.pages.append(layer.cache)
        return layer

    def share(self, layer: Any, following: Sequence[Any]) -> Any:
        """Layers after a filter attend to single tokens, which are not recalled here."""
        raise NotImplementedError("filters select single tokens")
