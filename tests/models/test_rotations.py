"""Rotary embeddings that are overridden, and lengths for which there are none."""

import json
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding

from tests.support.model_configs import GEMMA, LLAMA
from vllm_kvretrieval.command_line import check_command_line
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.upstream import rotations

BASE = 1e5
TRAINED = 2048
"""LLAMA's length."""
PLAIN = {"rope_type": "default", "rope_theta": BASE}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONG = {"max_position_embeddings": 4 * TRAINED}
OVERRIDDEN: dict[str, Any] = {"rope_parameters": YARN} | LONG
LOCAL = GEMMA["rope_parameters"]["sliding_attention"]


@pytest.fixture
def configure(tmp_path):
    """The engine's configuration for a model with some rotations."""

    def configure(model, overrides=None, **options):
        (tmp_path / "config.json").write_text(json.dumps(model))
        return EngineArgs(
            model=str(tmp_path), attention_backend="freekv", skip_tokenizer_init=True,
            hf_overrides=overrides or {}, **options,
        ).create_engine_config()  # fmt: skip

    return configure


@pytest.fixture
def said(monkeypatch):
    """What is logged of rotations."""
    lines = []
    monkeypatch.setattr(rotations.logger, "info", lambda text, *args: lines.append(text % args))
    return lines


def made_by(config):
    """Those that vLLM makes, of a model with one kind of layers."""
    model = config.model_config
    rotary_embedding._ROPE_DICT.clear()
    with set_current_vllm_config(config):
        return rotary_embedding.get_rope(
            model.get_head_size(),
            model.hf_text_config.max_position_embeddings,
            rope_parameters=model.hf_text_config.rope_parameters,
        )


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_an_override_keeps_the_base(configure, said, name):
    """Without it, vLLM would rotate by a base of 10,000: other keys than the model has learned."""
    model = LLAMA | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}
    config = configure(model, {name: YARN} | LONG)
    layer = made_by(config)
    assert (layer.base, layer.rotary_dim) == (BASE, 32)
    assert config.model_config.max_model_len == len(layer.cos_sin_cache) == 4 * TRAINED
    assert "rope_theta" not in YARN, "the caller's own"
    assert "keep rope_theta=100000.0, partial_rotary_factor=0.5 of" in "".join(said)


def test_yarn_without_the_original_length(configure, said):
    """VLLM would end in a KeyError when it makes the layers."""
    short = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}} | LONG
    layer = made_by(configure(LLAMA | {"rope_parameters": PLAIN}, short))
    assert (layer.base, len(layer.cos_sin_cache)) == (BASE, 4 * TRAINED)
    assert f"original_max_position_embeddings={TRAINED} of" in said.pop()


@pytest.mark.parametrize(
    "given",
    [
        ("--hf-overrides", '{"rope_scaling": {"type": "yarn", "factor": 4.0}}'),
        ('--hf-overrides={"rope_parameters": {"factor": 4.0}}',),
        ("--hf-overrides.rope_parameters.factor", "4.0"),
    ],
)
def test_an_override_without_a_kind(given):
    """As on model cards; vLLM would end in a KeyError, before a platform is asked."""
    command = ["vllm", "serve", "m", "--attention-backend", "kvretrieval"]
    with pytest.raises(RetrievalConfigError, match=r'needs a rope_type.*"rope_type": "yarn", "fac'):
        check_command_line([*command, *given])
    check_command_line([*command, "--hf-overrides", json.dumps(OVERRIDDEN)])
    check_command_line(["vllm", "serve", "m", *given])


def test_what_an_override_says_is_kept(configure, said):
    own = YARN | {"rope_theta": 5e5}
    config = configure(LLAMA | {"rope_parameters": PLAIN}, {"rope_parameters": own} | LONG)
    assert made_by(config).base == 5e5
    assert not said


def test_a_base_beside_the_parameters(configure):
    message = r"rope_theta=500000.0 has no effect.* inside of rope_parameters: (\{.*\})\."
    model = LLAMA | {"rope_parameters": PLAIN}
    with pytest.raises(ValueError, match=message) as refused:
        configure(model, {"rope_theta": 5e5})
    (given,) = json_of(refused)
    assert made_by(configure(model, given)).base == 5e5


