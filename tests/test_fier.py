"""FIER in an engine: single tokens, in a KV cache that retrieval layers keep token by token.

What each step selects is compared with a straightforward implementation of the paper, on queries,
keys and values of a real model in a real run (``tests/recorder.py``); what requests are answered,
with stock vLLM and with the same requests by themselves.
"""

from typing import Any

import pytest

from tests.engine import (
    Request,
    alone,
    assert_resumed,
    assert_same,
    by,
    difference,
    drive,
    engine,
    novel,
    preemptions,
    shortened,
)
from tests.recorder import Method

pytestmark = [pytest.mark.engine, pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
BUDGET = 256
CHUNK = 256  # tokens per step
BLOCK = 128
SEQUENCES = 4
STOCK: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": SEQUENCES,
    "max_num_batched_tokens": CHUNK,
    "num_gpu_blocks_override": 26,  # one of them vLLM's own
    "enforce_eager": True,
}
TOLERANCE = 1e-3
NEAR_TIES = 5e-3
"""What it may change that a query which is rounded otherwise, in another batch, selects another of
many tokens that are nearly as good as one another."""
METHODS = {
    "fier": Method("one_bit", per_token=True),
    "turning": Method("one_bit", per_token=True),
    "fine": Method("one_bit", per_token=True, entry_tokens=16),
    "freekv": Method(),
    "one_bit": Method("one_bit"),
}
ALSO = {
    "turning": {"schedule": "speculative"},
    "fine": {"summary_size": 16},
    "freekv": {},
    "one_bit": {"unit": "page"},
}
LAYERS = 6
RECORDED = (0, 2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return shortened(tmp_path_factory.mktemp("model"), MODEL, LAYERS)


@pytest.fixture(scope="module")
def stock(model):
    """What vLLM without retrieval answers; its engine is gone before ours starts."""
    with engine(model, **STOCK) as llm:
        short = Request(novel(llm, 200, 0), BUDGET - 200)
        long = Request(novel(llm, 700, 50), 16)
        return {"short": drive(llm, [short])[0], "long": drive(llm, [long])[0]}


@pytest.fixture(scope="module")
def llm(model, stock):
    with engine(
        model,
        attention_backend="fier",
        additional_config={"kv_retrieval": {"budget": BUDGET, "also": ALSO, "max_budget": 512}},
        worker_extension_cls="tests.recorder.RecordingWorker",
        **STOCK,
    ) as llm:
        yield llm


def test_contexts_within_the_budget_are_answered_as_by_stock_vllm(llm, stock):
    """Prefill and whole contexts, by every method: to rounding, by our own attention."""
    answers = drive(llm, [Request(novel(llm, 200, 0), BUDGET - 200, by(m)) for m in METHODS])
    for answer in answers:
        assert_same(answer, stock["short"], TOLERANCE)


def test_exact_requests_beside_others(llm, stock):
    long = novel(llm, 700, 50)
    exact, sparse, again = drive(
        llm, [Request(long, 16, o) for o in ({"exact": True}, {}, by("freekv", exact=True))]
    )
    assert_same(exact, stock["long"], TOLERANCE)
    assert_same(again, stock["long"], TOLERANCE)
    assert sparse.tokens[0] == exact.tokens[0]
    assert sparse.logprobs[0] == pytest.approx(exact.logprobs[0], abs=TOLERANCE)
    assert difference(sparse, exact) > 10 * TOLERANCE, "retrieval attends to a part of the context"


def test_a_crowd_of_different_requests(llm):
    """More requests than run at once; long prompts are read in chunks beside decoding ones."""
    crowd = [
        Request(novel(llm, 600, 0), 40, {}),
        Request(novel(llm, 60, 100), 50, {}),
        Request(novel(llm, 1100, 200), 24, {"budget": 128}, arrives=3),
        Request(novel(llm, 500, 300), 12, by("streamingllm"), arrives=5),
        Request(novel(llm, 700, 400), 30, by("freekv"), arrives=14),
        Request(novel(llm, 500, 500), 20, {"exact": True}, arrives=20),
        Request(novel(llm, 650, 600), 16, by("turning", budget=512), arrives=21),
        Request(novel(llm, 3 * CHUNK + 1, 60), 4, by("fine"), arrives=22),
        Request(novel(llm, 30, 700), 9, by("one_bit"), arrives=30),
    ]
    expected = [alone(llm, request) for request in crowd]
    for answer, request in zip(drive(llm, crowd), expected, strict=True):
        assert_same(answer, request, 5 * NEAR_TIES)
        # With half the budget, one token more or less may change a step by more than that.
        changed = [abs(a - b) for a, b in zip(answer.logprobs, request.logprobs, strict=True)]
        assert sum(change > NEAR_TIES for change in changed) <= len(changed) // 20
    assert expected[7].steps[0] == 3, "the last chunk was a single token"


def test_prefix_hits(llm):
    """Of a method on pages that another one's request has written."""
    document, question = novel(llm, 600, 80), novel(llm, 40, 180)
    requests = [
        Request(document, 12, {}, cache=True),
        Request(document + question, 12, by("fine"), cache=True),
        Request(document, 12, by("freekv"), cache=True),
    ]
    expected = [alone(llm, request) for request in requests]
    llm.reset_prefix_cache()
    first, second = (drive(llm, [requests[0]])[0] for _ in range(2))
    assert (first.cached, second.cached) == (0, len(document) // BLOCK * BLOCK)
    assert_same(second, expected[0], NEAR_TIES)
    for answer, request in zip(drive(llm, requests), expected, strict=True):
        assert answer.cached == second.cached
        assert_same(answer, request, NEAR_TIES)


@pytest.mark.slow
def test_preemption(llm, monkeypatch):
    """Three requests outgrow the cache; the last one is put back and resumed."""
    preempted = preemptions(llm, monkeypatch)
    crowd = [Request(novel(llm, n, n), 40, {}) for n in (1011, 1010, 950)]
    expected = [alone(llm, request) for request in crowd]
    answers = drive(llm, crowd)
    assert [request_id.split("-")[0] for request_id in preempted] == ["2"]
    for answer, request in zip(answers[:2], expected[:2], strict=True):
        assert_same(answer, request, NEAR_TIES)
    assert_resumed(llm, crowd[2], answers[2], expected[2], NEAR_TIES)


def test_the_tokens_of_the_paper_are_chosen(llm):
    """One request of each method, all in one batch; those of pages keep to theirs."""
    steps = 8
    llm.reset_prefix_cache()
    llm.collective_rpc("start_recording", args=(RECORDED,))
    lengths = dict(zip(METHODS, (700, 410, 520, 400, 300), strict=True))
    drive(llm, [Request(novel(llm, n, n), steps, by(m)) for m, n in lengths.items()])
    (summaries,) = llm.collective_rpc("check_recording", args=(METHODS,))
    assert summaries.keys() == METHODS.keys()
    for name, summary in summaries.items():
        assert summary["steps"] == (steps - 1) * len(RECORDED)
        assert summary["differ"] == 0, name
        assert summary["agree"] > 0.99 * summary["pages"], name
        assert summary["worst_error"] < 1e-4, name
    assert summaries["fier"]["corrected"] == summaries["fier"]["heads"]
    assert summaries["turning"]["corrected"] < summaries["turning"]["heads"]


def test_counts(llm):
    """What a step attends to, in pages' worth of tokens."""
    drive(llm, [Request(novel(llm, 40, 0), 1, {})])
    llm.collective_rpc(lambda worker: tuple(worker.requests.take_counts()))
    budgets = (96, 256, 512)
    drive(llm, [Request(novel(llm, 700, 0), 12, {"budget": budget}) for budget in budgets])
    drive(llm, [Request(novel(llm, 40, 0), 1, {})])
    (counts,) = llm.collective_rpc(lambda worker: worker.requests.take_counts()._asdict())
    assert counts["sparse_steps"] == len(budgets) * 11
    assert counts["attended"] == (LAYERS - 2) * 3 * 11 * sum(budgets) // 32
    assert counts["corrected"] == (LAYERS - 2) * 3 * 11 * len(budgets)
