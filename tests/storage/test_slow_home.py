"""A KV cache on disk with a small recall cache: the same answers as in memory, whatever happens.

A small Llama with random weights, in float32. Both engines give out the same block numbers and
attend with the same kernel to the same pages in the same order, so answers agree to the last bit.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import pytest
from vllm.config import CompilationMode

from tests.support.engine import (
    Answer,
    Request,
    alone,
    assert_same,
    drive,
    engine,
    model_of,
    prompt,
    random_llama,
)
from tests.support.home_requests import (
    ALSO,
    BUDGET,
    DOCUMENT,
    HEAD_SIZE,
    KV_HEADS,
    LAYERS,
    LEAST_SLOTS,
    LONG,
    OPTIONS,
    REQUESTS,
    SCENARIOS,
    SLOT_BYTES,
    compared_with_home,
    counted,
    crowd,
    life,
    lose_home_after,
    metrics,
    reasons_to_finish,
    settle,
)
from tests.support.home_worker import LOSSLESS
from tests.support.turns import chat, with_and_without_cache

pytestmark = pytest.mark.engine


def run_scenarios(llm):
    """Answers per scenario, and units attended to except where there are too many steps."""
    results = {"life": [vars(answer) for answer in drive(llm, life(REQUESTS))]}
    settle(llm)
    llm.collective_rpc("record_plans")
    for name, requests in SCENARIOS.items():
        llm.reset_prefix_cache()
        answers = drive(llm, requests())
        settle(llm)
        results[name] = [vars(answer) for answer in answers]
        results[name + " plans"] = llm.collective_rpc("plans")[0]
    return results


model = model_of(random_llama, LAYERS, KV_HEADS)


@pytest.fixture(scope="module")
def expected(model):
    """The results of the engine with its cache in memory. It ends before others start."""
    options = {"kv_retrieval": BUDGET | {"home": "auto", "also": ALSO}}
    with engine(model, additional_config=options, disable_log_stats=False, **OPTIONS) as llm:
        return run_scenarios(llm) | {"metrics": counted(llm)}


def on_disk(slots, **options):
    return BUDGET | {"home": "disk", "recall_cache_bytes": slots * SLOT_BYTES} | options


@pytest.fixture(scope="module")
def llm(model, expected):
    """An engine with the least number of slots that is accepted."""
    options = {"kv_retrieval": on_disk(LEAST_SLOTS, also=ALSO)}
    with engine(model, additional_config=options, disable_log_stats=False, **OPTIONS) as llm:
        yield llm


def test_same_answers_as_in_memory(llm, expected):
    assert llm.collective_rpc("cache_state")[0][0] == [LEAST_SLOTS] * (LAYERS - 1)
    results = run_scenarios(llm)
    for name in results:
        assert results[name] == expected[name], name
    assert llm.collective_rpc("check_caches") == [([], 0)]
    assert sum(answer["cached"] for answer in results["shared"]) > 2000
    steps = results["outgrowing"][2]["steps"]
    pauses = [b - a for a, b in pairwise(steps)]
    assert max(pauses) > 5, "a request was preempted"
    by_method = [answer["logprobs"] for answer in results["methods"][:3]]
    assert len({tuple(logprobs) for logprobs in by_method}) == 3, "each attends to its own"
    assert sum(answer["cached"] for answer in results["methods"]) > 1500
    steps = [answer["steps"] for answer in results["life"]]
    assert max(map(max, filter(None, steps))) > 10 * REQUESTS
    preempted = [s for s in steps if any(b - a > 5 for a, b in pairwise(s))]
    shared = [answer for answer in results["life"] if answer["cached"]]
    assert len(preempted) >= 1
    assert len(shared) > REQUESTS // 4


@pytest.mark.slow
def test_a_long_life(model):
    answers = []
    for options in (BUDGET | {"home": "auto", "also": ALSO}, on_disk(LEAST_SLOTS, also=ALSO)):
        with engine(model, additional_config={"kv_retrieval": options}, **OPTIONS) as llm:
            answers.append(drive(llm, life(LONG)))
            assert llm.collective_rpc("check_caches")[0][0] == []
    assert answers[0] == answers[1]


def turns_are_exact(llm, tolerance, orders):
    """Chats of three turns in these orders, one of them exact; then an exact question.

    A turn by another method shares nothing that was decoded by the one before, and reads it again,
    exactly.
    """
    turns: list[dict[str, Any]] = [{}, {"method": "streamingllm"}, {"exact": True}]
    every = [*permutations(turns)]
    for number, order in ((number, every[number]) for number in orders):
        prompt_ = chat(llm, prompt(300, 110 + number), order, 60)
        answer, expected = with_and_without_cache(llm, prompt_, {"exact": True}, 4)
        exact = 300 + 80 * max(2, 1 + order.index({"exact": True}))
        assert answer.cached == exact // 128 * 128
        assert_same(answer, expected, tolerance)


@pytest.mark.parametrize(
    "orders", [(0, 3, 5), pytest.param((1, 2, 4), marks=pytest.mark.slow)], ids=str
)
def test_exact_turns_of_a_chat(llm, orders):
    turns_are_exact(llm, 1e-3, orders)


def test_metrics(llm):
    """vLLM's Prometheus metrics say what recall did."""
    change, heads = counted(llm)
    assert change["heads_corrected"] == heads
    assert change["units_attended"] == change["units_looked_up"] == heads * 4
    assert 0 < change["units_missed"] < change["units_attended"] / 2
    assert change["bytes_recalled"] >= change["units_missed"] * 2 * 32 * HEAD_SIZE * 4
    now = metrics(llm)
    assert now["slots"] == (LAYERS - 1) * LEAST_SLOTS
    assert 0 < now["slots_used"] <= now["slots"]


