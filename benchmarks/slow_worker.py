"""A vLLM worker extension for `benchmarks.slow_home`: switches and counters of a slow home."""

from __future__ import annotations

import resource
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.worker_counts import CountsExtension

EXTENSION = "benchmarks.slow_worker.SlowHomeExtension"
"""To be given to an engine as `worker_extension_cls`."""


class SlowHomeExtension(CountsExtension):
    """Adds methods that `LLM.collective_rpc` reaches; none does anything by itself."""

    retrieval_layers: dict[str, Any]
    slow_layers: list[Any]
    model_runner: Any
    _steps: list[dict[str, float]]

    def prepare_recall(self, read_ahead: bool, layout: bool) -> None:
        """Empty the recall caches; to be called while no request runs.

        Args:
            read_ahead: Whether the next step's pages are read beside this step.
            layout: Whether a page of a KV head is read at once, or a token's keys or values at a
                time.
        """
        for cache in self._recall_caches():
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

    def start_steps(self) -> None:
        """From now on note `recall` before every engine step that runs the model."""
        self._steps = []
        run = self.model_runner.execute_model

        def noted(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                self._steps.append(self.recall())
            return run(scheduled, *args, **kwargs)

        self.model_runner.execute_model = noted

    def stop_steps(self) -> list[dict[str, float]]:
        """Note no more; returns `recall` before every step and after the last one."""
        del self.model_runner.execute_model
        return [*self._steps, self.recall()]

    def recall(self) -> dict[str, float]:
        """Since the start: `retrieval_counts`, bytes read from home, seconds that steps waited for
        reads, page faults of the process that took no disk, and that did."""
        caches = self._recall_caches()
        counts = self.retrieval_counts()
        faults = resource.getrusage(resource.RUSAGE_SELF)
        return {
            **counts,
            "recalled_bytes": counts["recalled"] * (caches[0].slots[0].nbytes if caches else 0),
            "waited_s": sum(cache.seconds[1] for cache in caches),
            "minor_faults": faults.ru_minflt,
            "major_faults": faults.ru_majflt,
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

    def _recall_caches(self) -> list[Any]:
        """Of the retrieval layers; none where the home is fast memory."""
        return [layer.cache for layer in self.slow_layers if layer.cache is not None]
