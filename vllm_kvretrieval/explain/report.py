"""The output of ``explain``: the numbers, and a table of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from vllm_kvretrieval.explain.attended import Attended, EntropyBudgets
from vllm_kvretrieval.explain.attention import LayerAttention

STRETCHES = 100
"""Parts of equal length that a prompt is divided into, one character each."""
MOST_ATTENDED = 5
EXCERPT = 60
"""Characters of a stretch's text that are shown."""
LEVELS = " .:-=+*#%@"
"""Levels of a stretch's attention; each means twice as much as the one before."""
EVEN = 4
"""The level of a stretch that has an equal part of the attention."""
BAR = 30


class HeadAttention(NamedTuple):
    """The attention of one KV head over the prompt.

    Attributes:
        layer, head: The numbers of the layer and of the KV head.
        attention: float32 [tokens]; attention of the last queries, a mean over queries.
        tokens, always: bool [tokens]; see :class:`Attended`.
        share: The share of the last query's attention that falls on ``tokens``.
    """

    layer: int
    head: int
    attention: torch.Tensor
    tokens: torch.Tensor
    always: torch.Tensor
    share: float


def shares_of(layer: LayerAttention, found: Attended) -> torch.Tensor:
    """float32 [kv_heads]; the share of the last query's attention on the attended tokens."""
    return (layer.latest(1) * found.tokens).sum(1)