def json_of(refused):
    """The JSON objects in a message."""
    text, found = str(refused.value), []
    while (start := text.find('{"')) >= 0:
        value, length = json.JSONDecoder().raw_decode(text[start:])
        found.append(value)
        text = text[start + length :]
    return found


def test_one_kind_of_layers_is_left_out(configure):
    """Gemma 3 rotates by two bases. vLLM would fail when it makes the layers."""
    scaled = {"full_attention": YARN}
    with pytest.raises(ValueError, match="kind sliding_attention without rotations") as refused:
        configure(GEMMA, {"rope_parameters": scaled})
    (given,) = json_of(refused)
    assert given["rope_parameters"]["sliding_attention"] == LOCAL
    config = configure(GEMMA, given | LONG).model_config.hf_text_config
    assert config.rope_parameters["full_attention"] == YARN | {"rope_theta": BASE}
    with pytest.raises(ValueError, match="kind sliding_attention, full_attention without"):
        configure(GEMMA, {"rope_parameters": YARN})


@pytest.mark.parametrize(
    ("model", "made"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": BASE}}, TRAINED),
        ({"model_max_length": 4 * TRAINED, "rope_parameters": PLAIN}, TRAINED),
        ({"rope_parameters": YARN | {"factor": 2.0, "rope_theta": BASE}} | LONG, 2 * TRAINED),
    ],
    ids=["dynamic", "model_max_length", "yarn"],
)
def test_a_length_without_made_by(configure, model, made):
    """VLLM accepts it, and rotates by the memory behind its table; the remedy serves it."""
    message = rf"rotations for {made} tokens .* Set --max-model-len {made}, or scale by YaRN"
    with pytest.raises(ValueError, match=message) as refused:
        configure(LLAMA | model, max_model_len=4 * TRAINED)
    configure(LLAMA | model, max_model_len=made)
    (given,) = json_of(refused)
    config = configure(LLAMA | model, given, max_model_len=4 * TRAINED)
    layer = made_by(config)
    assert len(layer.cos_sin_cache) == 4 * TRAINED
    assert layer.base == BASE


@pytest.mark.parametrize(
    "part",
    [
        PLAIN,
        {"rope_type": "linear", "factor": 4.0, "rope_theta": BASE},
        {
            "rope_type": "llama3", "factor": 4.0, "rope_theta": BASE, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": TRAINED // 4,
        },
        PLAIN | {"mrope_section": [8, 12, 12]},
    ],
    ids=["default", "linear", "llama3", "mrope"],
)  # fmt: skip
def test_lengths_with_made_by(configure, part):
    """Nothing is left behind of how they were found."""
    made = dict(rotary_embedding._ROPE_DICT)
    config = configure(LLAMA | {"rope_parameters": part})
    assert made == rotary_embedding._ROPE_DICT
    table = made_by(config).cos_sin_cache
    assert table.device == torch.device("cpu")
    assert len(table) >= config.model_config.max_model_len


@pytest.mark.parametrize(
    ("given", "scale"), [({"attention_factor": 1.5}, 1.5), ({"factor": 16.0}, 1.1678), ({}, 1.0871)]
)
def test_longrope_is_scaled_as_the_checkpoint_says(configure, given, scale):
    """VLLM takes the last of these for all, by the two lengths."""
    part = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32, "original_max_position_embeddings": TRAINED,
    }  # fmt: skip
    config = configure(LLAMA | {"rope_parameters": part | given} | LONG, max_model_len=4 * TRAINED)
    assert made_by(config).long_mscale == pytest.approx(scale, abs=1e-4)


def test_a_longrope_model_says_which_factors_it_uses(configure, said):
    part = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "factor": 4.0,
        "long_factor": [2.0] * 32, "original_max_position_embeddings": TRAINED,
    }  # fmt: skip
    model = LLAMA | {"rope_parameters": part} | LONG
    configure(model, max_model_len=TRAINED)
    assert f"short factors, which serve --max-model-len up to {TRAINED}" in said.pop()
    configure(model, max_model_len=4 * TRAINED)
    assert f"beyond {TRAINED}; up to this length" in "".join(said)
