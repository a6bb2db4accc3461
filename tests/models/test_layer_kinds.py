"""Models not all of whose layers have full attention: retrieval runs in those that have.

Small ones with random weights. With convolutions, as with state spaces, vLLM empties every block
before it is used, block by block of its own. Chunked attention is built around the backend that
was asked for, and presents it with batches of its own making.
"""

import pytest
import torch

from tests.support import mixed_models
from tests.support.device_models import ROTATED_IN_TORCH
from tests.support.engine import Request, assert_same, drive, engine, prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BUDGET = 256
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "num_gpu_blocks_override": 48,
}


RETRIEVING = {"lfm2": [1, 3, 5], "llama4": [1, 3]}


def crowd(options=None):
    """They take and give back blocks while others run; no context exceeds the budget."""
    return [Request(prompt(30 + 40 * i % 160, i), 60, options, arrives=5 * i) for i in range(10)]


def long(options=None):
    return [Request(prompt(900 + 100 * i, 50 + i), 40, options, arrives=3 * i) for i in range(3)]


@pytest.fixture(scope="module", params=["lfm2", "llama4"])
def model(request, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    getattr(mixed_models, request.param)().save_pretrained(path)
    return request.param, str(path)


@pytest.fixture(scope="module")
def stock(model):
    """The answers of vLLM without retrieval; of LFM2 without the kernel that rotates it wrongly."""
    rotated = {"compilation_config": ROTATED_IN_TORCH} if model[0] == "lfm2" else {}
    with engine(model[1], **OPTIONS, **rotated) as llm:
        return drive(llm, crowd()), drive(llm, long())


@pytest.fixture(scope="module")
def llm(model, stock):
    retrieval = {"kv_retrieval": {"budget": BUDGET}}
    options = OPTIONS | {"attention_backend": "freekv", "additional_config": retrieval}
    with engine(model[1], **options) as llm:
        yield llm


def test_what_the_models_are_here_for(llm, model):
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    assert config.needs_kv_cache_zeroing == (model[0] == "lfm2")
    (names,) = llm.collective_rpc(lambda worker: list(worker.retrieval_layers))
    assert [int(name.split(".")[2]) for name in names] == RETRIEVING[model[0]]
    (pages,) = llm.collective_rpc(
        lambda worker: {impl.choosers[0].store.pages for impl in worker.retrieval_layers.values()}
    )
    assert min(pages) > config.num_blocks


def test_short_contexts_are_answered_as_by_stock_vllm(llm, stock):
    for answer, expected in zip(drive(llm, crowd({})), stock[0], strict=True):
        assert_same(answer, expected, tolerance=1e-4)


def test_exact_requests_are_answered_as_by_stock_vllm(llm, stock):
    for answer, expected in zip(drive(llm, long({"exact": True})), stock[1], strict=True):
        assert_same(answer, expected, tolerance=1e-4)


def test_requests_retrieve_alone_and_among_others(llm):
    """Who come, take blocks and go. The answers are the same."""
    alone = [drive(llm, [request])[0] for request in long({})]
    (before,) = llm.collective_rpc(lambda worker: worker.requests.counts().sparse_steps)
    others = [Request(prompt(200, 70 + i), 3, {}, arrives=4 * i) for i in range(8)]
    answers = drive(llm, long({}) + others)
    for answer, expected in zip(answers, alone, strict=False):
        assert_same(answer, expected, tolerance=1e-4)
    (after,) = llm.collective_rpc(lambda worker: worker.requests.counts().sparse_steps)
    assert after - before == 3 * 39
