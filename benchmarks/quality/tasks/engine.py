"""Runs samples through a vLLM engine and brings back what it generated."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm import tqdm
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs

from benchmarks import worker_counts
from benchmarks.engines import LONG_STEPS
from benchmarks.models import kv_bytes_per_token, read_config
from benchmarks.quality.tasks.base import CACHE_BLOCK, Sample
from benchmarks.quality.tasks.forcing import FORCED_TOKENS, ForceTokens
from benchmarks.quality.tasks.metrics import TOP_LOGPROBS, Generated, Scored
from benchmarks.quality.tasks.variant import OWN
from vllm_kvretrieval.upstream.defaults import all_cores, slow_bfloat16

BATCH = 8
"""Requests decoded together."""

DTYPE = "float32" if slow_bfloat16() else "bfloat16"
"""Dtype of weights and KV cache in which this machine computes at speed."""


@dataclass(frozen=True)
class Questions:
    """Samples, and how they are to be answered."""

    samples: Sequence[Sample]

    options: dict[str, Any] | None
    """The requests' ``kv_retrieval`` options; None for stock vLLM."""

    anew: bool = False
    """Whether all of each prompt is computed, however much of it the prefix cache holds."""


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


def run_together(llm: LLM, asked: Sequence[Questions], label: str) -> list[list[Generated]]:
    """Generate for all samples of all questions, as many at a time as the engine takes, greedily.

    Args:
        llm: an engine from `open_engine`.
        asked: the questions.
        label: the name of the progress bar.

    Raises:
        RuntimeError: a request did not generate the tokens that were forced upon it.
    """

    def progress(*iterable: Any, **settings: Any) -> tqdm:
        settings |= {"desc": label, "mininterval": 2.0, "disable": bool(iterable)}
        return tqdm(*iterable, **settings)

    requests = [(sample, of) for of in asked for sample in of.samples]
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(sample.prompt)) for sample, _ in requests],
        [_sampling(sample, of.options, of.anew) for sample, of in requests],
        use_tqdm=progress,
    )
    results = []
    for (sample, _), output in zip(requests, outputs, strict=True):
        completion = output.outputs[0]
        tokens = tuple(completion.token_ids)
        if tokens[: len(sample.forced)] != sample.forced:
            raise RuntimeError(f"{label}: the engine did not generate the tokens forced upon it")
        scored = None
        if not sample.answer:
            scored = _scored(cast(FlatLogprobs, completion.logprobs), sample.scored)
        results.append(Generated(tokens, scored))
    left = iter(results)
    return [list(itertools.islice(left, len(of.samples))) for of in asked]


def retrieval_counts(llm: LLM) -> dict[str, int]:
    """Return what `worker_counts.CountsExtension` has counted in a retrieval engine."""
    return llm.collective_rpc("retrieval_counts")[0]


def _sampling(sample: Sample, options: dict[str, Any] | None, anew: bool) -> SamplingParams:
    extra: dict[str, Any] = {FORCED_TOKENS: list(sample.forced)}
    if options is not None:
        extra["kv_retrieval"] = options
    return SamplingParams(
        temperature=0.0,
        max_tokens=sample.generated,
        ignore_eos=True,
        detokenize=False,
        logprobs=None if sample.answer else TOP_LOGPROBS,
        flat_logprobs=True,
        skip_reading_prefix_cache=anew or None,
        extra_args=extra,
    )


def _scored(logprobs: FlatLogprobs, places: Sequence[int]) -> Scored:
    """Read vLLM's log-probs: per position the generated token's own, then the top ones."""
    shape = (len(logprobs.start_indices), TOP_LOGPROBS + 1)
    values = np.array(logprobs.logprobs).reshape(shape)[places]
    ids = np.array(logprobs.token_ids).reshape(shape)[places]
    return Scored(values[:, 0], ids[:, 1:], values[:, 1:])