def test_metrics_in_memory(expected):
    """With home=auto and the cache in memory, there is no recall, but there is retrieval."""
    change, heads = expected["metrics"]
    of_recall = ("units_looked_up", "units_missed", "bytes_recalled", "slots_used", "slots")
    of_store = [name for name in change if name.startswith("store_")]
    of_prompts = ("prompt_pairs", "prompt_pairs_skipped")
    nothing = dict.fromkeys((*of_recall, *of_store, *of_prompts), 0)
    for name in ("planning_seconds", "waiting_seconds"):
        assert change.pop(name) == 0  # vLLM's reader rounds down
    whole = change.pop("units_in_context")
    assert whole > heads * 4
    assert change == nothing | {
        "heads_corrected": heads,
        "heads_decoded": heads,
        "units_attended": heads * 4,
        "tokens_read": heads * 4 * 32,
    }


def test_integrity_in_the_middle_of_things(llm):
    """Stepped by hand, with a look at every slot after every step."""
    core = llm.llm_engine
    pinned = []
    for i, request in enumerate(crowd()[:4]):
        core.add_request(f"r{i}", {"prompt_token_ids": request.prompt}, request.params())
    while core.has_unfinished_requests():
        core.step()
        complaints, pins = llm.collective_rpc("check_caches")[0]
        assert complaints == []
        pinned.append(pins)
    assert 0 < max(pinned) <= (LAYERS - 1) * LEAST_SLOTS


def test_home_holds_every_token(llm):
    """Written through: the file against the model's own keys and values."""
    compared, written = compared_with_home(llm)
    assert compared == (LAYERS - 1) * sum(written)


def test_a_read_error_fails_its_requests_alone(llm):
    # The short one needs no new page before the long one has failed.
    long, short = Request(prompt(700, 60), 60, {}), Request(prompt(34, 61), 60, {})
    alone = drive(llm, [long])
    reasons = reasons_to_finish(llm, {"long": long, "short": short}, {12: "break_reads"})
    llm.collective_rpc("mend_reads")
    assert reasons == {"long": "error", "short": "length"}
    assert drive(llm, [long]) == alone
    settle(llm)
    assert llm.collective_rpc("check_caches") == [([], 0)]


def test_a_lost_home_fails_requests_but_not_the_engine(llm):
    lose_home_after(llm, 2, 5, 14)


def test_a_page_lost_while_it_is_first_written(llm):
    """And there again in the next step, without what was written."""
    faults = {0: "lose_home", 1: "renew_home"}
    reasons = reasons_to_finish(llm, {"short": Request(prompt(60, 66), 20, {})}, faults)
    assert reasons == {"short": "error"}


