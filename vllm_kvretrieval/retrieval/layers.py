"""The layers of a model that attend to whole contexts, by one rule for front end and worker."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_kvretrieval.retrieval.roles import Follows, Role

LISTS = ("layers_block_type", "attn_type_list", "layer_types")
"""Fields of a model's configuration that say of each layer what it is, as vLLM asks for them."""

WHOLE = ("full_attention", "attention", "hybrid", 1)
"""Kinds of layers with full attention; a ``hybrid`` layer has a recurrent state beside it."""

PARTLY = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers that attend to the end of a context, and the field that says how much of it."""

WITHOUT = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "mlp", "moe", 0)
"""Kinds of layers that do not attend to a KV cache."""


def full_attention_layers(model_config: Any) -> list[int] | None:
    """Numbers of a model's layers with plain full attention, by its configuration.

    Args:
        model_config: vLLM's.

    Returns:
        They rise. None: the configuration does not say it, and only the loaded model shows it.
    """
    config, layers = model_config.hf_text_config, model_config.get_total_num_hidden_layers()
    kinds = next(filter(None, (getattr(config, name, None) for name in LISTS)), None)
    if kinds is None:
        window, model = getattr(config, "sliding_window", None), model_config
        unlike = model.is_hybrid or model.is_attention_free or model.has_noops
        return None if unlike or window is not None else list(range(layers))
    for kind in kinds:
        window = getattr(config, PARTLY[kind], None) if kind in PARTLY else None
        if kind not in WHOLE and kind not in WITHOUT and not window:
            return None
    return [number for number, kind in enumerate(kinds[:layers]) if kind in WHOLE]


def has_windows(model_config: Any) -> bool:
    """Whether some of a model's layers have a sliding window, by its configuration (vLLM's)."""
    if getattr(model_config.hf_text_config, "sliding_window", None) is None:
        return False
    full = full_attention_layers(model_config)
    return full is None or len(full) < model_config.get_total_num_hidden_layers()


def retrieving_layers(
    numbers: Iterable[int], roles: Mapping[int, Role], dense_layers: int
) -> list[int]:
    """Layers with plain full attention that attend to parts of long contexts.

    Args:
        numbers: Numbers of the layers with plain full attention.
        roles: What they do; empty where each selects for itself.
        dense_layers: Leading layers of the model that keep full attention.
    """
    if roles:
        return [number for number in numbers if isinstance(roles.get(number), Follows)]
    return [number for number in numbers if number >= dense_layers]
