"""Models of the benchmarks: the size of their caches, and documents in their tokens."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from benchmarks import texts
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.roles import Follows


class Documents:
    """Endless distinct documents: the novel's tokens, each time from another starting point."""

    def __init__(self, model: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokens: list[int] = tokenizer("\n\n".join(texts.paragraphs()), verbose=False)["input_ids"]
        self._tokens = tokens
        self._serial = 0

    def take(self, count: int, length: int) -> list[list[int]]:
        """`count` documents of `length` tokens, none of which shares its beginning."""
        golden = (math.sqrt(5) - 1) / 2
        documents = []
        for _ in range(count):
            self._serial += 1
            start = int(self._serial * golden % 1 * len(self._tokens))
            text = itertools.islice(itertools.cycle(self._tokens), start, start + length)
            documents.append(list(text))
        return documents


def read_config(model: Path) -> SimpleNamespace:
    """A checkpoint's ``config.json``, as far as a file without its defaults tells."""
    return SimpleNamespace(**json.loads((model / "config.json").read_text()))


def head_size(config: Any) -> int:
    """Channels of a head."""
    given: int | None = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads


def kv_bytes_per_token(config: Any) -> int:
    """Bytes of keys and values that one token takes in all layers, in 16-bit precision."""
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_size(config)


def dense_layers(config: RetrievalConfig, model: Path, layers: Sequence[int]) -> int:
    """How many of the layers with full attention attend to whole contexts by the method's rules.

    Args:
        config: Options of the engine.
        model: Directory of the checkpoint.
        layers: The model's layers with full attention.
    """
    if not config.own.selects_for_others:
        return sum(layer < config.dense_layers for layer in layers)
    text_config = AutoConfig.from_pretrained(model).get_text_config()
    served = SimpleNamespace(model=str(model), hf_text_config=text_config)
    roles = config.roles(served, layers).values()
    return sum(not isinstance(role, Follows) for role in roles)


def yarn_overrides(config: Any, longest: int) -> dict[str, Any]:
    """Overrides of a model's config that stretch it to `longest` tokens, if it needs any."""
    own = config.rope_parameters
    limit = own.get("original_max_position_embeddings", config.max_position_embeddings)
    if longest <= config.max_position_embeddings:
        return {}
    factor = math.ceil(longest / limit)
    rope = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": limit,
        "rope_theta": own["rope_theta"],
    }
    return {"max_position_embeddings": limit * factor, "rope_parameters": rope}
