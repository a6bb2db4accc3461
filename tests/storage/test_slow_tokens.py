"""Methods of single tokens with their KV cache on disk: the same answers as in memory.

As in ``test_slow_home``: a small Llama with random weights, in float32.
Both engines give out the same block numbers and attend with the same kernel to the same tokens in
the same order, so answers agree to the last bit.
"""

from itertools import pairwise
from typing import Any

import pytest

from tests.support.engine import Request, drive, engine, model_of, prompt, random_llama
from tests.support.home_requests import (
    BUDGET,
    DOCUMENT,
    HEAD_SIZE,
    KV_HEADS,
    LEAST_SLOTS,
    OPTIONS,
    compared_with_home,
    crowd,
    life,
    lose_home_after,
    metrics,
    outgrowing,
    settle,
    shared,
)

pytestmark = pytest.mark.engine

LAYERS = 7
LEAST = LEAST_SLOTS * 32  # tokens of KV heads
TOKEN_BYTES = 2 * HEAD_SIZE * 4
REUSING = {"preset": "fier", "schedule": "speculative", "correction_threshold": -1.0}
ALSO = {"pages": {"preset": "freekv"}, "reusing": REUSING}
METHODS: dict[str, dict[str, Any]] = {
    "fier": {"also": ALSO, "dense_layers": 1},
    "omnikv": {"filters": [0, 4], "also": {"pages": {"preset": "freekv"}, "fier": {}}},
}
FOLLOW = {"fier": range(1, 7), "omnikv": (2, 3, 6)}
REQUESTS = 12  # of a random life


def served(method, request):
    """A request of ``test_slow_home`` by methods and options that there are here."""
    options = dict(request.options or {})
    options.pop("correction_threshold", None)
    named = {"kvretrieval": "pages", "sums": list(METHODS[method]["also"])[1]}
    if "method" in options:
        options["method"] = named.get(options["method"], options["method"])
    return Request(
        request.prompt, request.tokens, options, request.arrives, request.aborts, request.cache
    )


def methods(method):
    """Several in one batch, on pages of one document."""
    return [
        Request(DOCUMENT, 24, {"method": name}, arrives=arrives, cache=True)
        for arrives, name in enumerate((*METHODS[method]["also"], method, "streamingllm"))
    ] + [Request(DOCUMENT, 12, {"exact": True}, arrives=12, cache=True)]


def scenarios(method):
    made = {"life": life(REQUESTS), "crowd": crowd(), "shared": shared(), "out": outgrowing()}
    return {name: [served(method, r) for r in requests] for name, requests in made.items()} | {
        "methods": methods(method)
    }


def run_scenarios(llm, method):
    results = {}
    for name, requests in scenarios(method).items():
        results[name] = [vars(answer) for answer in drive(llm, requests)]
        settle(llm)
    return results


model = model_of(random_llama, LAYERS, KV_HEADS)


@pytest.fixture(scope="module", params=[pytest.param("fier", marks=pytest.mark.slow), "omnikv"])
def method(request):
    return request.param


def options_of(method, **options):
    return {
        **OPTIONS,
        "attention_backend": method,
        "additional_config": {"kv_retrieval": BUDGET | METHODS[method] | options},
        "disable_log_stats": False,
    }


@pytest.fixture(scope="module")
def expected(model, method):
    """The results of the engine with its cache in memory. It ends before the other one starts."""
    with engine(model, **options_of(method, home="auto")) as llm:
        return run_scenarios(llm, method)


@pytest.fixture(scope="module")
def llm(model, method, expected):
    """An engine with the least number of slots that is accepted."""
    cache = len(FOLLOW[method]) * LEAST * (TOKEN_BYTES + 16)
    with engine(model, **options_of(method, home="disk", recall_cache_bytes=cache)) as llm:
        yield llm


def complaints(llm):
    return llm.collective_rpc(lambda worker: [c.check() for c in worker.storage.tokens])[0]


def test_same_answers_as_in_memory(llm, method, expected):
    slots = llm.collective_rpc(
        lambda worker: (worker.planner.tiers.slots, [*worker.retrieval_layers])
    )[0]
    names = [f"model.layers.{i}.self_attn.attn" for i in FOLLOW[method]]
    assert slots == (len(names) * (LEAST,), names)
    results = run_scenarios(llm, method)
    for name in results:
        assert results[name] == expected[name], name
    assert set(complaints(llm)) == {""}
    assert sum(answer["cached"] for answer in results["shared"]) > 2000
    pauses = [b - a for a, b in pairwise(results["out"][2]["steps"])]
    assert max(pauses) > 5, "a request was preempted"
    by_method = {tuple(answer["logprobs"][:12]) for answer in results["methods"]}
    assert len(by_method) == len(results["methods"]), "each attends to its own"


def test_metrics(llm, method):
    """The metrics of recall, in tokens of KV heads. New tokens are no misses."""
    settle(llm)
    before = metrics(llm)
    drive(llm, [Request(prompt(700, 40), 13, {})])
    settle(llm)
    after = metrics(llm)
    change = {name: after[name] - before[name] for name in after}
    steps = len(FOLLOW[method]) * KV_HEADS * 12
    assert change["units_attended"] == steps * 4
    assert change["units_looked_up"] == steps * 128
    first = steps // 12 * 127  # a request begins with nothing
    assert first < change["units_missed"] < change["units_looked_up"] - first
    assert change["bytes_recalled"] == change["units_missed"] * TOKEN_BYTES
    assert after["slots"] == len(FOLLOW[method]) * LEAST
    assert after["slots_used"] == 0, "nothing runs"


def test_integrity_in_the_middle_of_things(llm, method):
    """Stepped by hand, with a look at every place after every step."""
    core, used = llm.llm_engine, []
    for i, request in enumerate(served(method, r) for r in crowd()[:4]):
        core.add_request(f"r{i}", {"prompt_token_ids": request.prompt}, request.params())
    while core.has_unfinished_requests():
        core.step()
        assert set(complaints(llm)) == {""}
        used += llm.collective_rpc(lambda w: sum(recall.used for recall in w.storage.tokens))
    assert 0 < max(used) <= len(FOLLOW[method]) * LEAST


def test_home_holds_every_token(llm, method):
    """Written through: the file against the model's own keys and values."""
    compared, written = compared_with_home(llm)
    assert compared == len(FOLLOW[method]) * sum(written)


def test_a_lost_home_fails_requests_but_not_the_engine(llm):
    lose_home_after(llm, 9)


def test_filters_that_do_not_fit_in_memory(model, method, expected):
    """These and dense layers then are in the file, and read there at every step."""
    if method != "omnikv":
        pytest.skip("dense layers on disk are those of other methods: test_slow_home")
    fast = len(FOLLOW[method]) * LEAST * (TOKEN_BYTES + 16) + (7 << 20)
    options = options_of(method, home="disk") | {"kv_cache_memory_bytes": fast}
    with engine(model, **options) as llm:
        tiers = llm.collective_rpc(lambda worker: vars(worker.planner.tiers))[0]
        assert tiers["streams_dense"]
        assert tiers["staging"] == 4 << 20
        answers = [vars(answer) for answer in drive(llm, scenarios(method)["crowd"])]
        assert answers == expected["crowd"]
