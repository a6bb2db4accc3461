"""Methods whose steps drop tokens in a GPU's engine; see ``support/device_engine.py``.

Answers are long enough for every kept token to go, and prompts are read in chunks of 128 tokens.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.device.test_device_engine import (
    BLOCK,
    CHUNK,
    EMULATED,
    PAGE,
    STOCK,
    TOLERANCE,
    Served,
    prompt,
)
from tests.support import device_engine, device_specification, kept_tokens
from tests.support.engine import Request, alone, assert_same, by, difference, engine, random_llama

pytestmark = pytest.mark.engine

BUDGET = 4 * PAGE
OURS: dict[str, Any] = {
    "attention_backend": "h2o",
    "additional_config": {
        "kv_retrieval": {
            "page_size": PAGE,
            "budget": BUDGET,
            "max_budget": 5 * PAGE,
            "also": {
                "tova": {},
                "raas": {},
                "sliding": {"preset": "snapkv", "schedule": "sliding"},
                "uneven": {"preset": "h2o", "budget_shares": [[1, 2], [2, 1], 3]},
                "entropies": {"preset": "entropykv", "schedule": "running"},
                "snapkv": {},
                "streamingllm": {},
            },
        }
    },
}
DROPPING = {
    "h2o": Request(prompt(CHUNK + 5, 44), 12, {"budget": 5 * PAGE}),
    "its last token alone": Request(prompt(CHUNK + 1, 45), 6, {}),
    "tova": Request(prompt(180, 42), 12, by("tova")),
    "sliding": Request(prompt(170, 47), 8, by("sliding")),
    "uneven": Request(prompt(140, 49), 8, by("uneven")),
    "entropies": Request(prompt(130, 50), 8, by("entropies")),
    "grows": Request(prompt(58, 34), 12, {}),
    "raas": Request(prompt(150, 48), 28, by("raas")),
    "raas grows": Request(prompt(30, 36), 38, by("raas")),
}
OTHERS = {
    "snapkv": Request(prompt(150, 51), 6, by("snapkv")),
    "streamingllm": Request(prompt(130, 32), 6, by("streamingllm")),
    "exact": Request(prompt(140, 35), 6, {"exact": True}),
}
REQUESTS = DROPPING | OTHERS


def kept_after_the_last_step(worker):
    """What a CPU's engine keeps, as the next step would find it."""
    requests, seat = worker.requests, kept_tokens.last_seat(worker)
    method = int(requests.records["method"][seat])
    if method in requests.kept.methods:
        requests.kept.step(np.array([seat]), method, requests._context[[seat]] + 1)
    return kept_tokens.on_a_cpu(worker)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("toy") / "model", layers=3, kv_heads=2)


@pytest.fixture(scope="module")
def expected(model):
    """Of each request the CPU's answer, what it keeps in the end, and the exact answer."""
    with engine(model, enforce_eager=True, **STOCK, **OURS) as llm:
        return {
            name: (
                alone(llm, request),
                llm.collective_rpc(kept_after_the_last_step)[0],
                alone(llm, replace(request, options={"exact": True})),
            )
            for name, request in REQUESTS.items()
        }


@pytest.fixture(scope="module")
def served(model, expected):
    with device_engine.start() as pool:
        served = Served(pool)
        pool.submit(device_specification.install).result()
        served.open_engine(model, EMULATED | OURS | {"num_gpu_blocks_override": 26})
        yield served


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_the_cpu(served, expected, name):
    """Each alone, decoded by replays of graphs; and the same tokens are kept in the end."""
    before, (answer, kept, exact) = served.replays(), expected[name]
    assert_same(served.drive([REQUESTS[name]])[0], answer, TOLERANCE)
    assert served.replays() - before == REQUESTS[name].tokens - 1
    if name not in DROPPING:
        return
    kept_tokens.assert_same(served.kept(), kept)
    assert difference(answer, exact) > 10 * TOLERANCE


def test_a_crowd_of_different_requests(served, expected):
    """In company prompts are read beside steps that decode, and rows take turns."""
    names = [*REQUESTS]
    for part in (names[:4], names[4:7] + names[-3:]):
        before = served.replays()
        answers = served.drive([REQUESTS[name] for name in part])
        for answer, name in zip(answers, part, strict=True):
            assert_same(answer, expected[name][0], TOLERANCE)
        assert served.replays() > before


def test_prefix_caching(served):
    """Keys of a prefix that others have read are there to be attended to, and the queries that rate
    them are the request's own."""
    asked = Request(prompt(6 * BLOCK, 50), 8, by("tova"))
    expected = served.drive([asked])[0]
    served.reset_prefix_cache()
    served.drive([Request(asked.prompt, 1, by("streamingllm"), cache=True)])
    answer = served.drive([replace(asked, cache=True)])[0]
    assert answer.cached == 5 * BLOCK
    assert_same(answer, expected, TOLERANCE)


def test_preemption(served):
    """A request that is put back and resumed starts from all of its tokens."""
    crowd = [
        Request(prompt(251, 7), 16, {"exact": True}),
        Request(prompt(250, 8), 16, {"exact": True}),
        Request(prompt(230, 2), 14, by("tova")),
    ]
    answers, preempted = served.drive_preempting(crowd)
    assert preempted == ["2"]
    expected = served.drive([crowd[2]])[0]
    served.assert_resumed(crowd[2], answers[2], expected, TOLERANCE)


def test_an_aborted_answer_leaves_nothing(served, expected):
    """The seat's next owner starts from its own prompt."""
    long = Request(prompt(70, 12), 40, {}, aborts=9)
    after = replace(DROPPING["grows"], arrives=10)
    assert_same(served.drive([long, after])[1], expected["grows"][0], TOLERANCE)


FAR_CROWDS = ["h2o", "tova", "grows", "streamingllm"], ["sliding", "raas", "snapkv", "exact"]
UNEVEN = "uneven", "entropies"
"""Methods that a home in host memory does not serve."""


def test_a_home_in_host_memory(model, expected):
    """What is dropped leaves its slot to what is kept; seats change hands."""
    options = OURS["additional_config"]["kv_retrieval"] | {"home": "host"}
    options["also"] = {name: by for name, by in options["also"].items() if name not in UNEVEN}
    with device_engine.start() as pool:
        far = Served(pool)
        ours = OURS | {"additional_config": {"kv_retrieval": options}}
        far.open_engine(model, EMULATED | ours | {"num_gpu_blocks_override": 26})
        for names in FAR_CROWDS:
            before = far.replays()
            answers = far.drive([REQUESTS[name] for name in names])
            for answer, name in zip(answers, names, strict=True):
                assert_same(answer, expected[name][0], TOLERANCE)
            assert far.replays() > before
        answer, kept, _ = expected["raas grows"]
        assert_same(far.drive([REQUESTS["raas grows"]])[0], answer, TOLERANCE)
        kept_tokens.assert_same(far.kept(), kept)
        late, early = far.launched_late()
        assert early > 3
        assert late == []


def test_every_step_is_the_specifications(served):
    """Lists, and what is dropped; and nothing was compiled while requests were served."""
    assert served.pool.submit(device_specification.lists).result() > 100
    assert served.pool.submit(device_specification.dropped).result() > 100
    late, early = served.launched_late()
    assert early > 3
    assert late == []
