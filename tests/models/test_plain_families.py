"""Families of models whose layers all have full attention: stock vLLM's answers, from a file, too.

Small models with random weights, in float32.
"""

import pytest
import torch

from tests.support.engine import Request, assert_same, drive, engine, prompt
from tests.support.plain_models import LAYERS, MODELS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

METHODS = ["freekv", "kvretrieval", "snapkv"]
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "trust_remote_code": True,
}


def requests(options=None):
    """Prompts in chunks, and a short one, which is within the budget."""
    lengths = (900, 1000, 150)
    return [Request(prompt(n, n), 40, options, arrives=3 * i) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    MODELS[request.param](path)
    return str(path)


@pytest.fixture(scope="module")
def stock(model):
    """The answers of vLLM without retrieval."""
    with engine(model, **OPTIONS) as llm:
        return drive(llm, requests())


@pytest.fixture(scope="module", params=["device", "disk"])
def llm(model, stock, request, tmp_path_factory):
    home = {"home": request.param}
    if request.param == "disk":
        home["home_path"] = str(tmp_path_factory.mktemp("home"))
    retrieval = {"kv_retrieval": {"budget": 256, "max_budget": 2048, "also": METHODS[1:]} | home}
    with engine(model, attention_backend="freekv", additional_config=retrieval, **OPTIONS) as llm:
        yield llm


def test_layers_that_retrieve(llm):
    (numbers,) = llm.collective_rpc(
        lambda worker: [worker.planner.layer_numbers[name] for name in worker.retrieval_layers]
    )
    assert numbers == [*range(1, LAYERS)]


@pytest.mark.parametrize("options", [{"exact": True}, {"budget": 2048}], ids=str)
def test_whole_contexts_are_answered_as_by_stock_vllm(llm, stock, options):
    for answer, expected in zip(drive(llm, requests(options)), stock, strict=True):
        assert_same(answer, expected, tolerance=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_beyond_the_budget_less_is_attended_to(llm, stock, method):
    """The first token of an answer, and a short context, are stock's."""
    *long, short = drive(llm, requests({"method": method}))
    assert_same(short, stock[2], tolerance=1e-4)
    for answer, expected in zip(long, stock, strict=False):
        assert answer.logprobs[0] == pytest.approx(expected.logprobs[0], abs=1e-4)
        assert answer.logprobs[1:] != pytest.approx(expected.logprobs[1:], abs=1e-3)
