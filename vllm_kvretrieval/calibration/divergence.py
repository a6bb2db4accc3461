"""Scores of forced tokens and answers: divergence from full attention, agreement, perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOP_LOGPROBS = 512
"""Log-probs kept per position; KL merges all other tokens into one bucket."""

_TINY = 1e-12


@dataclass(frozen=True)
class Scored:
    """The model's distributions at T scored positions of one sample."""

    target: Floats
    """Shape (T,): log-probability of the forced token."""

    top_ids: Ints
    """Shape (T, K): the K most likely tokens, most likely first."""

    top_logprobs: Floats
    """Shape (T, K): their log-probabilities."""


@dataclass(frozen=True)
class Generated:
    """The results of one sample's request."""

    tokens: tuple[int, ...]
    scored: Scored | None
    """Distributions at the scored positions; None for a needle task."""


def kl_divergence(full: Scored, other: Scored) -> Floats:
    """Return KL(full || other) at each position, in nats, shape (T,).

    Only each side's K most likely tokens are known. The tokens on both lists are compared one by
    one, all others as a single bucket that holds the rest of the probability. Merging outcomes
    never raises a divergence, so this is a lower bound; with K in the hundreds it is a close one.

    Raises:
        ValueError: the two do not score the same number of positions.
    """
    if full.top_ids.shape[0] != other.top_ids.shape[0]:
        raise ValueError(
            f"{full.top_ids.shape[0]} positions cannot be compared with {other.top_ids.shape[0]}"
        )
    values = np.empty(full.top_ids.shape[0])
    for row in range(len(values)):
        _, mine, theirs = np.intersect1d(
            full.top_ids[row], other.top_ids[row], assume_unique=True, return_indices=True
        )
        log_p = full.top_logprobs[row][mine]
        log_q = other.top_logprobs[row][theirs]
        p = np.exp(log_p)
        rest_p = max(1.0 - p.sum(), _TINY)
        rest_q = max(1.0 - np.exp(log_q).sum(), _TINY)
        values[row] = (p * (log_p - log_q)).sum() + rest_p * math.log(rest_p / rest_q)
    return values


def top_agreement(full: Scored, other: Scored) -> float:
    """Return the share of positions at which both find the same token most likely."""
    return float((full.top_ids[:, 0] == other.top_ids[:, 0]).mean())


def right(scored: Scored, parts: Sequence[tuple[int, int]]) -> float:
    """Return the share of the parts in which each forced token is the most likely one.

    Args:
        scored: the forced tokens from the second one on.
        parts: stretches of the forced tokens.
    """
    likeliest = scored.target >= scored.top_logprobs[:, 0]
    return float(np.mean([likeliest[begin - 1 : end - 1].all() for begin, end in parts]))


def perplexity(samples: list[Scored]) -> float:
    """Return the perplexity of the forced tokens over all samples' positions."""
    return float(np.exp(-np.concatenate([sample.target for sample in samples]).mean()))


def forced_scores(
    full: list[Scored],
    other: list[Scored],
    turns: int = 1,
    parts: Sequence[Sequence[tuple[int, int]]] = (),
) -> dict[str, float | list[float]]:
    """Compare the same samples under full attention and under another method.

    Args:
        full: Under full attention.
        other: Under the other method.
        turns: Equal stretches that the positions of each sample consist of.
        parts: Per sample what is right or wrong on its own (see `right`); empty: nothing is.

    Returns:
        ``kl`` (mean over all positions), ``kl_samples`` (mean of each sample), ``nll_samples``
        (negative log-probability of a forced token, likewise), with parts ``right_samples`` (see
        `right`), ``agreement``, ``perplexity`` and ``perplexity_full``; of several turns
        ``kl_turns`` (mean of each turn).

    Raises:
        ValueError: the numbers of samples differ.
    """
    if len(full) != len(other):
        raise ValueError(f"{len(full)} samples cannot be compared with {len(other)}")
    divergences = [kl_divergence(a, b) for a, b in zip(full, other, strict=True)]
    sizes = [len(values) for values in divergences]
    agreement = [top_agreement(a, b) for a, b in zip(full, other, strict=True)]
    scores: dict[str, float | list[float]] = {
        "kl": float(np.concatenate(divergences).mean()),
        "kl_samples": [round(float(values.mean()), 6) for values in divergences],
        "nll_samples": [round(float(-scored.target.mean()), 6) for scored in other],
        "agreement": float(np.average(agreement, weights=sizes)),
        "perplexity": perplexity(other),
        "perplexity_full": perplexity(full),
    }
    if any(parts):
        pairs = zip(other, parts, strict=True)
        scores["right_samples"] = [round(right(scored, of), 6) for scored, of in pairs]
    if turns > 1:
        of_turns = np.concatenate([values.reshape(turns, -1) for values in divergences], 1).mean(1)
        scores["kl_turns"] = [round(float(value), 6) for value in of_turns]
    return scores


def answer_found(generated: str, answer: str) -> bool:
    """Tell whether the generated text starts with the answer (white space aside)."""
    return generated.lstrip().startswith(answer)
