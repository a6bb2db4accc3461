"""Lengths and rotations.

More of them on the page of [longer contexts](long-contexts.md).
"""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.models import gemma3
from vllm.utils.argparse_utils import human_readable_int

from tests.support.model_configs import GEMMA, LLAMA
from tests.surprises.rows import surprise

TRAINED = LLAMA["max_position_embeddings"]
BASE = 1e5
PLAIN = {"rope_type": "default", "rope_theta": BASE}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32, "original_max_position_embeddings": TRAINED,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """vLLM's view of a model, by its config.json."""

    def model(config, overrides=None, **options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        options = {"skip_tokenizer_init": True} | options
        return ModelConfig(model=str(tmp_path), hf_overrides=overrides or {}, **options)

    return model


def llama(rope, **more):
    return LLAMA | {"rope_parameters": rope} | more


def rotations(config) -> Any:
    """Those that vLLM makes for a model, as its layers do."""
    text = config.hf_text_config
    before = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    with set_current_vllm_config(VllmConfig(model_config=config)):
        made = rotary_embedding.get_rope(
            config.get_head_size(),
            text.max_position_embeddings,
            rope_parameters=text.rope_parameters,
            dtype=torch.float32,
        )
    rotary_embedding._ROPE_DICT.clear()
    rotary_embedding._ROPE_DICT.update(before)
    return made


@surprise(
    "config/model.py",
    expected="YaRN with factor 4 on `max_position_embeddings: 8192` serves 32,768 tokens",
    happens="8,192, and more is refused: vLLM takes the field for the length *after* scaling by "
    "YaRN. By `linear` and `dynamic` it multiplies",
    remedy="raise `max_position_embeddings`, too: `vllm-kvretrieval doctor --max-model-len N "
    "MODEL` "
    "prints the override",
)
def test_yarn_does_not_lengthen(model):
    yarn = llama(YARN | {"rope_theta": BASE})
    assert model(yarn).max_model_len == TRAINED
    with pytest.raises(ValueError, match="greater than the derived max_model_len"):
        model(yarn, max_model_len=4 * TRAINED)
    for kind in ("linear", "dynamic"):
        scaled = llama({"rope_type": kind, "factor": 4.0, "rope_theta": BASE})
        assert model(scaled).max_model_len == 4 * TRAINED


@surprise(
    "config/model.py transformers_utils/config.py",
    expected="`--hf-overrides` with a new rope scaling keeps the model's base",
    happens="the whole field is replaced, and the base is 10,000, without a word; `rope_theta` "
    "beside "
    "the field has no effect",
    remedy="the plug-in puts the checkpoint's own base back, and refuses the one that has no "
    "effect",
)
def test_an_override_loses_the_base(model):
    for name in ("rope_parameters", "rope_scaling"):
        scaled = {name: dict(YARN), "max_position_embeddings": 4 * TRAINED}
        assert rotations(model(llama(PLAIN), scaled)).base == 10_000
    assert rotations(model(llama(PLAIN), {"rope_theta": 5e5})).base == BASE


@surprise(
    "model_executor/layers/rotary_embedding/dynamic_ntk_scaling_rope.py config/model.py",
    expected="`dynamic` scaling lengthens the context",
    happens="the length is accepted, and the table of rotations is the unscaled one of the "
    "original "
    "length: later tokens are rotated by memory behind it",
    remedy="the plug-in refuses a length beyond the table, with the override that scales by YaRN",
)
def test_dynamic_scaling_is_not_applied(model):
    config = model(llama({"rope_type": "dynamic", "factor": 4.0, "rope_theta": BASE}))
    made = rotations(config)
    assert (config.max_model_len, len(made.cos_sin_cache)) == (4 * TRAINED, TRAINED)
    assert torch.equal(made.cos_sin_cache, rotations(model(llama(PLAIN))).cos_sin_cache)


@surprise(
    "model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py",
    expected="a longrope model rotates a short prompt by the short factors",
    happens="by the long ones, as soon as `--max-model-len` is beyond the original length; "
    "transformers chooses by the sequence",
    remedy="serve short prompts with `--max-model-len` of the original length; the log says which "
    "factors are in use",
)
def test_longrope_is_long_for_all(model, tmp_path):
    config = llama(LONGROPE, max_position_embeddings=4 * TRAINED)
    for length in (TRAINED, 4 * TRAINED):
        assert rotations(model(config, max_model_len=length)).use_long_rope == (length > TRAINED)
    theirs: Any = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    for tokens, frequency in ((100, 1.0), (TRAINED + 1, 0.5)):
        theirs(torch.zeros(1, 1, 64), torch.arange(tokens)[None])
        assert theirs.inv_freq[0] == frequency


@surprise(
    "config/model.py",
    expected="a longrope model starts with the same length, wherever its config.json has "
    "`original_max_position_embeddings`",
    happens="beside `rope_parameters`, as in Phi-3.5, the default length is the original one; "
    "inside, "
    "as transformers 5 saves it, the whole one, and the long factors with it",
    remedy="always give `--max-model-len`",
)
def test_the_default_length_of_longrope(model):
    inside = llama(LONGROPE, max_position_embeddings=4 * TRAINED)
    assert model(inside).max_model_len == 4 * TRAINED
    assert model(inside | {"original_max_position_embeddings": TRAINED}).max_model_len == TRAINED


@surprise(
    "config/model.py",
    expected="`model_max_length` in config.json is a limit",
    happens="where it is larger than the table of rotations, it is the length that is served",
    remedy="the plug-in refuses a length beyond the table; give `--max-model-len`",
)
def test_model_max_length_wins_upwards(model):
    config = model(llama(PLAIN, model_max_length=4 * TRAINED))
    assert config.max_model_len == 4 * TRAINED
    assert len(rotations(config).cos_sin_cache) == TRAINED


@surprise(
    "config/model.py",
    expected="`--disable-sliding-window` lets layers with windows see everything",
    happens="the context is cut to the window: to 128 tokens for gpt-oss",
    remedy="leave it out",
)
def test_disabled_windows_cut_the_context(model):
    windows = GEMMA | {"sliding_window": 128}
    assert model(windows).max_model_len == TRAINED
    assert model(windows, disable_sliding_window=True).max_model_len == 128


@surprise(
    "model_executor/models/gemma3.py",
    expected="`--hf-overrides` with the usual `rope_parameters` lengthens Gemma 3",
    happens="the configuration is accepted, and the start ends with a KeyError: the model looks "
    "for "
    "parameters of each kind of layers",
    remedy="give both kinds; the plug-in refuses what lacks one, with the whole override",
)
def test_gemma_3_wants_both_kinds(model, monkeypatch):
    config = model(GEMMA, {"rope_parameters": YARN}).hf_text_config
    module = lambda *_, **__: torch.nn.Module()  # noqa: E731
    for name in ("QKVParallelLinear", "RowParallelLinear", "GemmaRMSNorm"):
        monkeypatch.setattr(gemma3, name, module)
    monkeypatch.setattr(gemma3, "get_tensor_model_parallel_world_size", lambda: 1)
    sizes = SimpleNamespace(hidden=config.hidden_size, heads=config.num_attention_heads)
    with pytest.raises(KeyError, match="sliding_attention"):
        gemma3.Gemma3Attention(
            config, sizes.hidden, sizes.heads, 1, 64, TRAINED, prefix="model.layers.0.self_attn"
        )


@surprise(
    "utils/argparse_utils.py",
    expected="`--max-model-len 128k` is 131,072",
    happens="128,000: `k`, `m` and `g` are powers of 1000, `K`, `M` and `G` of 1024",
    remedy="write `128K`; for memory `--kv-cache-memory-bytes 2G`",
)
def test_small_k_is_a_thousand():
    assert [human_readable_int(text) for text in ("128k", "128K")] == [128_000, 131_072]


@surprise(
    "config/model.py",
    expected="`model_max_length` in tokenizer_config.json caps the context",
    happens="it is not looked at for models that generate text",
    remedy="give `--max-model-len`",
)
def test_the_tokenizer_does_not_cap_the_context(model, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert model(llama(PLAIN), skip_tokenizer_init=False).max_model_len == TRAINED


@surprise(
    "transformers_utils/config.py config/model.py",
    expected="the override of a model card starts, with `type: yarn`; and "
    "`--hf-overrides.rope_parameters.factor 4` changes the factor",
    happens="both end in a KeyError, `rope_type`: the field is replaced as a whole, and only that "
    "name is looked for",
    remedy="write `rope_type`, and the whole field as JSON; the plug-in says so in words, and adds "
    "the original length where an override leaves it out",
)
def test_rotations_without_their_kind(model):
    card = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    for name, given in (("rope_scaling", card), ("rope_parameters", {"factor": 4.0})):
        with pytest.raises(KeyError, match="rope_type"):
            model(llama(PLAIN), {name: given})


@surprise(
    "model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py",
    expected="`attention_factor` and `factor` of a longrope config.json are used, as in "
    "transformers",
    happens="vLLM makes the scale of the two lengths, and looks at neither",
    remedy="the plug-in hands the checkpoint's own scale on; stock vLLM reads `short_mscale` and "
    "`long_mscale`",
)
def test_the_scale_of_longrope(model, tmp_path):
    config = llama(LONGROPE | {"attention_factor": 2.0}, max_position_embeddings=4 * TRAINED)
    scale = math.sqrt(1 + math.log(4) / math.log(TRAINED))
    assert rotations(model(config)).long_mscale == pytest.approx(scale)
    theirs: Any = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    assert theirs.attention_scaling == 2.0


@surprise(
    "modeling_rope_utils.py",
    package="transformers",
    expected="a longrope prompt that is read in chunks gets the keys of one that is read at once",
    happens="chunks that end within the original length are rotated by the short factors, later "
    "ones "
    "by the long ones, in one cache",
    remedy="read it at once; our calibration pins the factors of the whole text",
)
def test_chunks_of_longrope(tmp_path, model):
    model(llama(LONGROPE, max_position_embeddings=4 * TRAINED))
    embedding: Any = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    whole = torch.arange(TRAINED + 1)[None]
    (at_once, _), (chunk, _) = (embedding(torch.zeros(1), p) for p in (whole, whole[:, :-1]))
    assert not torch.allclose(at_once[:, 1:TRAINED], chunk[:, 1:])
