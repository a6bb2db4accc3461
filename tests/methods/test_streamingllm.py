"""An engine that selects nothing keeps no page index, and attends to sink and window."""

import pytest
import torch

from tests.support.engine import Request, assert_same, drive, engine, random_llama

pytestmark = pytest.mark.engine

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}
RETRIEVAL = {"kv_retrieval": {"budget": 128, "sink": 32}}


def requests(options):
    generator = torch.Generator().manual_seed(0)
    lengths = (700, 40, 1200, 100)
    prompts = [torch.randint(512, (length,), generator=generator).tolist() for length in lengths]
    shared = Request(prompts[0] + prompts[1], 40, options, arrives=20, cache=True)
    return [Request(prompt, 40, options, cache=True) for prompt in prompts] + [shared]


def test_the_engine_answers_as_requests_for_the_baseline_do(tmp_path):
    model = random_llama(tmp_path, 4, 2)
    with engine(model, attention_backend="freekv", additional_config=RETRIEVAL, **OPTIONS) as llm:
        expected = drive(llm, requests({"method": "streamingllm"}))
        selecting = drive(llm, requests({}))
    assert [a.logprobs for a in selecting] != [a.logprobs for a in expected]
    options = OPTIONS | {"attention_backend": "streamingllm", "additional_config": RETRIEVAL}
    with engine(model, **options) as llm:
        answers = drive(llm, requests({}))
        (sizes,) = llm.collective_rpc(
            lambda worker: [len(impl.indexes) for impl in worker.retrieval_layers.values()]
        )
    assert sizes == [0] * 3
    for answer, own in zip(answers, expected, strict=True):
        assert_same(answer, own, tolerance=1e-5)
    assert answers[-1].cached > 600
