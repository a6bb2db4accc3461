"""A page for browsers in one file: which passages of a text are attended to, head by head.

It loads nothing, and what it shows of a text is text, never markup.
"""

import base64
import hashlib
import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch

from vllm_kvretrieval.explain.attended import attended
from vllm_kvretrieval.explain.explanation import Explanation
from vllm_kvretrieval.explain.observed_attention import LayerAttention
from vllm_kvretrieval.explain.output import borders, shares_of, sums
from vllm_kvretrieval.options.engine import RetrievalConfig

PASSAGES = 160
"""Parts of equal length that a prompt is divided into."""

STEPS = 8
"""The prompt's last tokens, each of which is shown as a decode step."""


class Step(NamedTuple):
    """The attention of a step in one head, or in a group of layers.

    Attributes:
        weights: Of each passage; shares of the attention.
        kept: Tokens of each passage that are attended to; None: those with a weight are.
        share: The share of the attention that falls on these; None: that is not known.
    """

    weights: Sequence[float]
    kept: Sequence[int] | None = None
    share: float | None = None


class Row(NamedTuple):
    """A KV head, or a group of layers, and its steps."""

    name: str
    steps: Sequence[Step]


class Passages(NamedTuple):
    """The passages of a text.

    Attributes:
        begins: The first token of each.
        tokens: Tokens in all.
        texts: The text of each.
    """

    begins: Sequence[int]
    tokens: int
    texts: Sequence[str]

    @classmethod
    def of(cls, ends: Sequence[int], text_of: Callable[[int, int], str]) -> "Passages":
        """The passages between positions, from a function that gives the text between two."""
        texts = [text_of(begin, end) for begin, end in pairwise(ends)]
        return cls(list(ends[:-1]), ends[-1], texts)


def write_page(
    path: Path,
    title: str,
    facts: str,
    passages: Passages,
    rows: Sequence[Row],
    steps: Sequence[str],
    verb: str,
    shares: Mapping[int, Sequence[float]] | None = None,
    first: int = 0,
) -> None:
    """Write the page, in a directory that is made if there is none.

    Args:
        path: The file.
        title: Of the page.
        facts: A line on how the figures came about.
        passages: The text.
        rows: What can be chosen; with ``shares`` the KV heads of these layers, in order.
        steps: The name of each step of a row.
        verb: What attended tokens are, such as ``selected``.
        shares: By layer and KV head the share of the attention that is kept.
        first: The row that is shown first.
    """
    data = {
        "facts": facts,
        "begins": passages.begins,
        "tokens": passages.tokens,
        "texts": passages.texts,
        "rows": [{"name": row.name, "steps": [_rounded(one) for one in row.steps]} for row in rows],
        "steps": steps,
        "verb": verb,
        "shares": [{"layer": n, "heads": [*of]} for n, of in (shares or {}).items()],
        "first": first,
    }
    own = files("vllm_kvretrieval.explain")
    script = own.joinpath("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Within a script element "<" may end it; in JSON it has another spelling.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = Template(own.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title), hash=f"sha256-{digest}", data=text, script=script
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _rounded(step: Step) -> dict[str, Any]:
    return {
        "weights": [float(f"{weight:.3g}") for weight in step.weights],
        "kept": None if step.kept is None else [*step.kept],
        "share": None if step.share is None else round(step.share, 4),
    }


def prompt_rows(
    config: RetrievalConfig, explained: Explanation, ends: Sequence[int]
) -> tuple[list[Row], list[str]]:
    """The rows of a prompt's KV heads, and the names of their steps.

    A step is the attention of one of the prompt's last tokens, and what the method would attend to
    if this token were decoded. Methods that drop tokens have one step: they decide at the end.

    Args:
        config: Options of an engine with the method.
        explained: The prompt.
        ends: The borders of the passages.
    """
    tokens = ends[-1]
    count = 1 if config.own.observes else min(STEPS, tokens - config.budget)
    queries = min(layer.queries.shape[1] for layer in explained.layers.values())
    lengths = range(tokens - min(count, queries) + 1, tokens + 1)
    by_row: dict[tuple[int, int], list[Step]] = {}
    for length in lengths:
        layers = {number: _until(layer, length) for number, layer in explained.layers.items()}
        found = attended(config, layers, explained.longest, explained.whole)
        for number, layer in layers.items():
            shares, attention = shares_of(layer, found[number]), layer.latest(1)
            pad = tokens - length
            for head in range(layer.kv_heads):
                weights = torch.nn.functional.pad(attention[head], (0, pad))
                kept = torch.nn.functional.pad(found[number].tokens[head].float(), (0, pad))
                step = Step(sums(weights, ends), _counts(sums(kept, ends)), float(shares[head]))
                by_row.setdefault((number, head), []).append(step)
    rows = [Row(f"layer {n}, KV head {head}", steps) for (n, head), steps in by_row.items()]
    return rows, [f"token {length - 1} of the text" for length in lengths]


def _counts(values: Iterable[float]) -> list[int]:
    return [round(value) for value in values]


def _until(layer: LayerAttention, length: int) -> LayerAttention:
    """A layer as it was when so many tokens had been read."""
    if not (left := layer.keys.shape[1] - length):
        return layer
    return LayerAttention(
        layer.mass[:, :length],
        layer.entropy,
        layer.queries[:, :-left],
        layer.keys[:, :length],
        layer.scale,
    )


def prompt_borders(tokens: int) -> list[int]:
    """The borders of a prompt's passages."""
    return borders(tokens, PASSAGES)
