"""The recipes of docs/long-contexts.md, run on a small model of each family, beyond its length."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.engine import Request, alone, engine
from tests.support.model_configs import LLAMA
from vllm_kvretrieval.upstream.rotations import lengthened

OWN = 256
"""The length that each is made for."""
LONG = 4 * OWN
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": OWN,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": OWN,
    "short_factor": [1.0] * 32, "long_factor": [1.0 + 0.1 * i for i in range(32)],
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "Qwen2": ("qwen2", PLAIN, OWN),
    "Qwen3": ("qwen3", PLAIN, OWN),
    "Llama": ("llama", PLAIN | {"rope_theta": 1e5}, OWN),
    "Llama 3.1": ("llama", LLAMA3, LONG),
    "Phi3": ("phi3", LONGROPE, LONG),
}
"""Kind, rotations and ``max_position_embeddings``; Llama stands for Llama 3 and SmolLM2."""


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_beyond_the_models_own(tmp_path, family):
    """Answers are those of transformers with the same override."""
    kind, rope, longest = FAMILIES[family]
    config = LLAMA | {
        "architectures": [f"{family.split()[0]}ForCausalLM"], "model_type": kind, "head_dim": 64,
        "rope_parameters": rope, "max_position_embeddings": longest, "initializer_range": 0.2,
        "pad_token_id": 0, "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    overrides: dict[str, Any] = {}
    if longest < LONG:
        overrides = lengthened(AutoConfig.from_pretrained(tmp_path), LONG) or {}
        assert overrides["rope_parameters"]["factor"] == LONG / OWN
    prompt = torch.randint(1, 500, (LONG - 8,)).tolist()
    options = {"attention_backend": "kvretrieval", "max_model_len": LONG, "dtype": "float32"}
    with engine(
        str(tmp_path),
        hf_overrides=overrides,
        skip_tokenizer_init=True,
        enforce_eager=True,
        **options,
    ) as llm:
        answer = alone(llm, Request(prompt, 4))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=AutoConfig.from_pretrained(tmp_path, **overrides), dtype=torch.float32
    )
    with torch.inference_mode():
        whole = torch.tensor([prompt + answer.tokens])
        logprobs = theirs(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert logprobs.argmax(-1).tolist() == answer.tokens
    wanted = logprobs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), wanted, atol=2e-3, rtol=1e-3)
