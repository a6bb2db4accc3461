"""Confidence intervals of means over samples, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, and where the true one lies with a confidence of `LEVEL`."""

    mean: float
    low: float
    high: float


def interval(tasks: Sequence[Sequence[float]], bounds: tuple[float, float]) -> Interval | None:
    """Return the interval of the mean of tasks' means, where each task counts alike.

    Samples vary within their task; the tasks themselves are given, not drawn (a stratified mean,
    with Satterthwaite's degrees of freedom). If no sample differs from others of its task, their
    spread says nothing: then the interval is what an event that has not happened in as many trials
    leaves open (the "rule of three"), in parts of `bounds`.

    Args:
        tasks: per task the values of its samples.
        bounds: the least and the largest value that there can be; infinite: there is none.

    Returns:
        None where a task has a single sample, and where `bounds` do not help.
    """
    mean = statistics.fmean(statistics.fmean(values) for values in tasks)
    if min(map(len, tasks)) < 2:
        return None
    parts = [statistics.variance(values) / len(values) / len(tasks) ** 2 for values in tasks]
    variance = sum(parts)
    if variance > 0:
        freedom = variance**2 / sum(
            part**2 / (len(values) - 1) for part, values in zip(parts, tasks, strict=True)
        )
        half = quantile(freedom) * math.sqrt(variance)
    else:
        span = bounds[1] - bounds[0]
        if math.isinf(span):
            return None
        half = span * (1 - (1 - LEVEL) ** (1 / sum(map(len, tasks))))
    return Interval(mean, max(mean - half, bounds[0]), min(mean + half, bounds[1]))


def quantile(freedom: float) -> float:
    """Return the two-sided quantile of Student's t at `LEVEL`.

    Below 3 degrees of freedom it is interpolated between those that have closed forms; else it is
    the expansion of Abramowitz and Stegun, 26.7.5, at most 0.2 % off.
    """
    upper = (1 + LEVEL) / 2
    one = math.tan(math.pi * (upper - 0.5))
    two = 2 * (upper - 0.5) * math.sqrt(2 / (4 * upper * (1 - upper)))
    if freedom < 2:
        return one + (two - one) * (max(freedom, 1.0) - 1)
    if freedom < 3:
        return two + (quantile(3) - two) * (freedom - 2)
    z = statistics.NormalDist().inv_cdf(upper)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
