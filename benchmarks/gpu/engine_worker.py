"""A vLLM worker extension that reads what an engine keeps on the device, and has recalled."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

EXTENSION = "benchmarks.gpu.engine_worker.DeviceExtension"
"""To be given to an engine as `worker_extension_cls`."""


class DeviceExtension:
    """Adds a method that `LLM.collective_rpc` reaches; stock workers have it, too."""

    model_runner: Any

    def device_figures(self) -> dict[str, Any]:
        """Bytes of the device's memory, of the page index, and of the tiers of a KV cache whose
        home is host memory; and counts since the start, in units (see `Traffic`) and KV heads."""
        figures: dict[str, Any] = {}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            figures |= {"used": total - free, "allocated": torch.cuda.memory_allocated()}
        kept = getattr(self.model_runner, "retrieval_layers", None)
        if kept is None:
            return figures
        requests, tier = kept.requests, getattr(kept, "tier", None)
        figures |= {
            "index": sum(store.records.nbytes for store in kept.indexes),
            "retrieval_heads": requests.retrieval_heads,
            "heads_corrected": int(requests.corrected.sum()),
        }
        if tier is not None:
            looked_up, missed, ahead, _ = tier.traffic.sum(0).tolist()
            figures |= {"looked_up": looked_up, "missed": missed, "ahead": ahead}
            figures["tiers"] = asdict(self.model_runner.tiers)
        return figures
