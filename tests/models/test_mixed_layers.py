"""Layers that attend beside a state space (Falcon-H1), and attention layers that vLLM counts by
themselves (Zamba2): options go by the numbers that layers have in the model.

Small models with random weights, without prefix caching: with it, vLLM's state-space kernels for
the CPU fail on prompts of several chunks, without retrieval as well.
"""

import pytest
import torch

from tests.support import mixed_models
from tests.support.engine import Request, alone, assert_same, engine

pytestmark = pytest.mark.engine

BUDGET = 256
LONG = 900
LENGTH = 1024
CASES = {
    "zamba2": (mixed_models.zamba2, "omnikv", {"filters": [3]}, [6]),
    "falcon_h1": (mixed_models.falcon_h1, "freekv", {"budget_shares": [3, 2, 1]}, [1, 2, 3]),
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
