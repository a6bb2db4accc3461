"""Rotary embeddings of vLLM and of transformers turn by the same angles, also far beyond.

What is measured in transformers (filters, retrieval heads, shares) is served by vLLM.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, Gemma3TextConfig, LlamaConfig, LlamaModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import rotate_half
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding

from benchmarks.quality.key_ranks import Rotation
from vllm_kvretrieval import observed_model
from vllm_kvretrieval.observed_model import CHUNK, ObservedModel, Seen, alike

SIZE, TRAINED = 64, 600
"""Channels of a head, and a model's original length: more than a chunk of observed_model."""
SCALED = 4 * TRAINED
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": TRAINED,
        "short_factor": [1.0 + 0.01 * i for i in range(SIZE // 2)],
        "long_factor": [1.0 + 0.2 * i for i in range(SIZE // 2)],
    },
}  # fmt: skip
"""Parameters of scalings."""


def config_of(kind, **more):
    rope = {"rope_type": kind, "rope_theta": 1e5} | KINDS[kind] | more
    return LlamaConfig(
        hidden_size=4 * SIZE, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, max_position_embeddings=SCALED,
        rope_parameters=rope,
    )  # fmt: skip


def theirs(embedding, keys, positions, *kind):
    """Keys [tokens, heads, size] as transformers rotates them; the first channels, or all."""
    cos, sin = (part[0, :, None] for part in embedding(keys, positions[None], *kind))
    turned, rest = keys.tensor_split([cos.shape[-1]], -1)
    return torch.cat((turned * cos + rotate_half(turned) * sin, rest), -1)


def served(rope, keys, positions, length):
    """Keys as vLLM rotates them for contexts of up to a length."""
    before = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    config = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=length)
    with set_current_vllm_config(config):
        layer = rotary_embedding.get_rope(SIZE, SCALED, rope_parameters=rope, dtype=torch.float32)
        native = getattr(layer, "forward_native", layer.forward)
        flat = keys.flatten(1)
        _, made = native(positions, flat.clone(), flat.clone())
    rotary_embedding._ROPE_DICT.clear()
    rotary_embedding._ROPE_DICT.update(before)
    return made.view_as(keys)


def random_keys(tokens):
    return torch.rand(tokens, 2, SIZE, generator=torch.Generator().manual_seed(1)) - 0.5


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["whole", "partial"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, share):
    """Both sides of the original length."""
    more = {} if share == 1 else {"partial_rotary_factor": share}
    if more and kind == "longrope":
        more |= {n: KINDS[kind][n][: SIZE // 4] for n in ("short_factor", "long_factor")}
    config = config_of(kind, **more)
    embedding: Any = PhiRotaryEmbedding(config)  # Llama's is never partial
    for length in (TRAINED, SCALED):
        positions = torch.tensor([0, 1, TRAINED - 1, TRAINED, length // 2, length - 1])
        positions = positions[positions < length]
        keys = random_keys(len(positions))
        found = served(config.rope_parameters, keys, positions, length)
        torch.testing.assert_close(found, theirs(embedding, keys, positions), atol=2e-4, rtol=1e-3)


def test_kinds_of_layers():
    """Gemma 3 rotates layers with windows by another base."""
    parts = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    config = Gemma3TextConfig(
        head_dim=SIZE, num_hidden_layers=2, max_position_embeddings=SCALED, rope_parameters=parts,
        layer_types=[*parts],
    )  # fmt: skip
    embedding: Any = Gemma3RotaryEmbedding(config)
    positions = torch.tensor([0, 1, TRAINED, SCALED - 1])
    keys = random_keys(len(positions))
    for kind, part in parts.items():
        found = served(part, keys, positions, SCALED)
        wanted = theirs(embedding, keys, positions, kind)
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_rotations_undone(kind):
    """Keys come back, whatever factor the scaling brings."""
    model = LlamaModel(config_of(kind))
    rotation = Rotation(SimpleNamespace(model=model, name="a"), SCALED)  # type: ignore[arg-type]
    keys = random_keys(SCALED).transpose(0, 1)
    wanted = theirs(model.rotary_emb, keys.transpose(0, 1), torch.arange(SCALED)).transpose(0, 1)
    torch.testing.assert_close(rotation.apply(keys), wanted)
    torch.testing.assert_close(rotation.undo(wanted), keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [TRAINED, SCALED // 2])
def test_calibration_of_longrope(monkeypatch, tokens):
    """Chunks are rotated alike, as vLLM rotates a context of that length."""
    torch.manual_seed(0)
    model = LlamaModel(config_of("longrope")).eval()
    monkeypatch.setattr(observed_model, "check_model", lambda _: None)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda _: None)

    def load(_, attn_implementation, **__):
        model.set_attn_implementation(attn_implementation)
        return model

    monkeypatch.setattr(AutoModel, "from_pretrained", load)
    assert tokens > CHUNK, "there is more than one chunk, and the first is a short context"
    assert CHUNK < TRAINED
    seen, text = list[Seen](), torch.arange(tokens) % 250
    ObservedModel("a").read(text, torch.tensor([tokens - 1]), seen.append)
    layer: Any = model.layers[0]
    plain = layer.self_attn.k_proj(layer.input_layernorm(model.embed_tokens(text)))
    wanted = served(
        model.config.rope_parameters, plain.view(tokens, 2, SIZE), torch.arange(tokens), tokens
    )
    torch.testing.assert_close(seen[0].key.transpose(0, 1), wanted, atol=1e-3, rtol=1e-3)
    assert model.rotary_emb.rope_type == "longrope", "nothing is left behind"
    with alike(model, tokens):
        assert model.rotary_emb.rope_type == "default"
