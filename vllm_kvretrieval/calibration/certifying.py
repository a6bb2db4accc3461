"""The figures of a certificate: one engine answers by retrieval, and with full attention."""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.calibration.asking import Questions, run_together
from vllm_kvretrieval.calibration.divergence import Scored, answer_found, forced_scores
from vllm_kvretrieval.calibration.needles import passkey_in_text
from vllm_kvretrieval.calibration.samples import Sample, TokenText, continued
from vllm_kvretrieval.options.table import CONFIG_KEY
from vllm_kvretrieval.retrieval.certificates import Quality, Steps

if TYPE_CHECKING:
    from vllm import LLM

LEAST = 2048
"""Tokens of the shortest contexts in which a pass key has places outside sink and window."""
KEYS, TEXTS = 8, 4
"""Pass keys, and stretches of the text, for each length."""
FORCED = 257
"""Tokens of a stretch; the first one comes from the prompt, and is not scored."""
SHORTEST = 1024
"""Tokens of the shortest context that is timed; it may be within the budget."""
TIMED, WARM, REPEATS = 24, 8, 5
"""Decode steps that are timed, those before them that are not, and how often."""
EXACT: dict[str, Any] = {"exact": True}


def lengths_of(longest: int, budget: int) -> list[int]:
    """Lengths of contexts at which answers are compared: those beyond the budget.

    Args:
        longest: Tokens of the longest context.
        budget: Tokens that a decode step attends to.

    Raises:
        ValueError: There are none.
    """
    found = [n for n in (longest // 2, longest) if n > budget and n >= LEAST]
    if not found:
        raise ValueError(
            f"contexts of up to {longest} tokens are within the budget of {budget}, or shorter "
            f"than {LEAST}, so that there is nothing to measure: raise --max-model-len, or lower "
            "--kv-retrieval.budget, behind --"
        )
    return found


def quality(llm: "LLM", text: TokenText, tokens: int, anew: bool = False) -> Quality:
    """Ask for pass keys, and force a text, in contexts of one length.

    Args:
        llm: The engine; requests may be exact.
        text: The text.
        tokens: Tokens of the contexts.
        anew: Whether retrieval begins with prompts, so that they are read twice; else requests
            share those that full attention has read.

    Raises:
        ValueError: The text is too short.
    """
    keys = passkey_in_text(text, tokens, KEYS)
    whole, other = _both(llm, keys, anew, f"pass keys, {tokens:,} tokens")
    missed = [a and not b for a, b in zip(whole, other, strict=True)]
    parts = continued(text, tokens - FORCED, FORCED, TEXTS)
    samples = [Sample(prompt, forced) for prompt, forced in parts]
    exact, retrieved = _scored(llm, samples, anew, f"text, {tokens:,} tokens")
    scores = forced_scores(exact, retrieved)
    return Quality(
        tokens=tokens,
        keys=len(whole),
        found=sum(whole),
        missed=sum(missed),
        whole=round(float(scores["perplexity_full"]), 5),  # type: ignore[arg-type]
        perplexity=round(float(scores["perplexity"]), 5),  # type: ignore[arg-type]
        divergence=round(float(scores["kl"]), 6),  # type: ignore[arg-type]
    )


def steps(llm: "LLM", text: TokenText, longest: int) -> list[Steps]:
    """Time decode steps by retrieval and with full attention in turn, at each length.

    Args:
        llm: The engine.
        text: The text.
        longest: Tokens of the longest context; the others are halves of it.
    """
    words, _ = text.passage(longest, 0, 1)
    found = []
    lengths = [longest]
    while lengths[0] // 2 >= SHORTEST:
        lengths.insert(0, lengths[0] // 2)
    for tokens in lengths:
        prompt = words[: tokens - TIMED - WARM - 1]
        _steps(llm, prompt, EXACT)  # reads the prompt, which the prefix cache then has
        pairs = []
        for turn in range(REPEATS):
            order = ({}, EXACT) if turn % 2 else (EXACT, {})
            times = {bool(options): _steps(llm, prompt, options) for options in order}
            pairs.append((times[True], times[False]))
        whole, other = (statistics.median(pair[n] for pair in pairs) for n in (0, 1))
        ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
        found.append(Steps(tokens, round(1e3 * whole, 3), round(1e3 * other, 3), round(ratio, 4)))
    return found


def _both(
    llm: "LLM", samples: Sequence[Sample], anew: bool, label: str
) -> tuple[list[bool], list[bool]]:
    """Which answers are found with full attention, and by retrieval."""
    tokenizer: Any = llm.get_tokenizer()
    found: tuple[list[bool], list[bool]] = [], []
    for sample in samples:  # one after the other: the cache need not hold several prompts
        asked = [Questions([sample], EXACT), Questions([sample], {}, anew)]
        for known, question in zip(found, asked, strict=True):
            ((answer,),) = run_together(llm, [question], label)
            said = tokenizer.decode(answer.tokens[len(sample.forced) :])
            known.append(answer_found(said, sample.answer))
    return found


def _scored(
    llm: "LLM", samples: Sequence[Sample], anew: bool, label: str
) -> tuple[list[Scored], list[Scored]]:
    """The distributions over forced tokens with full attention, and by retrieval."""
    found = []
    # Together: a step reads the weights once for all of them.
    for asked in (Questions(samples, EXACT), Questions(samples, {}, anew)):
        (answers,) = run_together(llm, [asked], label)
        found.append([answer.scored for answer in answers if answer.scored is not None])
    return found[0], found[1]


def _steps(llm: "LLM", prompt: Sequence[int], options: dict[str, Any]) -> float:
    """The mean of the middle 80 % of steps, in seconds."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=TIMED + WARM + 1,
        ignore_eos=True,
        detokenize=False,
        extra_args={CONFIG_KEY: options},
    )
    engine, ends = llm.llm_engine, list[float]()
    engine.add_request("timed", {"prompt_token_ids": list(prompt)}, params)
    while engine.has_unfinished_requests():
        if engine.step():
            ends.append(time.perf_counter())
    times = sorted(b - a for a, b in zip(ends[WARM:], ends[WARM + 1 :], strict=False))
    cut = len(times) // 10
    return statistics.fmean(times[cut : len(times) - cut])