def borders(tokens: int, stretches: int) -> list[int]:
    """The first token of each stretch of a prompt, and the end; no stretch is empty."""
    count = min(stretches, tokens)
    return [part * tokens // count for part in range(count + 1)]


def sums(values: torch.Tensor, ends: Sequence[int]) -> list[float]:
    """Sums of values, [tokens], over the parts between :func:`borders`."""
    total = torch.cat([torch.zeros(1, dtype=torch.float64), values.double().cumsum(0)])
    return total[list(ends)].diff().tolist()


def layer_rows(
    layers: Mapping[int, LayerAttention],
    budgets: EntropyBudgets,
    found: Mapping[int, Attended],
) -> list[dict[str, Any]]:
    """A row per layer, for JSON.

    Args:
        layers: The layers' attention, by number.
        budgets: The layers' budgets.
        found: The tokens that their heads attend to.
    """
    return [
        {
            "layer": number,
            "entropy": round(layer.entropy, 5),
            "entropy_share": round(float(share), 5),
            "entropy_budgets": tokens.tolist(),
            "attended": found[number].tokens.sum(1).tolist(),
            "attention": [round(value, 5) for value in shares_of(layer, found[number]).tolist()],
        }
        for (number, layer), share, tokens in zip(
            layers.items(), budgets.shares, budgets.tokens, strict=True
        )
    ]


def head_row(head: HeadAttention, text_of: Callable[[int, int], str]) -> dict[str, Any]:
    """The figures of a KV head, for JSON.

    Args:
        head: The attention of the KV head.
        text_of: The text of the tokens from one position to before another.
    """
    ends = borders(len(head.attention), STRETCHES)
    attention = sums(head.attention, ends)
    most = sorted(range(len(attention)), key=lambda part: -attention[part])[:MOST_ATTENDED]
    return {
        "layer": head.layer,
        "head": head.head,
        "attention": round(head.share, 5),
        "attended": runs(head.tokens),
        "always": runs(head.always),
        "stretches": {
            "begin": ends[:-1],
            "attention": [round(value, 6) for value in attention],
            "attended": [int(value) for value in sums(head.tokens, ends)],
        },
        "most_attended": [
            {
                "begin": ends[part],
                "end": ends[part + 1],
                "text": _excerpt(text_of(ends[part], ends[part + 1])),
            }
            for part in most
        ],
    }


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= EXCERPT else f"{line[: EXCERPT - 3]}..."


def runs(mask: torch.Tensor) -> list[list[int]]:
    """The runs that are set in a mask, bool [n]: first position, and the one after the last."""
    steps = torch.diff(mask.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()
    return steps.view(-1, 2).tolist()


def table(result: dict[str, Any]) -> str:
    """The text that is printed for a result."""
    tokens, drops = result["tokens"], result["drops"]
    verb, sparse = "kept" if drops else "selected", result["prefill_budget"] is not None
    size = result["page_size"]
    pages = "" if size is None else f", in pages of {size} tokens"
    lines = [
        f"{result['model']}, {result['text']}: {tokens} tokens; {result['method']} at a budget of "
        f"{result['budget']}{pages}",
        f"Per layer: entropy of the attention of {_queries(result['observation'], tokens)}, in "
        "nats; tokens per KV head",
        f"that the rule of entropies makes of it; tokens that are {verb}; their share of the last "
        "query's attention",
        f"  layer  entropy  by entropy  {verb:>8}  attention{'  chunk' if sparse else ''}",
    ]
    if sparse:
        budget, share = result["prefill_budget"], result["prefill_share"]
        depth = result["prefill_depth"]
        beside = f" and a prefill_share of {share:g}" if share else ""
        beside += f" and a prefill_depth of {depth:g}" if depth < 1 else ""
        shares = [share for row in result["layers"] for share in row["prefill_budget_shares"]]
        if min(shares) < max(shares):
            beside += f" and KV heads with {min(shares):.2f} to {max(shares):.2f} times as much"
        of_chunk = "and of that of the queries of the last chunk, by a prefill_budget of"
        lines.insert(3, f"{of_chunk} {budget}{beside}")
    longest = max(_mean(row["entropy_budgets"]) for row in result["layers"])
    lines += [
        f"  {row['layer']:>5}  {row['entropy']:7.3f}  {_mean(row['entropy_budgets']):10.0f}  "
        f"{_mean(row['attended']):8.0f}  {100 * _mean(row['attention']):7.1f} %  "
        + (f"{100 * _mean(row['chunk']):3.0f} %  " if sparse else "")
        + "#" * round(BAR * _mean(row["entropy_budgets"]) / longest)
        for row in result["layers"]
    ]
    for head in result["heads"]:
        lines += ["", *_head_lines(head, tokens, result["latest"], drops)]
    return "\n".join(lines)


def _queries(observation: int | str, tokens: int) -> str:
    every = observation == "all" or int(observation) >= tokens
    return "all queries" if every else f"the last {observation} queries"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _head_lines(head: dict[str, Any], tokens: int, latest: int, drops: bool) -> list[str]:
    verb, left = ("kept", "dropped") if drops else ("selected", "left out")
    stretches = head["stretches"]
    ends = [*stretches["begin"], tokens]
    sizes = [end - begin for begin, end in pairwise(ends)]
    attended, always = (sum(end - begin for begin, end in head[k]) for k in ("attended", "always"))
    chosen = [part / size for part, size in zip(stretches["attended"], sizes, strict=True)]
    lines = [
        f"Layer {head['layer']}, KV head {head['head']}: {attended - always} tokens {verb} by "
        f"attention and {always} always, {tokens - attended} {left}; "
        f"{100 * head['attention']:.1f} % of the last query's attention",
        f"  attention of the last {latest} queries in {len(sizes)} stretches of the prompt; each "
        f"of '{LEVELS}' is twice the one before, '{LEVELS[EVEN]}' even",
        f"  |{''.join(_level(share * len(sizes)) for share in stretches['attention'])}|",
        f"  {verb}: '#' a whole stretch, '+' half of it or more, '.' less",
        f"  |{''.join(_part(share) for share in chosen)}|",
        "  most attended:",
    ]
    begins = {begin: place for place, begin in enumerate(stretches["begin"])}
    for most in head["most_attended"]:
        place = begins[most["begin"]]
        lines.append(
            f"  {most['begin']:>7} to {most['end'] - 1:<7}"
            f"{100 * stretches['attention'][place]:5.1f} %  "
            f"{stretches['attended'][place]:>4} of {sizes[place]:<4} {verb}  {most['text']!r}"
        )
    return lines


def _level(relative: float) -> str:
    """The level of a stretch whose attention is ``relative`` times an equal part."""
    if relative <= 0:
        return LEVELS[0]
    level = math.floor(math.log2(relative) + 0.5) + EVEN
    return LEVELS[min(max(level, 0), len(LEVELS) - 1)]


def _part(share: float) -> str:
    if share in (0, 1):
        return "#" if share else " "
    return "+" if share >= 0.5 else "."
