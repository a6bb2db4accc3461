"""Layers that retrieval cannot serve are refused when their attention is chosen or made; the filter
layers of our models are known."""

from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from tests.options.test_refusals import configure  # noqa: F401
from tests.support.engine import checkpoint
from tests.support.model_configs import LLAMA, PALIGEMMA, QWEN
from vllm_kvretrieval.attention.cpu.impl import RetrievalAttentionImpl
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.filters import filters_for

FULL = AttentionSelectorConfig(64, torch.bfloat16, "auto", 128)


def test_sliding_window_layers_keep_vllms_backend():
    select = current_platform.get_attn_backend_cls
    backend = AttentionBackendEnum["FREEKV"]
    assert select(backend, FULL) == "vllm_kvretrieval.attention.cpu.backend.FREEKV"
    ours = FULL._replace(has_sliding_window=True)
    assert select(backend, ours) == AttentionBackendEnum.CPU_ATTN.get_path()
    assert select(None, FULL) == AttentionBackendEnum.CPU_ATTN.get_path()


def test_small_pages_that_sliding_windows_would_have_too(configure):  # noqa: F811
    """Without groups of layers by kind, and where a KV connector moves blocks of a page."""
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    alone = {"disable_hybrid_kv_cache_manager": True}
    connector = KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both")

    def ask(model, page_size, **engine):
        configure(model, additional_config={"kv_retrieval": {"page_size": page_size}}, **engine)

    ask(LLAMA | windows, 16)
    ask(LLAMA | windows, 32, **alone)
    ask(LLAMA | windows | {"layer_types": 2 * ["full_attention"]}, 16, **alone)
    ask(LLAMA, 16, **alone)
    message = "page_size=16 cannot be served here with .* Use page_size=32, or leave "
    with pytest.raises(ValueError, match=f"{message}--disable-hybrid-kv-cache-manager out"):
        ask(LLAMA | windows, 16, **alone)
    with pytest.raises(ValueError, match=f"{message}the KV connector out"):
        ask(LLAMA | windows, 16, kv_transfer_config=connector)


def test_pictures_that_attend_to_themselves(configure):  # noqa: F811
    """Refused before the start; served without pictures, as the message says."""
    message = "does not support bidirectional multimodal prefixes.* with --language-model-only"
    with pytest.raises(ValueError, match=message):
        configure(PALIGEMMA)
    assert not configure(PALIGEMMA, language_model_only=True).model_config.is_mm_prefix_lm


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"use_mla": True}, r"multi-head latent attention \(MLA\)"),
        ({"use_sparse": True}, "a model-native sparse attention"),
        ({"use_mm_prefix": True}, "bidirectional multimodal prefixes"),
        ({"use_non_causal": True}, "non-causal attention"),
        ({"use_rswa": True}, "reference sliding windows"),
        ({"use_dcp": True}, "context parallelism"),
        ({"use_pcp": True}, "context parallelism"),
        ({"attn_type": "encoder_only"}, "encoder_only layers"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder layers"),
        ({"kv_cache_dtype": "fp8_e5m2"}, r"a KV cache in fp8_e5m2 with a model in torch\.bfloat16"),
        ({"head_size": 48}, r"head size 48, only \(32, 64"),
        ({"dtype": torch.float64}, r"dtype torch\.float64; use bfloat16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["FREEKV", "STREAMINGLLM"])
def test_layers(change, what, backend):
    with pytest.raises(RetrievalConfigError, match=f"KV retrieval does not support {what}"):
        current_platform.get_attn_backend_cls(
            AttentionBackendEnum[backend], FULL._replace(**change)
        )


def test_attention_variants(configure):  # noqa: F811
    plain: dict[str, Any] = {
        "num_heads": 2,
        "head_size": 64,
        "scale": 0.125,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    refusal = "does not support ALiBi, which this model"
    with set_current_vllm_config(configure(LLAMA)):
        RetrievalAttentionImpl(**plain, logits_soft_cap=30.0, sinks=torch.zeros(2))
        with pytest.raises(RetrievalConfigError, match=refusal):
            RetrievalAttentionImpl(**plain | {"alibi_slopes": [0.5, 0.25]})


QWEN_NAME = "Qwen2.5-Coder-0.5B-Instruct"
DEMO_MODELS = (
    "SmolLM2-135M-Instruct",
    "SmolLM2-135M-Instruct-32K",
    pytest.param(QWEN_NAME, marks=pytest.mark.slow),  # the next test has its configuration
    "gemma-3-270m",
)


@pytest.mark.model
@pytest.mark.parametrize("name", DEMO_MODELS)
def test_our_models_have_filters(configure, name):  # noqa: F811
    model = configure(checkpoint(name), attention_backend="omnikv").model_config
    assert filters_for(model.model, model.hf_text_config).model == name


def test_a_models_shape_has_filters(configure):  # noqa: F811
    model = configure(QWEN, attention_backend="omnikv").model_config
    assert filters_for(model.model, model.hf_text_config).model == QWEN_NAME
