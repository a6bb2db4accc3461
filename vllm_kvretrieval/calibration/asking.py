"""Asks an engine of vLLM, and brings back what it generated."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tqdm import tqdm
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs

from vllm_kvretrieval.calibration.divergence import TOP_LOGPROBS, Generated, Scored
from vllm_kvretrieval.calibration.forcing import FORCED_TOKENS
from vllm_kvretrieval.calibration.samples import Sample
from vllm_kvretrieval.options.table import CONFIG_KEY

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Questions:
    """Samples, and how they are to be answered."""

    samples: Sequence[Sample]

    options: dict[str, Any] | None
    """The requests' ``kv_retrieval`` options; None for stock vLLM."""

    anew: bool = False
    """Whether all of each prompt is computed, however much of it the prefix cache holds."""


def run_together(llm: "LLM", asked: Sequence[Questions], label: str) -> list[list[Generated]]:
    """Generate for all samples of all questions, as many at a time as the engine takes, greedily.

    Args:
        llm: An engine with `forcing.ForceTokens` among its logits processors.
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


def _sampling(sample: Sample, options: dict[str, Any] | None, anew: bool) -> SamplingParams:
    extra: dict[str, Any] = {FORCED_TOKENS: list(sample.forced)}
    if options is not None:
        extra[CONFIG_KEY] = options
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