def test_what_could_not_be_written(llm):
    """It fails who runs, and who finds it in the prefix cache later; then it is computed anew."""
    llm.reset_prefix_cache()
    document = Request(DOCUMENT, 20, {}, cache=True)
    (alone,) = drive(llm, [document])
    running = {"long": Request(prompt(700, 67), 60, {}), "short": Request(prompt(34, 68), 60, {})}
    reasons = reasons_to_finish(llm, running, {8: "fail_to_write"})
    assert reasons == dict.fromkeys(running, "error")
    new = {"new": Request(prompt(34, 69), 9, {})}
    assert reasons_to_finish(llm, new, {}) == {"new": "length"}
    assert reasons_to_finish(llm, {"shares": document}, {}) == {"shares": "error"}
    (anew,) = drive(llm, [document])
    assert anew.cached == 0
    assert (anew.tokens, anew.logprobs) == (alone.tokens, alone.logprobs)
    (again,) = drive(llm, [document])
    assert again.cached > 600
    assert again.tokens == alone.tokens


def test_dense_layers_on_disk(model, expected):
    """If fast memory has no room for dense layers, every step reads them from home."""
    fast = LEAST_SLOTS * SLOT_BYTES + (6 << 20)  # staging takes 4 MiB, the dense layer 6.5
    options = OPTIONS | {"kv_cache_memory_bytes": fast}
    retrieval = {"kv_retrieval": BUDGET | {"home": "disk"}}
    with engine(model, additional_config=retrieval, **options) as llm:
        tiers = llm.collective_rpc(lambda worker: vars(worker.planner.tiers))[0]
        assert tiers["streams_dense"]
        assert tiers["staging"] == 4 << 20
        assert tiers["dense"] == 0
        for name in ("shared", "crowd"):
            answers = [vars(answer) for answer in drive(llm, SCENARIOS[name]())]
            assert answers == expected[name], name
        faults = {14: "lose_home"}
        requests = {"long": Request(prompt(700, 60), 60, {})}
        assert reasons_to_finish(llm, requests, faults) == {"long": "error"}


def test_more_than_memory_would_hold(model):
    """With home=auto and as many requests as vLLM runs by default: what does not fit in memory goes
    to disk, prompts of full length included, and requests wait for others' slots. Steps attend to
    pages in slots while others are read."""
    fast = 63 << 18
    assert fast < OPTIONS["max_model_len"] * LAYERS * KV_HEADS * HEAD_SIZE * 2 * 4
    options = OPTIONS | {"kv_cache_memory_bytes": fast, "num_gpu_blocks_override": None}
    retrieval = BUDGET | {"home": "auto", "streaming_attention": True}
    options |= {"additional_config": {"kv_retrieval": retrieval}}
    del options["max_num_seqs"]
    with engine(model, **options) as llm:
        core: Any = llm.llm_engine.engine_core.engine_core
        (tiers,) = llm.collective_rpc(lambda worker: vars(worker.planner.tiers))
        assert core.vllm_config.scheduler_config.max_num_seqs == 256
        assert core.scheduler.max_num_running_reqs == tiers["seats"] == 3
        assert core.scheduler.kv_cache_manager.max_model_len < (tiers["blocks"] - 1) * 128
        requests = [Request(prompt(n, n), 12, {}) for n in (2000, 150, 700, 60, 400, 333)]
        together = drive(llm, requests)
        running = Counter(
            step for answer in together for step in range(answer.steps[0], answer.steps[-1] + 1)
        )
        assert max(running.values()) == 3
        for request, answer in zip(requests, together, strict=True):
            assert_same(answer, alone(llm, request), tolerance=1e-3)
        assert llm.collective_rpc("check_caches")[0][0] == []


@pytest.mark.slow
def test_compiled(model, expected):
    """With torch.compile, the answers are those of the cache in memory to rounding."""
    options = OPTIONS | {"enforce_eager": False, "worker_extension_cls": ""}
    retrieval = {"kv_retrieval": on_disk(LEAST_SLOTS)}
    with engine(model, additional_config=retrieval, **options) as llm:
        mode = llm.llm_engine.vllm_config.compilation_config.mode
        assert mode is not CompilationMode.NONE
        answers = drive(llm, crowd())
    for answer, eager in zip(answers, expected["crowd"], strict=True):
        assert_same(answer, Answer(**eager), tolerance=1e-3)


# ------------------------------------------------------------------------- pages that are encoded

WHOLE = 2e-3  # of log-probs, where another kernel attends to whole contexts


@pytest.fixture(scope="module")
def encoded(model, expected):
    """The same with an encoded home, and a codec without loss."""
    options = {"kv_retrieval": on_disk(LEAST_SLOTS, also=ALSO, codec=LOSSLESS)}
    with engine(model, additional_config=options, disable_log_stats=False, **OPTIONS) as llm:
        yield llm


