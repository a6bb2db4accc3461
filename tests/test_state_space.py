"""A model most of whose layers are convolutions: retrieval runs in its attention layers.

For such models vLLM empties every block before it is used, block by block of its own.
"""

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from tests.engine import Request, assert_same, drive, engine

pytestmark = pytest.mark.engine

BUDGET = 256
LAYERS = ["conv", "full_attention", "conv", "full_attention", "conv", "full_attention"]
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "num_gpu_blocks_override": 48,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights, large enough for attention to be sharp."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=LAYERS,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    path = tmp_path_factory.mktemp("lfm2")
    Lfm2ForCausalLM(config).save_pretrained(path)
    return str(path)


def prompt(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(512, (length,), generator=generator).tolist()


def crowd(options=None):
    """They take and give back blocks while others run; no context exceeds the budget."""
    return [Request(prompt(30 + 40 * i % 190, i), 60, options, arrives=5 * i) for i in range(10)]


def long(options=None):
    return [Request(prompt(900 + 100 * i, 50 + i), 40, options, arrives=3 * i) for i in range(3)]


@pytest.fixture(scope="module")
def stock(model):
    """What vLLM without retrieval answers; its engine is gone before ours starts."""
    with engine(model, **OPTIONS) as llm:
        return drive(llm, crowd()), drive(llm, long())


@pytest.fixture(scope="module")
def llm(model, stock):
    retrieval = {"kv_retrieval": {"budget": BUDGET}}
    with engine(model, attention_backend="freekv", additional_config=retrieval, **OPTIONS) as llm:
        yield llm


def test_vllm_empties_blocks(llm):
    """Else there would be nothing to be seen here."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    assert config.needs_kv_cache_zeroing
    blocks, pages = llm.collective_rpc(
        lambda worker: (
            worker.cache_config.num_gpu_blocks,
            worker.retrieval_layers[next(iter(worker.retrieval_layers))].state.pages,
        )
    )[0]
    assert pages > blocks


def test_short_contexts_are_answered_as_by_stock_vllm(llm, stock):
    for answer, expected in zip(drive(llm, crowd({})), stock[0], strict=True):
        assert_same(answer, expected, tolerance=1e-4)


def test_exact_requests_are_answered_as_by_stock_vllm(llm, stock):
    for answer, expected in zip(drive(llm, long({"exact": True})), stock[1], strict=True):
        assert_same(answer, expected, tolerance=1e-4)


def test_attention_layers_retrieve(llm):
    """A request alone and among others that take blocks: the same pages, the same answer."""
    assert llm.collective_rpc(lambda worker: len(worker.retrieval_layers)) == [3]
    alone = [drive(llm, [request])[0] for request in long({})]
    before = llm.collective_rpc(lambda worker: worker.requests.counts().sparse_steps)[0]
    for answer, expected in zip(drive(llm, long({})), alone, strict=True):
        assert_same(answer, expected, tolerance=1e-4)
    after = llm.collective_rpc(lambda worker: worker.requests.counts().sparse_steps)[0]
    assert after - before == 3 * 39
