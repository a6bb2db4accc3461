"""Methods that drop tokens, in an engine: what they keep is what their papers say.

Held against a replay of recorded queries and keys (``keeping_recorder.py``). Company, prefix
hits, preemption, and what is stock vLLM's answer: ``tests/methods/test_methods.py``.
"""

from typing import Any

import pytest

from tests.support.engine import (
    Request,
    assert_same,
    by,
    difference,
    drive,
    engine,
    model_of,
    novel,
    shortened,
)
from tests.support.keeping_recorder import Rule
from tests.support.turns import chat, with_and_without_cache

pytestmark = [pytest.mark.engine, pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
BUDGET = 256
CHUNK = 256  # tokens per step
BLOCK = 128
STOCK: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": CHUNK,
    "num_gpu_blocks_override": 26,  # one of them vLLM's own
    "enforce_eager": True,
}
TOLERANCE = 1e-3
WINDOW = 32
RULES = {
    "entropykv": Rule(per_layer=True, sink=1, recent=0.5, by_entropy=True),
    "cheap": Rule(WINDOW, per_layer=True, sink=1, recent=0.5, by_entropy=True),
    "even": Rule(WINDOW, per_layer=True, sink=1, recent=0.5),
    "sliding": Rule(WINDOW, per_layer=True, sink=1, recent=0.5, evicts=True, slides=True),
    "snapkv": Rule(WINDOW, recent=32, smooth=7),
    "h2o": Rule(recent=0.5, evicts=True),
    "tova": Rule(1, per_layer=True, evicts=True, latest=True),
    "raas": Rule(32, recent=16, evicts=True, stamps=True),
}
ALSO = {
    "cheap": {"observation": WINDOW},
    "even": {"observation": WINDOW, "budget_shares": "uniform"},
    "sliding": {"observation": WINDOW, "budget_shares": "uniform", "schedule": "sliding"},
    **{name: {} for name in ("snapkv", "h2o", "tova", "raas", "freekv")},
}
EVICTING = "h2o", "tova", "raas", "sliding"
LAYERS = 4
REPLAYED = (0, 2, 3)

model = model_of(shortened, MODEL, LAYERS)


@pytest.fixture(scope="module")
def llm(model):
    with engine(
        model,
        attention_backend="entropykv",
        additional_config={"kv_retrieval": {"budget": BUDGET, "also": ALSO}},
        worker_extension_cls="tests.support.keeping_recorder.KeepingRecorder",
        **STOCK,
    ) as llm:
        yield llm


def test_the_first_token_is_exact(llm):
    """It comes of exact prefill, and those after it do not."""
    prompt = novel(llm, 700, 50)
    exact, *dropping = drive(
        llm, [Request(prompt, 16, o) for o in (by("h2o", exact=True), *map(by, RULES))]
    )
    for answer in dropping:
        assert answer.logprobs[0] == pytest.approx(exact.logprobs[0], abs=TOLERANCE)
        assert difference(answer, exact) > 10 * TOLERANCE


def test_the_tokens_of_the_papers_are_kept(llm):
    """Prompts that end within a chunk, at its end, and one token after; and one that fits at first.

    A window of queries may lie in two chunks, and several prompts are read and decoded at once.
    """
    llm.collective_rpc("start_recording")
    lengths = dict(
        zip(RULES, (3 * CHUNK + 1, 600, 500, 620, 2 * CHUNK + 8, 410, 530, 640), strict=True)
    )
    requests = [Request(novel(llm, n, n), 24, by(m)) for m, n in lengths.items()]
    requests += [Request(novel(llm, 240, 9), 40, by(m)) for m in EVICTING]
    requests += [Request(novel(llm, 210, 7), 80, by("raas"))]  # it leaves room for two pages more
    drive(llm, requests)
    (found,) = llm.collective_rpc("check_recording", args=(RULES, BUDGET, REPLAYED))
    assert found.keys() == RULES.keys()
    for name, summary in found.items():
        short = 39 if name in EVICTING else 0
        short += 79 if name == "raas" else 0
        assert summary["steps"] == (23 + short) * len(REPLAYED), name
        assert summary["differ"] == 0, (name, summary)
        assert summary["came_back"] == 0, name
        assert summary["near_ties"] < 0.002 * summary["kept"], name
        assert summary["worst_error"] < 1e-4, name
    assert found["entropykv"]["least"] < 0.8 * BUDGET < 1.2 * BUDGET < found["entropykv"]["most"]
    assert found["even"]["least"] == found["even"]["most"] == BUDGET


def test_what_was_decoded_before_is_no_prefix(llm):
    """Prompts are rated by exact attention: blocks 3 and 4 hold an approximate answer.

    What is left to compute of them is longer than the windows that are observed.
    """
    llm.reset_prefix_cache()
    prompt = chat(llm, novel(llm, 384, 80), [by("freekv")] * 3, 60)
    cached = 3 * BLOCK
    for method in ("snapkv", "raas", "tova", "cheap"):
        answer, expected = with_and_without_cache(llm, prompt, by(method))
        assert answer.cached == cached
        assert_same(answer, expected, TOLERANCE)
        cached = len(prompt) // BLOCK * BLOCK  # as the first of them has computed it
    answer, expected = with_and_without_cache(llm, prompt, {"exact": True})
    assert answer.cached == cached
    assert_same(answer, expected, TOLERANCE)


def test_counts_and_state(llm):
    """Counts are the tokens that a step attends to, in pages. Requests leave no state."""
    drive(llm, [Request(novel(llm, 40, 0), 1, {})])
    llm.collective_rpc(lambda worker: tuple(worker.requests.take_counts()))
    for method in ("even", "h2o"):
        drive(llm, [Request(novel(llm, 700, 0), 12, by(method))])
        drive(llm, [Request(novel(llm, 40, 0), 1, {})])
        (counts,) = llm.collective_rpc(lambda worker: worker.requests.take_counts()._asdict())
        assert counts["sparse_steps"] == 11
        tokens = [BUDGET + i for i in range(1, 12)] if method == "even" else [BUDGET] * 11
        heads = LAYERS * 3
        assert counts["attended"] == sum(n * heads // 32 for n in tokens)
        assert counts["corrected"] == 0
    (left,) = llm.collective_rpc(lambda worker: len(worker.requests.kept._watched))
    assert left == 0
