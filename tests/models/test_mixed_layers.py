"""Layers that attend beside a state space (Falcon-H1), and attention layers that vLLM counts by
themselves (Zamba2): options go by the numbers that layers have in the model.

Small models with random weights, without prefix caching: with it, vLLM's state-space kernels for
the CPU fail on prompts of several chunks, without retrieval as well.
"""

from typing import Any

import pytest
import torch
from transformers import FalconH1Config, FalconH1ForCausalLM, Zamba2Config, Zamba2ForCausalLM

from tests.support.engine import Request, alone, assert_same, engine

pytestmark = pytest.mark.engine

BUDGET = 256
LONG = 900
LENGTH = 1024
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # large enough for attention to be sharp
    "eos_token_id": 511,
}


def zamba2():
    kinds = ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid", "mamba"]
    config = Zamba2Config(
        num_hidden_layers=8,
        layers_block_type=kinds,
        num_mem_blocks=2,
        use_mem_rope=True,
        **SHAPE,
    )
    return Zamba2ForCausalLM(config)


def falcon_h1():
    states = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64}
    config = FalconH1Config(num_hidden_layers=4, head_dim=64, **states, **SHAPE)
    return FalconH1ForCausalLM(config)


CASES = {
    "zamba2": (zamba2, "omnikv", {"filters": [3]}, [6]),
    "falcon_h1": (falcon_h1, "freekv", {"budget_shares": [3, 2, 1]}, [1, 2, 3]),
}
"""The model, the method with its options, and the layers that retrieve."""


def prompt(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(511, (length,), generator=generator).tolist()


@pytest.fixture(
    scope="module", params=["zamba2", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def served(request, tmp_path_factory):
    """An engine, and the layers that retrieve."""
    make, method, options, retrieving = CASES[request.param]
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    make().save_pretrained(path)
    with engine(
        str(path),
        attention_backend=method,
        additional_config={"kv_retrieval": {"budget": BUDGET, "max_budget": LENGTH} | options},
        dtype="float32",
        max_model_len=LENGTH,
        max_num_seqs=2,
        max_num_batched_tokens=LENGTH,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        num_gpu_blocks_override=48,
    ) as llm:
        yield llm, retrieving


def test_the_layers_that_retrieve(served):
    llm, expected = served
    (numbers,) = llm.collective_rpc(
        lambda worker: [worker.planner.layer_numbers[name] for name in worker.retrieval_layers]
    )
    assert numbers == expected


def test_a_budget_above_the_context_is_exact_and_one_below_is_not(served):
    llm, _ = served
    ids = prompt(LONG, 7)
    exact = alone(llm, Request(ids, 12, {"exact": True}))
    assert_same(alone(llm, Request(ids, 12, {"budget": LENGTH})), exact, tolerance=1e-4)
    (before,) = llm.collective_rpc(lambda worker: worker.requests.counts().sparse_steps)
    sparse = alone(llm, Request(ids, 12, {}))
    (after,) = llm.collective_rpc(lambda worker: worker.requests.counts().sparse_steps)
    assert after - before == 11
    assert sparse.logprobs[0] == pytest.approx(exact.logprobs[0], abs=1e-4)  # by prefill
    assert sparse.logprobs[1:] != pytest.approx(exact.logprobs[1:], abs=1e-4)
