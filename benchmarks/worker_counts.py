"""A vLLM worker extension that reads what retrieval has counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXTENSION = "benchmarks.worker_counts.CountsExtension"
"""To be given to an engine as `worker_extension_cls`."""


class CountsExtension:
    """Adds a method for `LLM.collective_rpc`."""

    requests: Any

    def retrieval_counts(self) -> dict[str, int]:
        """Counts of the table of running requests since the start (see its `Counts`), and the KV
        heads of all sparse steps."""
        counts = self.requests.counts()
        heads = counts.sparse_steps * self.requests.retrieval_heads
        return {**counts._asdict(), "sparse_heads": heads}


def corrected_share(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return the share of KV heads that selected anew before attention.

    Args:
        before, after: `CountsExtension.retrieval_counts`.

    Returns:
        The share, or None where no step was sparse.
    """
    heads = after["sparse_heads"] - before["sparse_heads"]
    return round((after["corrected"] - before["corrected"]) / heads, 4) if heads else None
