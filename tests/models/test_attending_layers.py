"""Which layers of a model attend to whole contexts: its configuration and vLLM's layers agree.

Small models of many families, which vLLM builds without memory and weights.
"""

from typing import Any

import pytest
import torch
import transformers
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _RegisteredModel

from vllm_kvretrieval.engine.layers import number_layers
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.layers import full_attention_layers
from vllm_kvretrieval.upstream.states import end_chunks_at_blocks

SHAPE: dict[str, Any] = {
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STATES = {"n_heads": 8, "d_head": 64, "n_groups": 1, "d_state": 64, "chunk_size": 64}
MAMBA = {f"mamba_{key}": value for key, value in STATES.items()}
FAMILIES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "Qwen3Next": (
        {
            "layer_types": ["linear_attention", "full_attention"] * 3,
            "head_dim": 64,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
        },
        [1, 3, 5],
    ),
    "FalconH1": (MAMBA | {"mamba_d_ssm": 512, "head_dim": 64}, [0, 1, 2, 3, 4, 5]),
    "Zamba2": (  # whose attention layers vLLM counts by themselves
        {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"]},
        [1, 3, 4],
    ),
    "Jamba": ({"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1}, [1, 4]),
    "GraniteMoeHybrid": (
        MAMBA | {"layer_types": ["mamba", "attention"] * 3, "num_local_experts": 0},
        [1, 3, 5],
    ),
    "NemotronH": (
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention", "mlp"],
            "head_dim": 64,
            "mamba_num_heads": 8,
            "n_groups": 1,
        },
        [1, 4],
    ),
    "Lfm2": (
        {"layer_types": ["conv", "full_attention"] * 3, "block_dim": 256, "conv_dim": 256},
        [1, 3, 5],
    ),
    "Gemma3": (
        {"sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"] * 3},
        [1, 3, 5],
    ),
    "Llama4": ({"interleave_moe_layer_step": 9, "no_rope_layer_interval": 2}, [1, 3, 5]),
    "Llama": ({}, [0, 1, 2, 3, 4, 5]),
}
"""Of each family the fields of its configuration, and its layers with full attention."""


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Makes the configuration of an engine for a family; vLLM looks at its model in this process,
    not in one of its own, which takes seconds."""

    def configure(family, fields=None, backend="freekv", **options):
        kind = getattr(transformers, f"{family}TextConfig", None)
        kind = kind or getattr(transformers, f"{family}Config")
        model = f"{family}ForCausalLM"
        fields = FAMILIES[family][0] if fields is None else fields
        kind(architectures=[model], **SHAPE | fields).save_pretrained(tmp_path)
        loaded = _RegisteredModel.from_model_cls(ModelRegistry.models[model].load_model_cls())
        monkeypatch.setitem(ModelRegistry.models, model, loaded)
        return EngineArgs(
            model=str(tmp_path),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=2048,
            attention_backend=backend,
            additional_config={"kv_retrieval": options},
        ).create_engine_config()

    return configure


def layers_of(vllm_config) -> dict[str, Any]:
    """vLLM's layers of a model by name. vLLM builds the model without memory."""
    with set_current_vllm_config(vllm_config), torch.device("meta"):
        initialize_model(vllm_config)
    layers = vllm_config.compilation_config.static_forward_context.items()
    return {
        name: layer.get_kv_cache_spec(vllm_config)
        for name, layer in layers
        if isinstance(layer, AttentionLayerBase)
    }


@pytest.fixture
def world(tmp_path):
    """vLLM's groups of processes, of this process alone."""

    def make(vllm_config):
        with set_current_vllm_config(vllm_config):
            init_distributed_environment(1, 0, f"file://{tmp_path}/world", 0, "gloo")
            initialize_model_parallel(1, 1)

    yield make
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_that_vllm_builds_are_those_of_the_configuration(configure, world, family):
    config, expected = configure(family), FAMILIES[family][1]
    world(config)
    specs = layers_of(config)
    assert full_attention_layers(config.model_config) == expected
    names = number_layers(config, specs, RetrievalConfig.from_options("freekv", {}))
    assert list(names.values()) == expected


def test_states_of_mamba_2_are_kept_at_ends_of_chunks(configure, world):
    """By default in their middle, too, of which vLLM's kernel for CPUs knows nothing."""
    config = configure("GraniteMoeHybrid")
    world(config)
    with set_current_vllm_config(config), torch.device("meta"):
        model = initialize_model(config)
    layers = [layer for layer in model.modules() if isinstance(layer, MambaMixer2)]

    def in_the_middle():
        specs = [layer.get_kv_cache_spec(config) for layer in layers]
        return {spec.num_prefill_checkpoint_blocks for spec in specs}

    assert in_the_middle() == {1}
    assert end_chunks_at_blocks(model) == len(layers) == 3
    assert in_the_middle() == {0}


@pytest.mark.parametrize("family", FAMILIES)
def test_options_for_each_layer_are_checked_by_them(configure, family):
    """Before the model is loaded; by dense_layers=1 its first layer does not retrieve."""
    retrieving = [layer for layer in FAMILIES[family][1] if layer > 0]
    count = len(retrieving)
    configure(family, backend="freekv", budget_shares=[1.0] * count)
    configure(family, backend="freekv", budget_shares="pyramid")
    configure(family, backend="razor", dense_layers=1, heads=[[1, 0, 0, 0]] * count)
    if len(FAMILIES[family][1]) > 2:
        configure(family, backend="omnikv", filters=FAMILIES[family][1][:1])
    for wrong in (count - 1, count + 1, 6):
        if 0 < wrong != count:
            with pytest.raises(ValueError, match=f"{wrong} layers, but {count} retrieve"):
                configure(family, backend="freekv", budget_shares=[1.0] * wrong)
            with pytest.raises(ValueError, match=f"{wrong} layers, but {count} retrieve"):
                configure(family, backend="razor", dense_layers=1, heads=[[1, 0, 0, 0]] * wrong)


def test_filters_are_layers_with_full_attention(configure):
    with pytest.raises(ValueError, match=r"layer 2 has no full attention; .* are 1, 3, 4\."):
        configure("Zamba2", backend="omnikv", filters=[2])


NONE = {"layer_types": ["sliding_attention"] * 6, "sliding_window": 256}


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("freekv", {"budget_shares": "pyramid"}),
        ("razor", {"heads": [[1, 0, 0, 0]]}),
        ("omnikv", {"filters": [1]}),
    ],
)
def test_models_without_full_attention_are_refused(configure, backend, options):
    why = "would not retrieve in any layer" if backend != "omnikv" else "that have are none"
    with pytest.raises(ValueError, match=why):
        configure("Gemma3", NONE, backend, **options)


