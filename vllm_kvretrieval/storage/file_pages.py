"""KV in a file, from which pages are recalled into slots; see :class:`RecallCache`."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from vllm_kvretrieval.kernels import Chooser, DecodeRows, TokenLists, cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.base import LayerCache, Part
from vllm_kvretrieval.storage.file import FileLayer, FileStorage


class FilePagesLayer(FileLayer):
    """A retrieval layer; see :class:`FileLayer`.

    Args:
        storage: All layers.
        cache: The layer.
    """

    def __init__(self, storage: FileStorage, cache: LayerCache) -> None:
        super().__init__(storage, cache)
        self.streams = bool(storage.config.streaming_attention)
        _, kv_heads, page_size, width = cache.kv_cache.shape
        self.cache = cpu.RecallCache(
            cache.kv_cache.view(-1, 1, 2 * page_size, width // 2),
            storage.slots[cache.name],
            kv_heads,
            cache.counts,
            (storage.home.fd, storage.home.begin(self.number)),
            storage.config.encoding,
        )
        self.slots = self.cache.slots
        self._units = self._as_units(self.slots)

    def written(self, slot_mapping: torch.Tensor) -> None:
        """See :meth:`RecallCache.write`."""
        self.cache.write(slot_mapping)

    def reach(self, rows: DecodeRows, lists: TokenLists) -> Sequence[Part]:
        """See :meth:`RecallCache.resolve` and :meth:`RecallCache.stream`.

        Rows with drafts have single parts: their queries see different numbers of the last tokens.
        """
        found = TokenLists.empty(rows, lists.run, lists.kv_heads)
        if not self.streams or rows.starts is not None:
            self.cache.resolve(rows, found)
            return (Part(found, self._units),)
        late = TokenLists.empty(rows, lists.run, lists.kv_heads)
        if not self.cache.stream(rows, found, late):
            return (Part(found, self._units),)
        return Part(found, self._units), Part(late, self._units, self.cache.wait)

    def ahead(self, rows: DecodeRows, chooser: Chooser) -> None:
        """See :meth:`RecallCache.prefetch`."""
        self.cache.prefetch(rows, chooser)


class FilePages(FileStorage):
    """An engine's KV in a file, by pages; see :class:`FileStorage`."""

    token_major = False
    layer_kind = FilePagesLayer

    def refuse_two_directions(self, config: RetrievalConfig) -> None:
        """vLLM's kernel reads pages in the mapped file."""

    def layer(self, cache: LayerCache) -> FilePagesLayer:
        """See :meth:`Storage.layer`."""
        layer = self.layer_kind(self, cache)
        self.pages.append(layer.cache)
        return layer

    def share(self, layers: Sequence[Any]) -> NoReturn:
        """Layers after a filter attend to single tokens, which are not recalled here."""
        raise NotImplementedError("filters select single tokens")
