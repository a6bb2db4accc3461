"""Pages of 16 and a remainder by default, where they are served.

Engines are configured as ``vllm serve`` does it; none is started.
"""

import json

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends import cpu_attn

from tests.support.engine import model_of, random_llama
from tests.support.isas import ISAS
from vllm_kvretrieval.attention.cpu import refusals
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.presets import presets

FINER = presets()["kvretrieval"].finer or {}

model = model_of(random_llama, 2, 1)


@pytest.fixture
def served(model, monkeypatch):
    """The options that an engine gets, on a CPU where our own kernel attends by default."""
    by_element = {"float32": 2.0, "bfloat16": 2.0}
    monkeypatch.setattr(refusals, "RATIOS", dict.fromkeys(ISAS, by_element))

    def served(options, method="kvretrieval", dtype="bfloat16", layout=None, **engine):
        def isa(dtype, size, head_size=None):
            return layout or ("vec" if size % 32 == 0 else "vec16")

        monkeypatch.setattr(cpu_attn, "_get_attn_isa", isa)
        made = EngineArgs(
            model=model, dtype=dtype, attention_backend=method, skip_tokenizer_init=True,
            additional_config={"kv_retrieval": options}, **engine,
        ).create_engine_config()  # fmt: skip
        return RetrievalConfig.from_vllm(made)

    return served


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"budget": 64},
        {"budget": 512, "sink": 32, "window": 64, "mass": 0.9},
        {"also": ["full", "snapkv"], "home": "device"},
    ],
    ids=str,
)
def test_pages_are_small_and_the_rest_is_added_up(served, options):
    config = served(options)
    assert (config.page_size, config.own.entry_tokens, config.own.remainder) == (16, 32, 0.003)
    assert served({**options, **FINER}) == config, "the same as if the user had written them"


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"page_size": 32}, {}),
        ({"remainder": 0}, {}),
        ({"index": "min_max"}, {}),
        ({"schedule": "speculative"}, {}),
        ({"rerank": 2}, {}),
        ({"prefill_budget": 1024}, {}),
        ({"home": "disk", "home_bytes": "64MiB"}, {}),
        ({"also": ["freekv"]}, {}),
        ({"attention": "vllm"}, {}),
        ({}, {"method": "freekv"}),
        ({}, {"layout": "amx"}),
        ({}, {"dtype": "float16"}),
        ({}, {"hf_overrides": {"attn_logit_softcapping": 50.0}}),
        ({}, {"disable_hybrid_kv_cache_manager": True}),
        (
            {},
            {
                "kv_transfer_config": KVTransferConfig(
                    kv_connector="DecodeBenchConnector", kv_role="kv_both"
                )
            },
        ),
    ],
    ids=lambda value: json.dumps(value, default=lambda _: "connector"),
)
def test_the_presets_pages_stay(served, options, engine):
    plain = served(options, **engine)
    method = engine.get("method", "kvretrieval")
    assert plain == RetrievalConfig.from_options(method, options)
    assert plain.page_size == 32


def test_blocks_that_the_user_names(served):
    """Small pages need blocks that hold entries of two pages."""
    assert served({}, block_size=64).page_size == 16
    with pytest.raises(ValueError, match=r"--block-size 48 must .* 2 pages of 16 tokens"):
        served({}, block_size=48)
