"""Index entries of two pages over an encoded home, which gives the memory of full pages back."""

import pytest

from tests.support.engine import Request, drive, engine, prompt, random_llama

pytestmark = pytest.mark.engine

LAYERS, KV_HEADS, PAGE = 2, 2, 16
STEP = 3 * PAGE
"""Tokens of a step: it ends in the middle of an entry."""


def test_records_are_those_of_the_keys_written(tmp_path):
    """Of prompts whose chunks end within an entry, and of generated tokens."""
    retrieval = {
        "home": "disk",
        "codec": "k8v4",
        "budget": 128,
        "page_size": PAGE,
        "summary_size": 2 * PAGE,
        "remainder": 0.01,
        "dense_layers": 0,
    }
    with engine(
        random_llama(tmp_path / "model", LAYERS, KV_HEADS),
        attention_backend="kvretrieval",
        additional_config={"kv_retrieval": retrieval},
        worker_extension_cls="tests.support.home_worker.HomeWorker",
        max_model_len=512,
        max_num_seqs=2,
        max_num_batched_tokens=STEP,
        kv_cache_memory_bytes=16 << 20,
        skip_tokenizer_init=True,
        enforce_eager=True,
    ) as llm:
        llm.collective_rpc("record_writes")
        requests = [Request(prompt(200), 80, {}), Request(prompt(90), 40, {}, arrives=4)]
        drive(llm, requests)
        (found,) = llm.collective_rpc("compare_records")
    written = [len(r.prompt) + r.tokens - 1 for r in requests]
    entries = sum(tokens // (2 * PAGE) for tokens in written)
    assert found == (0, LAYERS * KV_HEADS * entries)
