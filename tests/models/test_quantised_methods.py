"""Checkpoints with quantised weights beside every group of methods: attention knows no weights."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.engine import Request, assert_same, drive, engine, prompt
from tests.support.quantised_models import SIZES, random_quantised

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROUNDED = ("kvr_int8", "kvr_int4")
WEIGHTS = ["W4A16", "W8A8", "AWQ", "GPTQ 8", "GPTQ act-order", *ROUNDED]
GROUPS = {
    "pages, dropped tokens, heads, everything": (
        "kvretrieval",
        ["freekv", "quest", "snapkv", "h2o", "streamingllm", "full"],
        {},
    ),
    "single tokens": ("fier", ["streamingllm"], {"dense_layers": 1}),
    "a file, in 8 and 4 bits": ("kvretrieval", ["freekv"], {"home": "disk", "codec": "k8v4"}),
}
"""Of methods: that of an engine, others that its requests name, and its options."""
LENGTH = 448
PROMPT = [token % SIZES["vocab_size"] for token in prompt(400)]


@pytest.fixture(scope="module", params=WEIGHTS)
def weights(request, tmp_path_factory):
    """A checkpoint, and options of the engine that has its weights."""
    path = tmp_path_factory.mktemp("model")
    if request.param not in ROUNDED:
        random_quantised(path, request.param)
        return str(path), {}
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.1,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return str(path), {"quantization": request.param}


@pytest.mark.parametrize(("method", "also", "options"), GROUPS.values(), ids=GROUPS.keys())
def test_methods(weights, method, also, options, tmp_path):
    """Within the budget each attends to the whole context; with a smaller one it does not."""
    model, further = weights
    encoded = "codec" in options
    home = {"home_path": str(tmp_path)} if encoded else {}
    retrieval = {"budget": LENGTH, "also": also} | options | home
    with engine(
        model,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        attention_backend=method,
        additional_config={"kv_retrieval": retrieval},
        **further,
    ) as llm:
        (exact,) = drive(llm, [Request(PROMPT, 12, {"exact": True})])
        for name in (method, *also):
            (answer,) = drive(llm, [Request(PROMPT, 12, {"method": name})])
            assert_same(answer, exact, tolerance=0.1)
        (less,) = drive(llm, [Request(PROMPT, 12, {"budget": 128})])
        assert less.logprobs[0] == pytest.approx(exact.logprobs[0], abs=0.05)
        assert less.logprobs[1:] != pytest.approx(exact.logprobs[1:], abs=1e-3)
