"""A vLLM worker extension for engines with a cache on disk: its switches and counters."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.worker_counts import CountsExtension
from benchmarks.worker_memory import MemoryExtension
from vllm_kvretrieval.storage import tier_sizes
from vllm_kvretrieval.storage.encoded import EncodedHome

EXTENSION = "benchmarks.serving.slow_worker.SlowHomeExtension"
"""To be given to an engine as `worker_extension_cls`."""


class SlowHomeExtension(CountsExtension, MemoryExtension):
    """Adds methods for `LLM.collective_rpc`; none runs unless it is called."""

    retrieval_layers: dict[str, Any]
    storage: Any
    model_runner: Any
    planner: Any
    _steps: list[dict[str, float]]

    def prepare_recall(self, read_ahead: bool, layout: bool, keep: bool, streams: bool) -> None:
        """Empty the recall caches; to be called while no request runs.

        Args:
            read_ahead: Whether the next step's pages are read beside this step; of single tokens,
                whether a filter's are read beside the layers before those that attend to them.
            layout: Of pages, whether a page of a KV head is read at once, or a token's keys or
                values at a time.
            keep: Of single tokens, whether a step finds those that earlier ones have read.
            streams: Of pages, whether a step attends to those in slots while it reads the others.
        """
        for layer in self.retrieval_layers.values():
            layer.storage.streams = streams
        for cache in getattr(self.storage, "pages", []):
            for entry in range(self.requests.capacity):
                cache.release(entry)
            cache.drop_pages(sorted({unit // self.kv_heads() for unit in cache.resident()}))
            vars(cache).pop("prefetch", None)
            if not read_ahead:
                cache.prefetch = lambda rows, state: None
            slot = cache.slots[0, 0]
            cache.read_in_pieces(slot.nbytes if layout else slot[0].nbytes)
        for recall in getattr(self.storage, "tokens", []):
            for entry in range(self.requests.capacity):
                recall.release(entry)
            vars(recall).pop("recall", None)
            recall.recall = self._recalling(recall, read_ahead, keep)

    @staticmethod
    def _recalling(recall: Any, read_ahead: bool, keep: bool) -> Any:
        begin = recall.recall

        def recalling(rows: Any) -> None:
            if not keep:
                for seat in rows.seats.tolist():
                    recall.release(seat)
            begin(rows)
            if not read_ahead:
                for layer in range(recall.layers):
                    recall.wait(layer)

        return recalling

    def kv_heads(self) -> int:
        """KV heads of a layer on this worker."""
        return next(iter(self.retrieval_layers.values())).num_kv_heads

    def start_steps(self, cold: bool = False) -> None:
        """Start to note `recall` before every engine step that runs the model.

        Args:
            cold: Whether to drop the home's file from the page cache there, too. Pages that are
                being written, and mapped pages, stay.
        """
        self._steps = []
        if cold:
            os.fsync(self.storage.home.fd)
        run = self.model_runner.execute_model

        def noted(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                if cold:
                    os.posix_fadvise(self.storage.home.fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self._steps.append(self.recall())
            return run(scheduled, *args, **kwargs)

        self.model_runner.execute_model = noted

    def stop_steps(self) -> list[dict[str, float]]:
        """Stop noting; returns `recall` before every step and after the last one."""
        del self.model_runner.execute_model
        return [*self._steps, self.recall()]

    def recall(self) -> dict[str, float]:
        """Since the start: `retrieval_counts`, bytes read from home, seconds that steps waited for
        reads, page faults of the process that took no disk, and that did."""
        recalls = [*getattr(self.storage, "pages", []), *getattr(self.storage, "tokens", [])]
        counts = self.retrieval_counts()
        faults = resource.getrusage(resource.RUSAGE_SELF)
        return {
            **counts,
            "recalled_bytes": counts["recalled"] * (recalls[0].bytes_per_read if recalls else 0),
            "waited_s": sum(recall.seconds[1] for recall in recalls),
            "minor_faults": faults.ru_minflt,
            "major_faults": faults.ru_majflt,
        }

    def planned(self) -> dict[str, int]:
        """The worker's `Tiers`."""
        return asdict(self.planner.tiers)

    def allocated(self) -> dict[str, int]:
        """Bytes of fast memory that the KV cache takes, by the names of `Tiers`' parts.

        Read off the tensors, but for the books of the recall caches, which are C++'s own: these are
        as many per unit and slot as `storage.plan` says; and for pages that are not yet encoded, of
        which those count that are in memory now.
        """
        layers = list(self.retrieval_layers.values())
        units = sum(impl.choosers[0].store.pages * impl.num_kv_heads for impl in layers)
        slots = [impl.storage.slots for impl in layers]
        # A slot is a unit, or a token of a KV head.
        each = sum(s.nbytes for s in slots) // sum(self.planner.tiers.slots)
        per_slot, per_unit, mappings = tier_sizes.BOOKS_PER_SLOT, tier_sizes.BOOKS_PER_UNIT, 1
        if self.storage.token_major:
            per_slot, per_unit, mappings = tier_sizes.BOOKS_PER_TOKEN, 0, 2
        staging = {id(impl.staging): impl.staging for impl in layers if impl.staging is not None}
        home = self.storage.home.memory
        in_home = range(home.data_ptr(), home.data_ptr() + home.nbytes)
        in_memory = [t for t in self.model_runner.kv_caches if t.data_ptr() not in in_home]
        states, waiting = mappings * (home.nbytes // mmap.PAGESIZE), 0
        if isinstance(self.storage.home, EncodedHome):
            states, waiting = units // layers[0].num_kv_heads, _present(in_home)
        return {
            "dense": sum(cache.nbytes for cache in in_memory),
            "index": sum(store.records.nbytes for impl in layers for store in impl.indexes),
            "books": units * per_unit + states,
            "staging": sum(staging.buffer.nbytes for staging in staging.values()),
            "open_pages": waiting,
            "recall_cache": sum(s.nbytes + s.nbytes // each * per_slot for s in slots),
        }

    def home_memory(self) -> dict[str, int]:
        """Bytes of the home's file, of it in the page cache, and mapped; and of requests' state."""
        size = self.storage.home.layers * self.storage.home.layer_bytes
        with mmap.mmap(self.storage.home.fd, size) as mapped:  # which an encoded home does not do
            file = torch.frombuffer(mapped, dtype=torch.int8)
            present = _present(range(file.data_ptr(), file.data_ptr() + size))
            del file
        home = self.storage.home.memory
        layers = self.retrieval_layers.values()
        selections = [impl.choosers[0].selection for impl in layers]
        return {
            "file": size,
            "page_cache": present,
            "mapped": _resident(home.data_ptr(), home.data_ptr() + home.nbytes),
            "request_state": sum(s.query.nbytes + s.chosen.nbytes for s in selections),
        }


def _present(addresses: range) -> int:
    """Bytes of these addresses that are in memory, or of a file, in the page cache."""
    pages = (ctypes.c_ubyte * -(-len(addresses) // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(len(addresses))
    if libc.mincore(ctypes.c_void_p(addresses.start), size, pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def _resident(start: int, end: int) -> int:
    """Bytes of these addresses that are mapped to memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if area := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
            inside = start <= int(area[1], 16) < end
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total
