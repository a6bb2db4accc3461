"""How long steps take on a CPU that draft or verify, beside those that do neither.

All follows from the model's and the contexts' sizes, so that the same is drafted whenever a run is
repeated.
"""

from collections.abc import Sequence
from typing import Any

from vllm_kvretrieval.drafting.pace import VERIFY, Cost
from vllm_kvretrieval.engine.drafter import Reading

SLOW_HOME = 4
"""How many times longer than from memory a byte takes from a slow home, at least."""

LAYER = 8 << 20
"""Bytes of memory that are read in the time that a layer takes beside its reads, about."""

OWN, VLLMS = Cost(0.05, 0.2), Cost(0.75, 0.05)
"""The time of several rows over a context, as a share of that of a single one, by our kernel and by
vLLM's, which reads them as it reads a chunk of a prompt."""


class CpuStepCosts:
    """See :class:`vllm_kvretrieval.engine.drafter.StepCosts`.

    Args:
        runner: vLLM's V1 model runner.
        slow: Whether contexts lie in a slow home.
        own: Whether our own kernel attends to whole contexts.
    """

    def __init__(self, runner: Any, slow: bool, own: bool) -> None:
        model, parallel = runner.model_config, runner.vllm_config.parallel_config
        layers, size = model.get_num_layers(parallel), model.dtype.itemsize
        self._token = 2 * layers * model.get_num_kv_heads(parallel) * model.get_head_size() * size
        self._always = _weights(model, parallel) * size + layers * LAYER
        self._slower, self._whole = SLOW_HOME if slow else 1, OWN if own else VLLMS

    def drafting(self, lengths: Sequence[int], budget: int) -> float:
        """See ``StepCosts``; by the bytes that a step reads, of weights and of contexts, and by the
        time that layers take beside that."""
        read = sum(min(length, budget) for length in lengths) * self._token
        far = sum(lengths) * self._token * self._slower
        return min(1.0, (self._always + read) / (self._always + far))

    def verifying(self, readings: Sequence[Reading]) -> list[Cost]:
        """See ``StepCosts``."""
        weights = (1 + (len(readings) - 1) * VERIFY.token) * self._always
        read = sum(each.tokens * (self._slower if each.whole else 1) for each in readings)
        per_request = (weights + read * self._token) / max(len(readings), 1)
        return [self._verifying(each, per_request) for each in readings]

    def _verifying(self, reading: Reading, step: float) -> Cost:
        """The time of a request's draft, by what it reads and what a step takes per request."""
        weights, context = self._always / step, reading.tokens * self._token / step
        by = self._whole if reading.whole else OWN
        token = VERIFY.token * weights + by.token * context
        return Cost(by.once * context, token, VERIFY.shared * weights)


def _weights(model: Any, parallel: Any) -> int:
    """Weights that a step of a worker uses, about: those of all layers and of its output."""
    config, layers = model.hf_text_config, model.get_num_layers(parallel)
    hidden, workers = model.get_hidden_size(), parallel.tensor_parallel_size
    queries, keys = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
    attention = 2 * (queries + keys) * model.get_head_size() * hidden
    experts = getattr(config, "num_experts_per_tok", None) or 1
    named = ("moe_intermediate_size", "intermediate_size")
    inner = next((n for n in (getattr(config, k, 0) for k in named) if n), 0)
    inner = inner if isinstance(inner, int) and inner else 4 * hidden
    others = layers * 3 * hidden * inner * experts + hidden * model.get_vocab_size()
    return int(layers * attention + others // workers)
