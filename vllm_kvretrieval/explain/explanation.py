"""A prompt read by a model, and what a method leaves of it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.explain.attended import Attended, attended, entropy_budgets
from vllm_kvretrieval.explain.chunk_shares import chunk_shares, last_chunk
from vllm_kvretrieval.explain.observed_attention import LATEST, LayerAttention, PromptAttention
from vllm_kvretrieval.explain.output import HeadAttention, layer_rows, shares_of
from vllm_kvretrieval.observed_model import ObservedModel
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.families import DroppingMethod

MOST_SHOWN = 16
"""KV heads that are shown one by one."""


class Explanation(NamedTuple):
    """What is found of a prompt.

    Attributes:
        rows: Figures per layer with full attention.
        heads: The KV heads that are shown one by one.
        layers: The attention of these layers, by number.
        longest: Tokens of the model's longest context.
        whole: bool [layers that are not dense, kv_heads]; heads that attend to whole contexts;
            None: there are none.
    """

    rows: list[dict[str, Any]]
    heads: list[HeadAttention]
    layers: Mapping[int, LayerAttention]
    longest: int
    whole: np.ndarray | None


class _Model(NamedTuple):
    """A model as vLLM's configuration describes it, as far as retrieval heads ask."""

    model: str
    hf_text_config: Any
    kv_heads: int

    def get_total_num_kv_heads(self) -> int:
        """KV heads of each layer."""
        return self.kv_heads


def check_heads(
    observed_model: ObservedModel, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> None:
    """Check the named layers and heads before anything is read.

    Raises:
        ValueError: The model has no such layer or KV head, or there are too many to be shown.
    """
    config = observed_model.config
    kv_heads = getattr(config, "num_key_value_heads", None)
    _check("--layer", layers, config.num_hidden_layers, f"{observed_model.name} has layers")
    _check("--head", heads, kv_heads, f"{observed_model.name} has KV heads")
    if (count := len(layers or [0]) * len(heads or [0])) > MOST_SHOWN:
        raise ValueError(
            f"--layer and --head name {count} KV heads; at most {MOST_SHOWN} are shown at once"
        )


def explain_prompt(
    observed_model: ObservedModel,
    tokens: torch.Tensor,
    config: RetrievalConfig,
    observed: int | None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Explanation:
    """Read a prompt that does not fit in the budget.

    Args:
        observed_model: The model.
        tokens: int64 [n]; the prompt.
        config: Options of an engine with the method.
        observed: Queries at the prompt's end whose attention counts; None: all.
        layers: Layers to be shown; None: the layer that is not dense with the highest entropy.
        heads: KV heads of these layers to be shown; None: the head whose last query has the least
            of its attention on the tokens that are left.

    Raises:
        ValueError: A layer has no full attention, or no such head; or the method needs retrieval
            heads, and those of the model are not known; or the prompt is too short for chunks.
    """
    sparse = config.prefill_budget is not None
    chunk = last_chunk(config, len(tokens)) if sparse else None
    own = config.own
    own.fixed_counts(_Model(observed_model.name, observed_model.config, 1), [])  # refused at once
    latest = LATEST if chunk is None else max(LATEST, len(tokens) - chunk[0])
    rule = own.keeping if isinstance(own, DroppingMethod) else None
    seen = PromptAttention(len(tokens), observed, rule, latest)
    observed_model.read(tokens, seen.positions, seen.observe)
    longest = observed_model.longest(len(tokens))
    with torch.inference_mode():
        kv_heads = next(iter(seen.layers.values())).kv_heads
        model = _Model(observed_model.name, observed_model.config, kv_heads)
        counts = own.fixed_counts(model, [n for n in seen.layers if n >= config.dense_layers])
        whole = None if counts is None else counts.reshape(-1, kv_heads) > 0
        found = attended(config, seen.layers, longest, whole)
        by_entropy = entropy_budgets(list(seen.layers.values()), config.budget, longest)
        shown = []
        for number in [_widest(seen.layers, config.dense_layers)] if layers is None else layers:
            if number not in seen.layers:
                raise ValueError(
                    f"--layer {number} has no full attention that transformers shows; those that "
                    f"have are {', '.join(map(str, seen.layers))}"
                )
            shown += _heads(number, seen.layers[number], found[number], heads)
        rows = layer_rows(seen.layers, by_entropy, found)
        if chunk is not None:
            shares = chunk_shares(config, seen.layers, chunk, model)
            for row in rows:
                of_layer = shares[row["layer"]]
                row["chunk"] = [round(share, 5) for share in of_layer.kept.tolist()]
                row["prefill_budget_shares"] = [round(s, 4) for s in of_layer.shares.tolist()]
    return Explanation(rows, shown, seen.layers, longest, whole)


def _widest(layers: Mapping[int, LayerAttention], dense: int) -> int:
    candidates = [number for number in layers if number >= dense] or list(layers)
    return max(candidates, key=lambda number: layers[number].entropy)


def _heads(
    number: int, layer: LayerAttention, found: Attended, heads: Sequence[int] | None
) -> list[HeadAttention]:
    _check("--head", heads, layer.kv_heads, f"layer {number} has KV heads")
    shares, attention = shares_of(layer, found), layer.latest()
    return [
        HeadAttention(
            number,
            head,
            attention[head],
            found.tokens[head],
            found.always[head],
            float(shares[head]),
        )
        for head in ([int(shares.argmin())] if heads is None else heads)
    ]


def _check(option: str, numbers: Sequence[int] | None, end: int | None, what: str) -> None:
    if numbers and end is not None and max(numbers) >= end:
        raise ValueError(f"{option} {max(numbers)} does not exist: {what} 0 to {end - 1}")
