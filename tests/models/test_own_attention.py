"""``attention=own`` in an engine: answers over whole contexts, against transformers' model."""

import functools
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engine import (
    Answer,
    Request,
    alone,
    assert_same,
    drive,
    engine,
    likely,
    novel,
    shortened,
)
from tests.support.home_worker import LOSSLESS
from vllm_kvretrieval.options.engine import RetrievalConfig

pytestmark = [pytest.mark.engine, pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
LAYERS = 4
BUDGET = 256
TOLERANCE = 2e-3
"""The tolerance of log-probs in float32."""
KINDS: dict[str, dict[str, Any]] = {
    "memory": {"also": ["full"]},
    "full": {"method": "full"},
    "rows on disk": {"home": "disk", "also": ["fier"], "recall_cache_bytes": "64MiB"},
    "encoded": {"home": "disk", "codec": LOSSLESS},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return shortened(tmp_path_factory.mktemp("model"), MODEL, LAYERS)


@pytest.fixture(scope="module")
def right(path):
    """What :func:`likely` says by transformers' model, in float32; once of each answer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @functools.cache
    def found(asked: tuple[int, ...], tokens: tuple[int, ...]) -> Answer:
        return likely(model, list(asked), Answer(list(tokens)))

    return lambda asked, answer: found(tuple(asked), tuple(answer.tokens))


@pytest.fixture(scope="module", params=KINDS)
def house(request, path):
    """An engine whose prompts are read in chunks of 300 tokens."""
    options = {"budget": BUDGET, "attention": "own", **KINDS[request.param]}
    method = options.pop("method", "kvretrieval")
    with engine(
        path,
        attention_backend=method,
        additional_config={"kv_retrieval": options},
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=300,
        dtype="float32",
        enforce_eager=True,
        worker_extension_cls="tests.support.home_worker.HomeWorker",  # knows the codec
    ) as llm:
        yield llm


def test_whole_contexts_are_exact(house, right):
    """Prompts in chunks, exact requests, and contexts within the budget; alone and together."""
    llm = house
    ids = novel(llm, 1500, 40)
    config = RetrievalConfig.from_vllm(llm.llm_engine.vllm_config)
    assert config is not None
    requests = [
        Request(ids[:900], 12, {"method": "full"} if "full" in config.methods else {"exact": True}),
        Request(ids[900:1100], 24, {}),
        Request(ids[300:340], 24, {}, arrives=2),
        Request(ids[:1401], 6, {"exact": True}, arrives=4),
    ]
    answers = drive(llm, requests)
    for request, answer in zip(requests, answers, strict=True):
        assert_same(answer, right(request.prompt, answer), TOLERANCE)
        assert_same(alone(llm, request), answer, TOLERANCE)


def test_prefix_hits_and_retrieval(house, right):
    """A hit answers as a prompt that is read; a long prompt's first token is always exact."""
    llm = house
    ids = novel(llm, 1300, 90)
    first = Request(ids, 8, {}, cache=True)
    cold, warm = drive(llm, [first])[0], drive(llm, [first])[0]
    assert warm.cached > 1200
    assert_same(warm, cold, TOLERANCE)
    expected = right(ids, cold)
    assert cold.tokens[0] == expected.tokens[0]
    assert cold.logprobs[0] == pytest.approx(expected.logprobs[0], abs=TOLERANCE)
