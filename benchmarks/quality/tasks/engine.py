"""Runs samples through a vLLM engine and brings back what it generated."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM

from benchmarks import worker_counts
from benchmarks.engines import LONG_STEPS
from benchmarks.models import kv_bytes_per_token, read_config
from benchmarks.quality.tasks.variant import OWN
from vllm_kvretrieval.calibration.asking import Questions, run_together
from vllm_kvretrieval.calibration.divergence import TOP_LOGPROBS, Generated
from vllm_kvretrieval.calibration.forcing import ForceTokens
from vllm_kvretrieval.calibration.samples import CACHE_BLOCK, Sample
from vllm_kvretrieval.upstream.defaults import all_cores, slow_bfloat16

BATCH = 8
"""Requests decoded together."""

DTYPE = "float32" if slow_bfloat16() else "bfloat16"
"""Dtype of weights and KV cache in which this machine computes at speed."""


def prefix_cache_bytes(model: Path, samples: Sequence[Sample], dtype: str = DTYPE) -> int:
    """Return how large a KV cache keeps a task's prompts from one of its runs to the next.

    A run takes new blocks for what it generates while those of the run before are still cached,
    hence twice these. Every layer counts for the whole context: vLLM gives up blocks that a sliding
    window has left, but the least recently used one goes first, whichever layers it is of.
    """
    blocks = 1  # vLLM's own
    for sample in samples:
        full = len(sample.prompt) // CACHE_BLOCK
        blocks += full + 2 * (-(-sample.total // CACHE_BLOCK) - full)
    per_token = kv_bytes_per_token(read_config(model)) * (2 if dtype == "float32" else 1)
    return blocks * CACHE_BLOCK * per_token


@contextmanager
def open_engine(
    model: Path,
    context: int,
    budget: int | None,
    kv_cache_bytes: int,
    batch: int = BATCH,
    extension: str = worker_counts.EXTENSION,
    dtype: str = DTYPE,
    method: str = OWN,
    also: Mapping[str, Any] | None = None,
    quantization: str | None = None,
    **options: Any,
) -> Iterator[LLM]:
    """Start a vLLM engine and shut it down at the end.

    Args:
        model: directory of the checkpoint.
        context: longest context in tokens.
        budget: the server's budget in tokens, which requests may lower; None for stock vLLM.
        kv_cache_bytes: memory for the KV cache.
        batch: most requests at once.
        extension: what a retrieval engine has as its worker's extension.
        dtype: element type of weights and KV cache.
        method: what a retrieval engine decodes with where a request names no other.
        also: further methods that requests may name, with their options.
        quantization: of the weights; None: the checkpoint's.
        options: further ``kv_retrieval`` options.
    """
    retrieval: dict[str, Any] = {}
    if budget is not None:
        options |= {"budget": budget, "also": dict(also or {})}
        retrieval = {
            "attention_backend": method.upper(),
            "worker_extension_cls": extension,
            "additional_config": {"kv_retrieval": options},
        }
    os.environ |= all_cores() | LONG_STEPS
    llm = LLM(
        model=str(model),
        dtype=dtype,
        quantization=quantization,
        max_model_len=context,
        max_num_seqs=batch,
        max_logprobs=TOP_LOGPROBS,
        logits_processors=[ForceTokens],
        kv_cache_memory_bytes=kv_cache_bytes,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=True,
        **retrieval,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def run_samples(
    llm: LLM, samples: Sequence[Sample], options: dict[str, Any] | None, label: str
) -> list[Generated]:
    """Generate for all samples, as `run_together` does."""
    return run_together(llm, [Questions(samples, options)], label)[0]


def retrieval_counts(llm: LLM) -> dict[str, int]:
    """Return what `worker_counts.CountsExtension` has counted in a retrieval engine."""
    return llm.collective_rpc("retrieval_counts")[0]
