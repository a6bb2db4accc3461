"""``vllm-kvretrieval doctor --max-model-len``: how a model serves longer contexts."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_configs import GEMMA, LLAMA
from vllm_kvretrieval.command import main
from vllm_kvretrieval.doctor.options import read_options

SIZE = {"max_position_embeddings": 32768}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32, "original_max_position_embeddings": 4096,
}  # fmt: skip


def of(architecture, kind, rope, longest, **more):
    """The configuration of a small model of a family."""
    named = {"architectures": [f"{architecture}ForCausalLM"], "model_type": kind, "head_dim": 64}
    return LLAMA | named | {"rope_parameters": rope, "max_position_embeddings": longest} | more


QWEN2 = of("Qwen2", "qwen2", PLAIN, 32768)
QWEN3 = of("Qwen3", "qwen3", PLAIN, 40960)
LLAMA_3 = of("Llama", "llama", PLAIN | {"rope_theta": 5e5}, 8192)
LLAMA_3_1 = of("Llama", "llama", LLAMA3, 131072)
PHI_3 = of("Phi3", "phi3", LONGROPE, 131072, original_max_position_embeddings=4096, pad_token_id=0)
SMOLLM2 = of("Llama", "llama", PLAIN | {"rope_theta": 1e5}, 8192)


@pytest.fixture
def ask(tmp_path, capsys, monkeypatch):
    """What doctor says of a model and a length, by names of findings."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr("vllm_kvretrieval.doctor.command._examine_cpu", lambda *_, **__: iter(()))
    monkeypatch.setattr("vllm_kvretrieval.doctor.home.check_home", lambda *_: iter(()))

    def ask(model: dict[str, Any], length: int | str) -> tuple[int, dict[str, dict[str, str]]]:
        (tmp_path / "config.json").write_text(json.dumps(model))
        (tmp_path / "tokenizer_config.json").write_text("{}")
        status = main(["doctor", "--json", "--max-model-len", str(length), str(tmp_path)])
        return status, {found["name"]: found for found in json.loads(capsys.readouterr().out)}

    return ask


def recipe(found):
    """The arguments of vllm serve that are recommended, and the override among them."""
    words = shlex.split(found["recipe"]["text"].removeprefix("vllm serve "))
    return words, json.loads(words[-1]) if "--hf-overrides" in words else None


@pytest.mark.parametrize(
    ("model", "length", "trained", "factor", "known"),
    [
        (QWEN2, 131072, 32768, 4.0, "Qwen2.5 was tested with YaRN of factor 4"),
        (QWEN2, 65536, 32768, 2.0, "tested with YaRN of factor 2"),
        (QWEN3, 131072, 32768, 4.0, "Qwen3 was tested"),
        (QWEN2, 262144, 32768, 8.0, "no test of this model with YaRN of factor 8"),
        (LLAMA_3, 16384, 8192, 2.0, "no test of this model"),
        (SMOLLM2, 32768, 8192, 4.0, "no test of this model"),
    ],
)
def test_recipes(ask, model, length, trained, factor, known):
    """They are read as they are meant: base, length and all."""
    status, found = ask(model, length)
    assert status == 0, found
    words, override = recipe(found)
    base = model["rope_parameters"]["rope_theta"]
    assert override == {
        "rope_parameters": {
            "rope_type": "yarn", "factor": factor, "rope_theta": base,
            "original_max_position_embeddings": trained,
        },
        "max_position_embeddings": trained * factor,
    }  # fmt: skip
    assert known in found["accuracy"]["text"]
    served = read_options(words).model_config
    assert served.max_model_len == length
    assert "a context of" in found["sizes"]["text"]


def test_what_needs_no_recipe(ask):
    for model, length in ((QWEN2, "32K"), (LLAMA_3_1, 131072)):
        status, found = ask(model, length)
        assert status == 0
        _, override = recipe(found)
        assert override is None
        assert "config.json names" in found["accuracy"]["text"]
    assert "rotations: llama3, factor 8.0" in found["length"]["text"]


@pytest.mark.parametrize("model", [LLAMA_3_1, PHI_3])
def test_what_has_no_recipe(ask, model):
    """To put YaRN in the place of such rotations would undo what the weights have learned."""
    status, found = ask(model, 262144)
    assert status == 1
    assert "no further scaling is known; serve up to 131072" in " ".join(
        (found["recipe"]["text"] + "; " + found["recipe"]["remedy"]).split()
    )


def test_longrope(ask):
    for length, which in ((4096, "short"), (131072, "long")):
        status, found = ask(PHI_3, length)
        assert status == 0
        assert f"by its {which} factors" in found["accuracy"]["text"]
    assert found["accuracy"]["remedy"].endswith("--max-model-len 4096")


def test_layers_of_two_kinds(ask):
    """Layers with windows keep their rotations; sizes are of the others."""
    status, found = ask(GEMMA, 4096)
    assert status == 0, found
    words, override = recipe(found)
    parts = override["rope_parameters"]
    assert parts["sliding_attention"] == GEMMA["rope_parameters"]["sliding_attention"]
    assert parts["full_attention"]["factor"] == 2.0
    assert read_options(words).model_config.max_model_len == 4096
    assert (
        "0.2 KiB of KV cache in the layers with full attention (1 with 1 KV heads of 64)"
        in (found["sizes"]["text"])
    )


def test_sizes_differ_by_layer(ask):
    """As in Gemma 4, whose layers with full attention have wider heads."""
    kinds = ["sliding_attention", "full_attention"]
    model = {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "bfloat16",
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512,
        "num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": kinds,
        "max_position_embeddings": 8192, "sliding_window": 512,
    }  # fmt: skip
    _, found = ask(model, 4096)
    assert "1 with 1 KV heads of 512" in found["sizes"]["text"], found


def test_what_cannot_be_asked(ask, capsys):
    assert main(["doctor", "--max-model-len", "4096"]) == 1
    assert "--max-model-len wants a model" in capsys.readouterr().err
    assert main(["doctor", "--json", "--max-model-len", "4096", "/none/model"]) == 1
    assert "is not there" in capsys.readouterr().out


def test_the_page_has_the_recipes(ask):
    """Those of docs/long-contexts.md are what doctor prints."""
    page = (Path(__file__).parents[2] / "docs" / "long-contexts.md").read_text()
    shown = [json.loads(each) for each in re.findall(r"'(\{\"rope_parameters\".*\})'", page)]
    for model, length in ((QWEN2, 131072), (QWEN3, 131072), (LLAMA_3, 16384), (SMOLLM2, 32768)):
        assert recipe(ask(model, length)[1])[1] in shown
