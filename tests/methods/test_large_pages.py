"""Pages of 256 tokens in memory: vLLM's blocks grow to hold them."""

import pytest

from tests.support.engine import Request, alone, drive, engine, model_of, prompt, random_llama

pytestmark = pytest.mark.engine

model = model_of(random_llama, 3, 2)

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 2,
    "kv_cache_memory_bytes": 64 << 20,
}


@pytest.mark.parametrize("attention", ["own", pytest.param("vllm", marks=pytest.mark.slow)])
def test_answers_do_not_depend_on_pages(model, attention):
    """Of full attention, and within the budget; a prefix is found in whole blocks."""
    long, short = prompt(1700, 1), prompt(900, 2)
    answers, found = {}, {}
    for page in (32, 256):
        retrieval = {"budget": 1024, "page_size": page, "attention": attention}
        options = {
            "attention_backend": "kvretrieval",
            "additional_config": {"kv_retrieval": retrieval},
        }
        with engine(model, **OPTIONS, **options) as llm:
            exactly = Request(long, 12, {"exact": True}, cache=True)
            requests = [exactly, Request(short, 12, {})]
            answers[page] = [alone(llm, request).tokens for request in requests]
            (again,) = drive(llm, [exactly])
            answers[page].append(again.tokens)
            found[page] = again.cached
            sparse = alone(llm, Request(long, 12, {}))
            assert len(sparse.tokens) == 12
    assert answers[256] == answers[32]
    assert found == {32: 1664, 256: 1536}
