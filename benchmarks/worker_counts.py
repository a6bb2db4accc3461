"""A vLLM worker extension that reads what retrieval has counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXTENSION = "benchmarks.worker_counts.CountsExtension"
"""To be given to an engine as `worker_extension_cls`."""


class CountsExtension:
    """Adds a method that `LLM.collective_rpc` reaches."""

    requests: Any

    def retrieval_counts(self) -> dict[str, int]:
        """Since the start: KV heads corrected, and (page, KV head) units attended to, missed in a
        recall cache, and read from home."""
        names = ("corrected", "attended", "missed", "recalled")
        return dict(zip(names, self.requests.counts().tolist(), strict=True))


def corrected_share(
    before: Mapping[str, float], after: Mapping[str, float], budget_pages: int
) -> float | None:
    """Return the share of KV heads that selected anew before attention.

    Args:
        before, after: `CountsExtension.retrieval_counts`; between them all requests whose contexts
            exceed their budgets have the same one.
        budget_pages: that budget: every KV head of every sparse step attends to so many units.

    Returns:
        The share, or None where no step was sparse.
    """
    heads = (after["attended"] - before["attended"]) / budget_pages
    return round((after["corrected"] - before["corrected"]) / heads, 4) if heads else None
