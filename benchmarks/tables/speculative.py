"""Tables of drafts: `benchmarks.serving speculative` and `verifying`, and `benchmarks.ops
drafters`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Options, Results, markdown

ALONE, DRAFTS, NGRAM = "no drafts", "drafts", "vLLM's ngram"
FULL, LOSSLESS = "full", "lossless"
BUDGET, WHOLE = "budget", "whole context"
KINDS = ("copy", "code", "novel")


def _ratio(cell: Mapping[str, Any], way: str, against: str) -> str:
    """The speed-up of one way over another: the median, and the least and the most."""
    ways = cell["ways"]
    if way not in ways:
        return ""
    pairs = zip(ways[way]["tokens_per_second"], ways[against]["tokens_per_second"], strict=True)
    ratios = sorted(own / other for own, other in pairs)
    middle, least, most = statistics.median(ratios), ratios[0], ratios[-1]
    return f"{middle:.2f}x" if len(ratios) == 1 else f"{middle:.2f}x ({least:.2f}..{most:.2f})"


def _speed(cell: Mapping[str, Any], way: str) -> str:
    return f"{statistics.median(cell['ways'][way]['tokens_per_second']):.1f}"


def _like_full(cell: Mapping[str, Any], tokens: int) -> str:
    """How many answers of the lossless mode are full attention's."""
    counts = [count for of_run in cell["ways"][LOSSLESS]["like_full"] for count in of_run]
    if not counts:
        return ""
    same = sum(count == tokens for count in counts)
    return f"{same} of {len(counts)}"


def row(cell: Mapping[str, Any]) -> str:
    """A cell in a line, for the screen."""
    ways = " ".join(f"{name}: {_speed(cell, name)}/s" for name in cell["ways"])
    drafts, lossless = _ratio(cell, DRAFTS, ALONE), _ratio(cell, LOSSLESS, FULL)
    same = [w["like_full"] for w in [cell["ways"][LOSSLESS]]]
    return (
        f"{cell['context']:>7,} {cell['kind']:6} x{cell['batch']}: {ways}; drafts {drafts}, "
        f"lossless {lossless}, like full {same}"
    )


def table(results: Results, options: Options) -> str:
    """A row per context, kind and batch: tokens per second, and what drafts gain."""
    (store,) = results.values()
    ngram = any(NGRAM in cell["ways"] for cell in store["cells"])
    header = ["context", "text", "requests", "no drafts, tokens/s", "drafts"]
    header += ["vLLM's `ngram`"] * ngram
    header += ["full attention, tokens/s", "lossless", "answers like full attention's"]
    rows = []
    for cell in store["cells"]:
        cells = [f"{cell['context']:,}", cell["kind"], str(cell["batch"]), _speed(cell, ALONE)]
        cells.append(_ratio(cell, DRAFTS, ALONE))
        cells += [_ratio(cell, NGRAM, ALONE)] * ngram
        cells += [_speed(cell, FULL), _ratio(cell, LOSSLESS, FULL)]
        rows.append([*cells, _like_full(cell, store["settings"]["tokens"])])
    return markdown(header, rows)


def drafters(results: Results, options: Options) -> str:
    """A row per text and context: tokens per step and speed-up by each drafter."""
    (store,) = results.values()
    names = [*store["cells"][0]["drafters"]]
    rows = []
    for cell in store["cells"]:
        figures = cell["drafters"].values()
        shown = [f"{each['tokens_per_step']:.2f}, {each['speed_up']:.2f}x" for each in figures]
        rows.append([f"{cell['context']:,}", cell["text"], *shown])
    return markdown(["context", "text", *names], rows)


def verifying(results: Results, options: Options) -> str:
    """A row per kind of weights, context and reading: the time of a step by how many drafts it
    verifies."""
    rows, most = [], 0
    for store in results.values():
        weights = store["settings"]["weights"]
        most = store["settings"]["drafts"]
        for cell in store["cells"]:
            times = (f"{ratio:.2f}x" for ratio in cell["ratios"][1:])
            own = [weights, f"{cell['context']:,}", cell["reads"]]
            own += [f"{cell['milliseconds'][0]:.1f}", *times]
            rows.append([*own, f"{cell['once']:.2f}", f"{cell['token']:.3f}"])
    counts = [f"{n} draft{'s' * (n > 1)}" for n in range(1, most + 1)]
    header = ["weights", "context", "reads", "no drafts, ms", *counts]
    return markdown([*header, "a draft takes", "and per token"], rows)
