"""Small models whose layers all have full attention, with random weights: sharp attention."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.device_models import SHAPE, sharpened

LAYERS = 4
HEAD = {"num_hidden_layers": LAYERS, "head_dim": 64}
K2: dict[str, Any] = SHAPE | {
    "architectures": ["K2HorizonForCausalLM"],
    "model_type": "k2_horizon",
    "auto_map": {"AutoConfig": "configuration_k2_horizon.K2HorizonConfig"},
    "num_hidden_layers": LAYERS,
    "head_dim": 64,
    "rope_head_dim": 32,
    "query_key_norm": True,
    "layernorm_num_groups": 2,
    "attention_gate_func": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "num_experts": 0,
    "mova_num_experts": 0,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 524288,
    "dtype": "float32",
}
"""K2-Horizon without experts: transformers does not know it, so a checkpoint brings its class."""
CLASS = """from transformers import PretrainedConfig


class K2HorizonConfig(PretrainedConfig):
    model_type = "k2_horizon"
"""


def qwen3(path: Path) -> None:
    """Qwen 3: norms of queries and keys."""
    model = Qwen3ForCausalLM(Qwen3Config(**HEAD, **SHAPE))
    sharpened(model, "q_norm.weight").save_pretrained(path)


def glm4(path: Path) -> None:
    """GLM-4: half of each head is rotated, by pairs; norms behind attention and network."""
    Glm4ForCausalLM(Glm4Config(**HEAD, pad_token_id=0, **SHAPE)).save_pretrained(path)


def k2_horizon(path: Path) -> None:
    """K2-Horizon: 512K tokens; half of each head is rotated, and attention is gated."""
    (path / "config.json").write_text(json.dumps(K2))
    (path / "configuration_k2_horizon.py").write_text(CLASS)
    hidden, inner, size = K2["hidden_size"], K2["intermediate_size"], K2["head_dim"]
    queries, keys = (K2[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    made = {"model.embed_tokens": (512, hidden), "lm_head": (512, hidden), "model.norm": (hidden,)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        made |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        made |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        made |= {f"{layer}.mlp.down_proj": (hidden, inner)}
        attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": queries}
        made |= {f"{layer}.self_attn.{name}": (rows, hidden) for name, rows in attention.items()}
        made |= {f"{layer}.self_attn.o_proj": (hidden, queries)}
        made |= {f"{layer}.self_attn.q_norm": (queries,), f"{layer}.self_attn.k_norm": (keys,)}
    weights = {f"{name}.weight": _weight(name, shape) for name, shape in made.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Of a norm those that make attention sharp; else random ones."""
    if len(shape) > 1:
        return SHAPE["initializer_range"] * torch.randn(shape)
    return torch.full(shape, 4.0 if name.endswith("q_norm") else 1.0)


MODELS: dict[str, Callable[[Path], None]] = {
    "qwen3": qwen3,
    "glm4": glm4,
    "k2_horizon": k2_horizon,
}
"""What saves a checkpoint, by the family."""
