"""Turns what the engine generated into the figures of one cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from benchmarks.models import dense_layers, head_size, read_config
from benchmarks.quality.tasks.variant import PAGE, Variant
from vllm_kvretrieval.calibration.divergence import Generated, answer_found, forced_scores
from vllm_kvretrieval.calibration.samples import CACHE_BLOCK, Sample
from vllm_kvretrieval.retrieval.families.dropping import ONCE
from vllm_kvretrieval.retrieval.needs import Need


def score(
    samples: Sequence[Sample],
    reference: Sequence[Generated],
    results: Sequence[Generated],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return a cell's figures: ``accuracy`` and ``found`` (per sample) where there is an answer,
    else those of `forced_scores` against the reference."""
    if samples[0].answer:
        found = [
            answer_found(tokenizer.decode(result.tokens[len(sample.forced) :]), sample.answer)
            for sample, result in zip(samples, results, strict=True)
        ]
        return {"accuracy": sum(found) / len(found), "found": [int(hit) for hit in found]}
    full = [result.scored for result in reference if result.scored is not None]
    other = [result.scored for result in results if result.scored is not None]
    parts = [sample.parts for sample in samples]
    return dict(forced_scores(full, other, len(samples[0].turns), parts))


def covering_budget(samples: Sequence[Sample]) -> int:
    """Return the smallest budget in whole pages that covers every sample to its end."""
    longest = max(sample.total for sample in samples)
    return -(-longest // PAGE) * PAGE


def mean_share(samples: Sequence[Sample], budget: int, variant: Variant, model: Path) -> float:
    """Return the mean share of the KV cache that the samples' decode steps attend to.

    See `cache_share`. Every variant attends to its whole budget (the control spends on its
    window what the others spend on selected pages); those that keep tokens of a prompt once attend
    to what they generate besides, and heads that read everything count as such.
    """
    if variant.config.own.whole:
        return 1.0
    grows = variant.config.own.schedule == ONCE
    full_layers, dense = attention_layers(variant, model)
    whole_layers = dense + (full_layers - dense) * whole_heads(variant, model)
    shares = [
        cache_share(
            len(sample.prompt),
            sample.generated,
            budget + (sample.generated // 2 if grows else 0),
            full_layers,
            whole_layers,
        )
        for sample in samples
    ]
    return sum(shares) / len(shares)


def whole_heads(variant: Variant, model: Path) -> float:
    """Return the share of the KV heads of retrieval layers that attend to whole contexts."""
    if Need.HEADS not in variant.config.own.needs:
        return 0.0
    config = AutoConfig.from_pretrained(model).get_text_config()
    served = SimpleNamespace(
        model=str(model),
        hf_text_config=config,
        get_total_num_kv_heads=lambda: config.num_key_value_heads,
    )
    dense = variant.engine_config.dense_layers
    retrieving = [layer for layer in _full_attention(model) if layer >= dense]
    counts = variant.config.own.fixed_counts(served, retrieving)
    assert counts is not None
    return float((counts > 0).mean())


def _full_attention(model: Path) -> list[int]:
    """Numbers of the layers with full attention."""
    config = read_config(model)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [index for index, kind in enumerate(types) if kind == "full_attention"]


def attention_layers(variant: Variant, model: Path) -> tuple[int, int]:
    """Return how many layers have full attention, and how many of those retrieval leaves alone."""
    full = _full_attention(model)
    return len(full), dense_layers(variant.engine_config, model, full)


def index_bytes(variant: Variant, model: Path) -> dict[str, float]:
    """Return what a variant keeps to select pages by, with the KV cache in bfloat16.

    Returns:
        ``index_bytes`` per token and KV head, and ``index_share`` of its keys and values.
    """
    size = head_size(read_config(model))
    kv_bytes = 2 * CACHE_BLOCK * size * torch.bfloat16.itemsize
    kept = variant.config.index_bytes(kv_bytes, size, torch.bfloat16)
    return {"index_bytes": kept / CACHE_BLOCK, "index_share": round(kept / kv_bytes, 5)}


def cache_share(
    prompt: int, generated: int, attended: int, full_layers: int, dense_layers: float
) -> float:
    """Return the share of the KV cache that a request's decode steps attend to, 0 to 1.

    What retrieval reads of its index to choose is not in it.

    Counted over the layers with full attention (sliding-window layers keep vLLM's own treatment)
    and over the decode steps, with L the context of a step::

        ((full_layers - dense_layers) * min(L, attended) + dense_layers * L) / (full_layers * L)

    Args:
        prompt: tokens of the prompt.
        generated: tokens generated; the first comes from the prefill and takes no decode step.
        attended: tokens that a retrieval layer attends to at most.
        full_layers: layers with full attention.
        dense_layers: those of them that retrieval leaves alone, and parts of others.
    """
    contexts = np.arange(prompt + 1, prompt + max(generated, 2))
    sparse = np.minimum(contexts, attended) / contexts
    return float(((full_layers - dense_layers) * sparse.mean() + dense_layers) / full_layers)
