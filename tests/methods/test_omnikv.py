"""OmniKV served: which layers do what, and an independent replay of what they select.

One engine. Its model runs in float32, so that rounding leaves next to nothing open.
"""

import pytest

from tests.support.engine import Request, assert_same, difference, drive, engine, novel, shortened

pytestmark = [pytest.mark.engine, pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
LAYERS = 9
FILTERS = [1, 5]
BUDGET = 256
CHUNK = 256
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    options = {"budget": BUDGET, "max_budget": 2048, "filters": FILTERS}
    with engine(
        shortened(tmp_path_factory.mktemp("model"), MODEL, LAYERS),
        attention_backend="omnikv",
        additional_config={"kv_retrieval": options},
        worker_extension_cls="tests.support.omnikv_recorder.OmniKVRecorder",
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK,
        num_gpu_blocks_override=36,
        enforce_eager=True,
    ) as llm:
        yield llm


def observe(llm, name):
    """Let the filters select by another window, between requests."""

    def change(worker):
        from vllm_kvretrieval.methods.observation import LatestQueries, Observation
        from vllm_kvretrieval.retrieval.roles import OBSERVATIONS

        weights = OBSERVATIONS[name]
        for group in worker.model_runner.attn_groups[0]:
            methods, requests = group.get_metadata_builder().planner.methods, worker.requests
            method = next(m for m in methods if hasattr(m, "observation"))
            method.observation = Observation(weights, requests.per_seat(), requests.per_seat())
        for layer in worker.vllm_config.compilation_config.static_forward_context.values():
            impl = layer.impl
            for watcher in impl.watchers.values():
                heads = impl.num_kv_heads * impl.num_queries_per_kv
                keep = LatestQueries(4, len(weights), heads, impl.head_size, layer.kv_cache.dtype)
                watcher.latest = keep if len(weights) > 1 else None

    llm.collective_rpc(change)


def recorded(llm, requests, observation="last"):
    llm.collective_rpc("start_recording", args=(FILTERS, observation))
    answers = drive(llm, requests)
    (summary,) = llm.collective_rpc("recording", args=(LAYERS,))
    return answers, summary


def assert_replayed(summary, requests, steps):
    sparse = LAYERS - FILTERS[0] - 2 * len(FILTERS)
    assert summary["steps"] == steps * sparse
    assert summary["requests"] == requests
    assert summary["all_follow"]
    assert summary["differ"] == 0
    assert summary["near_ties"] < 1e-3 * summary["selected"]
    assert summary["worst_error"] < 1e-4


def crowd(llm):
    """Requests of different lengths and budgets, that come while others decode."""
    return [
        Request(novel(llm, 700, 50), 10, {}),
        Request(novel(llm, 1500, 100), 8, {"budget": 512}, arrives=3),
        Request(novel(llm, 290, 10), 6, {"budget": 192}, arrives=7),
    ]


@pytest.mark.parametrize("observation", ["last", "exponential", "uniform"])
def test_a_replay_of_the_paper_selects_the_same(llm, observation):
    observe(llm, observation)
    try:
        requests = crowd(llm)
        _, summary = recorded(llm, requests, observation)
        assert_replayed(summary, 3, sum(r.tokens - 1 for r in requests))
    finally:
        observe(llm, "last")


def test_within_the_budget_and_exact_are_the_same(llm):
    prompt = novel(llm, 700, 50)
    exact = drive(llm, [Request(prompt, 8, {"exact": True})])[0]
    within = drive(llm, [Request(prompt, 8, {"budget": 1024})])[0]
    sparse = drive(llm, [Request(prompt, 8, {})])[0]
    assert_same(within, exact, TOLERANCE)
    assert difference(sparse, exact) > 0.01


@pytest.mark.slow
def test_preemption(llm):
    """The cache holds two of these and not four: requests are interrupted, and start anew."""
    requests = [Request(novel(llm, 1100, 100 * i), 24, {}, arrives=i) for i in range(4)]
    alone = [drive(llm, [Request(r.prompt, r.tokens, r.options)])[0] for r in requests]
    answers, summary = recorded(llm, requests)
    for answer, expected in zip(answers, alone, strict=True):
        assert_same(answer, expected, TOLERANCE)
    assert summary["differ"] == 0
