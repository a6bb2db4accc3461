"""A worker extension that checks what every KV head attends to, where some attend to everything."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from tests.support.recorder import Oracle, RecordingWorker
from tests.support.recorder_scores import Method


class HeadsRecorder(RecordingWorker):
    """Mixed into the worker by vLLM (``worker_extension_cls``)."""

    def check_heads(self, flags, budgets, own_layers):
        """Compare every recorded step with what is said of its method.

        Args:
            flags: Of each method, per retrieval layer which KV heads are retrieval heads.
            budgets: Of each request, in the order of :func:`engine.drive`, the pages that the
                other heads attend to; the first of them is the sink.
            own_layers: Recorded, as :meth:`start_recording` has it.

        Returns:
            By the name of the method, a summary: steps, heads that attend to everything and to a
            part, those that attend to anything else, requests that began a page, and the largest
            error of attention relative to the largest value.
        """
        impl = next(iter(self.retrieval_layers.values()))
        store = impl.choosers[0].store
        oracle = Oracle(Method(), store.page_size, impl.scale, store.dtype)
        found: dict[str, dict[str, Any]] = defaultdict(lambda: defaultdict(int))
        seen = defaultdict(set)
        assert {step.number for step in self._steps} == set(own_layers)
        for step in self._steps:
            summary, pages = found[step.method], len(step.pages)
            seen[step.method, step.request].add(step.length)
            budget = budgets[int(step.request.split("-")[0])]
            assert pages > budget, "no longer than that, and all is attended to by vLLM itself"
            summary["steps"] += 1
            for head, attended in enumerate(step.attended):
                whole = flags[step.method][step.number][head]
                expected = [*range(pages)]
                if not whole:
                    expected = [0, *expected[pages - budget + 1 :]]
                summary["whole" if whole else "part"] += 1
                summary["differ"] += attended != expected
                error = (oracle.attention(step, head) - step.output[head]).abs().max()
                error = float(error / step.values[head].abs().max())
                summary["worst_error"] = max(summary["worst_error"], error)
        for (method, _), lengths in seen.items():
            found[method]["page_moves"] += any(n % store.page_size == 1 for n in lengths)
        return {name: dict(summary) for name, summary in found.items()}


def scored(path: Path, share: float) -> list[list[bool]]:
    """The heads of the best scores in a file, counted out by hand."""
    data = json.loads(path.read_text())
    induction, echo = torch.tensor(data["induction"]), torch.tensor(data["echo"])
    heads = induction.numel()
    count, by_echo = max(round(share * heads), 1), round(share * heads / 15)
    chosen = torch.zeros(heads, dtype=torch.bool)
    best = induction.flatten().sort(descending=True, stable=True).indices
    chosen[best[: count - by_echo]] = True
    rest = echo.flatten().masked_fill(chosen, -1).sort(descending=True, stable=True).indices
    chosen[rest[:by_echo]] = True
    return chosen.view_as(induction).tolist()
