"""A place for KV is a storage: attention and the worker serve through one from outside."""

import pytest

from tests.support.engine import Request, drive, engine, prompt, random_llama

pytestmark = pytest.mark.engine

LAYERS, KV_HEADS = 3, 2
ALSO = ["freekv", "snapkv", "h2o", "streamingllm"]
METHODS = ("fier", *ALSO)


def requests():
    """Tokens, pages, tokens kept once and step by step; contexts that grow beyond the budget."""
    made = [Request(prompt(400 + 31 * i), 20, {"method": m}) for i, m in enumerate(METHODS)]
    made += [Request(prompt(100 + i), 50, {"method": m}, arrives=2) for i, m in enumerate(METHODS)]
    return [*made, Request(prompt(500), 12, {"exact": True}, arrives=4)]


def answers(model, **options):
    with engine(
        model,
        attention_backend="fier",
        additional_config={"kv_retrieval": {"budget": 128, "dense_layers": 1, "also": ALSO}},
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=100,
        skip_tokenizer_init=True,
        enforce_eager=True,
        **options,
    ) as llm:
        found = drive(llm, requests())
        reached = llm.collective_rpc("reached")[0] if options else None
    return [(answer.tokens, answer.logprobs) for answer in found], reached


def test_a_storage_from_outside_serves(tmp_path_factory):
    """With the answers of memory, bit by bit."""
    model = random_llama(tmp_path_factory.mktemp("model"), LAYERS, KV_HEADS)
    expected, _ = answers(model)
    ours, reached = answers(model, worker_extension_cls="tests.support.toy_storage.ToyWorker")
    assert ours == expected
    assert len(reached) == LAYERS - 1
    assert min(reached) > 50, "lists are attended to in the mirror"
