"""Tensor parallelism: every worker retrieves for its own KV heads.

A small Llama with random weights, in float32: what is at stake is which head attends to what, and
the answers are to be those of a single worker to rounding.
"""

from typing import Any

import pytest
import torch

from tests.engine import Request, assert_same, drive, engine, random_llama

pytestmark = [pytest.mark.engine, pytest.mark.cores]

BUDGET = 128
LAYERS, KV_HEADS = 4, 4
ALSO = {"uneven": {"budget_shares": [[2, 0.5, 1, 0.5], [1, 1, 1, 1], [0, 3, 0, 1]]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("model"), LAYERS, KV_HEADS)


def answers(model, workers, method="freekv", **retrieval):
    """Answers of an engine with so many workers, and the KV heads of each."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(512, (length,), generator=generator).tolist()
        for length in (60, 500, 900, 700)
    ]
    options: list[dict[str, Any]] = [{}] * len(prompts)
    if method == "freekv":
        options[2:] = {"correction_threshold": 0.9}, {"method": "uneven"}
        retrieval["also"] = ALSO
    if method == "entropykv":
        options[2:] = {"method": "tova"}, {"method": "h2o"}
        retrieval["also"] = ["tova", "h2o"]
    with engine(
        model,
        tensor_parallel_size=workers,
        attention_backend=method,
        additional_config={"kv_retrieval": {"budget": BUDGET} | retrieval},
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        enforce_eager=True,
    ) as llm:
        requests = [Request(p, 24, o) for p, o in zip(prompts, options, strict=True)]
        together = drive(llm, requests)
        exact = drive(llm, [Request(prompts[1], 24, {"exact": True})])[0]
        heads = llm.collective_rpc(
            lambda worker: [i.choosers[0].store.kv_heads for i in worker.retrieval_layers.values()]
        )
        states = llm.collective_rpc(
            lambda worker: (worker.storage.check(), worker.storage.usage.slots > 0)
        )
    assert {*states} == {("", "home" in retrieval)}
    return together, exact, heads


def assert_parts_count(together, exact):
    differences = zip(exact.logprobs, together[1].logprobs, strict=True)
    assert max(abs(a - b) for a, b in differences) > 0.05, "retrieval attends to a part"


def test_two_workers_answer_as_one(model):
    """The KV cache is in memory, or on disk with a file and slots for each worker."""
    expected, exact, heads = answers(model, workers=1)
    assert heads == [[KV_HEADS] * (LAYERS - 1)]
    for home in ({}, {"home": "disk", "recall_cache_bytes": "8MiB"}):
        ours, _, heads = answers(model, workers=2, **home)
        assert heads == [[KV_HEADS // 2] * (LAYERS - 1)] * 2
        for answer, single in zip(ours, expected, strict=True):
            assert_same(answer, single, tolerance=1e-3)
    assert_parts_count(expected, exact)


def test_workers_keep_together(model):
    """Heads of a layer keep the same, by the attention of all of them; so do budgets of layers."""
    expected, exact, _ = answers(model, 1, "entropykv")
    ours, _, _ = answers(model, 2, "entropykv")
    for answer, single in zip(ours, expected, strict=True):
        assert_same(answer, single, tolerance=1e-3)
    assert_parts_count(expected, exact)


def test_workers_select_together(model):
    """Layers that share a selection attend by the heads of all workers."""
    options = {"filters": [0], "observation": "uniform"}
    expected, exact, _ = answers(model, 1, "omnikv", **options)
    ours, _, _ = answers(model, 2, "omnikv", home="disk", recall_cache_bytes="8MiB", **options)
    for answer, single in zip(ours, expected, strict=True):
        assert_same(answer, single, tolerance=1e-3)
    assert_parts_count(expected, exact)


def test_workers_have_retrieval_heads_of_their_own(model):
    """One worker has most of them; which heads attend to everything does not depend on that."""
    options = {"heads": [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]}
    expected, exact, heads = answers(model, 1, "razor", **options)
    assert heads == [[KV_HEADS] * LAYERS]
    ours, _, heads = answers(model, 2, "razor", **options)
    assert heads == [[KV_HEADS // 2] * LAYERS] * 2
    for answer, single in zip(ours, expected, strict=True):
        assert_same(answer, single, tolerance=1e-3)
    assert_parts_count(expected, exact)
