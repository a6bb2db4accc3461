"""Answers RULER's samples by a vLLM engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from tqdm import tqdm
from vllm import LLM, SamplingParams

from benchmarks.quality.ruler_tasks.generator import RulerSample
from benchmarks.quality.ruler_tasks.scoring import Metric

BLOCK = 128
"""Tokens per block of vLLM's prefix cache on the CPU."""

_serial = count()


@dataclass(frozen=True)
class Answers:
    """The answers to the samples of a task."""

    scores: list[float]
    """Per sample, 0 to 1."""

    texts: list[str]

    tokens: int
    """Tokens generated in all."""

    prefilled: int
    """Tokens of the prompts that the prefix cache did not hold."""


def answer(
    llm: LLM,
    samples: Sequence[RulerSample],
    options: dict[str, Any],
    metric: Metric,
    tokens: int,
    label: str,
    anew: bool = False,
) -> Answers:
    """Generate for all samples, greedily, as many at once as the engine takes.

    A sample ends with the model's end of text, at `tokens`, or as soon as its score is 1: text that
    is appended never lowers it, so the scores are those of the whole text.

    Args:
        llm: an engine of `benchmarks.quality.tasks.engine.open_engine`.
        samples: the requests.
        options: the requests' ``kv_retrieval`` options.
        metric: scores a text.
        tokens: tokens that a sample may generate.
        label: what the progress bar is called.
        anew: whether all of each prompt is computed, however much of it the prefix cache holds.
    """
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        skip_reading_prefix_cache=anew or None,
        extra_args={"kv_retrieval": options},
    )
    engine = llm.llm_engine
    waiting: dict[str, int] = {}
    for index, sample in enumerate(samples):
        name = f"ruler-{next(_serial)}"
        waiting[name] = index
        engine.add_request(name, {"prompt_token_ids": list(sample.prompt)}, sampling)
    scores, texts = [0.0] * len(samples), [""] * len(samples)
    generated, prefilled = [0] * len(samples), [0] * len(samples)
    with tqdm(total=len(samples), desc=label, mininterval=2.0) as progress:
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = waiting[output.request_id]
                completion = output.outputs[0]
                texts[index] = completion.text
                scores[index] = metric(completion.text, samples[index].references)
                generated[index] = len(completion.token_ids)
                prefilled[index] = len(samples[index].prompt) - (output.num_cached_tokens or 0)
                if scores[index] == 1 and not output.finished:
                    engine.abort_request([output.request_id])
                if scores[index] == 1 or output.finished:
                    progress.update()
    return Answers(scores, texts, sum(generated), sum(prefilled))


def cache_tokens(samples: Sequence[RulerSample], tokens: int) -> int:
    """Return how many tokens' room the samples and their answers take in whole blocks."""
    lengths = (len(sample.prompt) + tokens for sample in samples)
    return sum(-(-length // BLOCK) * BLOCK for length in lengths)