UNSAID = {
    "an unknown kind": ("Llama", {"layer_types": ["full_attention", "minimax_m3_sparse"] * 3}),
    "windows of no size": ("Gemma3", FAMILIES["Gemma3"][0] | {"sliding_window": None}),
    "windows in some layers": ("Mistral", {"sliding_window": 256}),
}


@pytest.mark.parametrize(("family", "fields"), UNSAID.values(), ids=UNSAID.keys())
def test_what_a_configuration_does_not_say_the_worker_finds_out(configure, family, fields):
    """The front end refuses nothing that it does not know."""
    config = configure(family, fields, budget_shares=[1.0, 2.0])
    assert full_attention_layers(config.model_config) is None


def test_a_hybrid_whose_configuration_says_nothing(configure):
    config = configure("Lfm2")
    config.model_config.hf_text_config.layer_types = None
    assert full_attention_layers(config.model_config) is None


def test_a_worker_with_other_layers_says_so(configure, world):
    """It refuses if the numbers of layers matter; otherwise it uses its own."""
    config = configure("Gemma3")
    world(config)
    specs = layers_of(config)
    config.model_config.hf_text_config.layer_types = ["full_attention"] * 6
    own = RetrievalConfig.from_options("freekv", {})
    assert list(number_layers(config, specs, own).values()) == [1, 3, 5]
    for method, options in (
        ("freekv", {"budget_shares": [1.0] * 5}),
        ("razor", {"heads": [[1, 0, 0, 0]] * 5, "dense_layers": 1}),
        ("omnikv", {"filters": [1]}),
    ):
        by_layer = RetrievalConfig.from_options(method, options)
        with pytest.raises(RetrievalConfigError, match=r"layers \[1, 3, 5\] .* not \[0, .* full"):
            number_layers(config, specs, by_layer)


def test_stages_of_a_pipeline_have_their_own_layers(configure, world):
    config = configure("Lfm2")
    world(config)
    specs = layers_of(config)
    config.parallel_config.pipeline_parallel_size = 2
    half = {name: spec for name, spec in specs.items() if ".layers.5." not in name}
    own = RetrievalConfig.from_options("freekv", {})
    assert list(number_layers(config, half, own).values()) == [1, 3]