def test_same_answers_from_encoded_pages(encoded, expected):
    """Whatever happens to requests happens to them as with raw pages, step by step."""
    for name, requests in SCENARIOS.items():
        encoded.reset_prefix_cache()
        for answer, raw in zip(drive(encoded, requests()), expected[name], strict=True):
            reference = Answer(**raw)
            assert (answer.steps, answer.cached) == (reference.steps, reference.cached), name
            assert_same(answer, reference, WHOLE)
        settle(encoded)
        # All memory has been given back but for the last page of who is not known to have gone.
        (held,) = encoded.collective_rpc("open_bytes")
        assert 0 < held <= (LAYERS - 1) * KV_HEADS * 2 * 32 * HEAD_SIZE * 4
    answers, compared = drive(encoded, life(REQUESTS // 4)), 0
    for answer, raw in zip(answers, expected["life"], strict=False):
        if raw["steps"] == answer.steps:  # later ones meet others there
            assert_same(answer, Answer(**raw), WHOLE)
            compared += len(answer.tokens) > 0
    assert compared >= len(answers) / 2
    settle(encoded)
    assert encoded.collective_rpc("check_caches") == [([], 0)]


@pytest.mark.parametrize("home", ["llm", "encoded"])
def test_attention_while_pages_are_read(home, request, expected):
    """Streaming attention: the parts of a step make what one list makes, to rounding."""
    llm = request.getfixturevalue(home)
    llm.collective_rpc("stream", args=(True,))
    for name in ("methods", "crowd"):
        llm.reset_prefix_cache()
        for answer, raw in zip(drive(llm, SCENARIOS[name]()), expected[name], strict=True):
            assert_same(answer, Answer(**raw), WHOLE)
    (waits,) = llm.collective_rpc("stream", args=(False,))
    assert waits > 50
    settle(llm)
    assert llm.collective_rpc("check_caches") == [([], 0)]


def test_integrity_of_encoded_pages(encoded):
    test_integrity_in_the_middle_of_things(encoded)


def test_exact_turns_from_encoded_pages(encoded):
    turns_are_exact(encoded, WHOLE, (0, 1, 4))  # the exact turn is the last, second or first


def test_metrics_of_encoded_pages(encoded):
    test_metrics(encoded)


def test_encoded_home_holds_every_full_page(encoded):
    compared, written = compared_with_home(encoded)
    assert compared == (LAYERS - 1) * sum(tokens // 32 * 32 for tokens in written)


def test_an_encoded_page_that_cannot_be_read_or_written(encoded):
    """It fails who needs it, and only them: at first the short request fills no page meanwhile."""
    requests = {"long": Request(prompt(700, 60), 60, {}), "short": Request(prompt(34, 61), 60, {})}
    alone = {name: drive(encoded, [request]) for name, request in requests.items()}
    faults = {12: "break_reads", 20: "mend_reads"}
    reasons = reasons_to_finish(encoded, requests, faults)
    assert reasons == {"long": "error", "short": "length"}
    # It fills a page a few steps later.
    reasons = reasons_to_finish(encoded, {"short": requests["short"]}, {25: "break_reads"})
    encoded.collective_rpc("mend_reads")
    assert reasons == {"short": "error"}
    settle(encoded)  # lost blocks are reported twice
    for name, request in requests.items():
        assert drive(encoded, [request]) == alone[name]
    settle(encoded)
    assert encoded.collective_rpc("check_caches") == [([], 0)]


@pytest.mark.parametrize(("method", "raw_pages"), [("kivi", 4), ("kvquant", 0)])
def test_full_attention_over_encoded_pages(model, encoded, method, raw_pages):
    """Every page is read, the last four of them raw by kivi; without loss it is full attention."""
    requests = [Request(prompt(700, 40), 20, {}), Request(prompt(60, 41), 20, {}, arrives=4)]
    exact = drive(encoded, [replace(r, options={"exact": True}) for r in requests])
    options = OPTIONS | {"attention_backend": method}
    with engine(model, additional_config={"kv_retrieval": {"codec": LOSSLESS}}, **options) as llm:
        for answer, reference in zip(drive(llm, requests), exact, strict=True):
            assert_same(answer, reference, WHOLE)
        drive(llm, [requests[0]])
        page = LAYERS * KV_HEADS * 2 * 32 * HEAD_SIZE * 4
        left = llm.collective_rpc("open_bytes")[0]
        assert raw_pages * page < left <= (raw_pages + 1) * page
        settle(llm)
        assert llm.collective_rpc("check_caches") == [([], 0)]
