"""A vLLM worker extension for `benchmarks.slow_home`: switches and counters of a slow home."""

from __future__ import annotations

from typing import Any

import psutil  # type: ignore[import-untyped]


class SlowHomeExtension:
    """Adds methods that `LLM.collective_rpc` reaches; none does anything by itself."""

    retrieval_layers: dict[str, Any]
    slow_layers: list[Any]
    requests: Any

    def prepare_recall(self, read_ahead: bool, layout: bool) -> None:
        """Empty the recall caches; to be called while no request runs.

        Args:
            read_ahead: Whether the next step's pages are read beside this step.
            layout: Whether a page of a KV head is read at once, or a token's keys or values at a
                time.
        """
        for layer in self.slow_layers:
            cache = layer.cache
            for entry in range(self.requests.capacity):
                cache.release(entry)
            cache.drop_pages(sorted({unit // self.kv_heads() for unit in cache.resident()}))
            vars(cache).pop("prefetch", None)
            if not read_ahead:
                cache.prefetch = lambda rows, state: None
            slot = cache.slots[0, 0]
            cache.read_in_pieces(slot.nbytes if layout else slot[0].nbytes)

    def kv_heads(self) -> int:
        """KV heads of a layer on this worker."""
        return next(iter(self.retrieval_layers.values())).num_kv_heads

    def recall(self) -> dict[str, float]:
        """Since the start: units attended to and missed, bytes read, seconds waited for them."""
        _, attended, missed, recalled = self.requests.counts().tolist()
        unit = self.slow_layers[0].cache.slots[0].nbytes if self.slow_layers else 0
        return {
            "attended": attended,
            "missed": missed,
            "recalled_bytes": recalled * unit,
            "waited_s": sum(layer.cache.seconds[1] for layer in self.slow_layers),
        }

    def memory(self) -> dict[str, int]:
        """Bytes that this process keeps resident: its own, and of mapped files; its threads."""
        process = psutil.Process()
        info = process.memory_info()
        return {
            "own": info.rss - info.shared,
            "mapped": info.shared,
            "threads": process.num_threads(),
        }
