"""Drafts on a GPU, emulated: they are verified over what one selection lists, and leave no trace.

The drafter does as the tests say, and drafts as many tokens as it may at every step: see
``support/device_drafts.py``. Steps of the same shapes compute the same to the last bit.
"""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.device.test_device_engine import EMULATED, TOLERANCE, Served, prompt
from tests.support import device_engine, device_faults
from tests.support.engine import Request, assert_same, by, random_llama

pytestmark = pytest.mark.engine

PAGE, DRAFTS = 16, 3
RIGHT, SEED = 0.7, 3  # the chance that a draft is right, and what decides which of them are
METHODS = ["freekv", "kvretrieval", "quest", "twilight", "streamingllm", "shadowkv"]
OPTIONS: dict[str, Any] = {"page_size": PAGE, "budget": 96, "also": METHODS[1:]}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 8, 16]}
DRAFTED = EMULATED | {
    "compilation_config": GRAPHS,
    "attention_backend": "freekv",
    "speculative_config": {
        "method": "ngram_gpu",
        "num_speculative_tokens": DRAFTS,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
}
REQUESTS = {name: Request(prompt(180, 30 + n), 14, by(name)) for n, name in enumerate(METHODS)}
REQUESTS["soon beyond its budget"] = Request(prompt(80, 41), 22, by("quest"))
TRACED = {
    "device": ["kvretrieval", "freekv", "quest", "streamingllm"],
    "host": ["freekv", "kvretrieval", "quest", "streamingllm"],
}
"""Requests by the engine's home. The first is a quick test, and the others are among the slow."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("toy") / "model", layers=3, kv_heads=2)


@pytest.fixture(scope="module")
def expected(model):
    """The answers of such an engine without drafts; ``test_device_engine.py`` tests it."""
    with opened(model, "device", speculative_config=None) as plain:
        return dict(zip(REQUESTS, map(plain.alone, REQUESTS.values()), strict=True))


@contextlib.contextmanager
def opened(model, home, retrieval=OPTIONS, drafts=0, **options):
    """An engine in its process."""
    with device_engine.start() as pool:
        served = Served(pool, home)
        retrieval = {"kv_retrieval": retrieval | {"home": home, "drafts": drafts}}
        served.open_engine(model, DRAFTED | {"additional_config": retrieval} | options)
        yield served


@pytest.fixture(scope="module", params=["device", "host"])
def served(request, model, expected):
    """Engines with either home: one that vLLM's option lets draft, and one that ours does."""
    own = {"speculative_config": None} if request.param == "host" else {}
    with opened(model, request.param, drafts=DRAFTS if own else 0, **own) as served:
        yield served


def text_of(request, answer):
    return request.prompt + answer.tokens


def test_wrong_drafts_change_nothing(served, expected):
    """The answers are those of an engine without drafts, each request for itself: in steps with
    prompts behind rows with drafts, and in replays of graphs.

    No graph lacks what a row attends to, though the host takes drafts for accepted.
    """
    requests = [replace(request, arrives=2 * n) for n, request in enumerate(REQUESTS.values())]
    before, _ = served.replays_by_rows(), served.graphs_taken()
    served.follow([text_of(r, a) for r, a in zip(requests, expected.values(), strict=True)], 0.0)
    for answer, alone in zip(served.drive(requests), expected.values(), strict=True):
        assert_same(answer, alone, TOLERANCE)
    after = served.replays_by_rows()
    assert all(after[rows] > before[rows] for rows in (1, 2, 4))
    for graph, some, every in served.graphs_taken():
        assert every if graph == "selections" else not some or graph == "both"


def drafted(served, request, answer):
    """A text to draft that is the answer to its drafts, so that no draft is right by chance.

    Drafts are verified over what the certain token selects, so an answer depends on how many of
    them are right.
    """
    for _ in range(6):
        served.follow([text_of(request, answer)], RIGHT, SEED)
        before, answer = answer, served.alone(request)
        if answer.tokens == before.tokens:
            return text_of(request, answer)
    raise AssertionError("answers go on changing")


def twice(served, request, text):
    """Answers, and what they leave, with drafts that are right at the same places, and wrong in
    different ways."""
    answers, traces = [], []
    for wrong in (1, 2):
        served.follow([text], RIGHT, SEED, wrong)
        answers.append(served.alone(request))
        traces.append(served.trace(len(text) - 1))
    same = (torch.equal(*left) for left in zip(*traces, strict=True))
    return answers, list(same)


@pytest.mark.parametrize(
    "part",
    [slice(1), pytest.param(slice(1, None), marks=pytest.mark.slow)],
    ids=["one method", "others"],
)
def test_rejected_drafts_leave_no_trace(served, expected, part):
    for name in TRACED[served.home][part]:
        request = REQUESTS[name]
        answers, same = twice(served, request, drafted(served, request, expected[name]))
        assert 1.1 < len(answers[0].tokens) / len(set(answers[0].steps)) < 4, name
        assert answers[0] == answers[1], name
        assert all(same), (name, same)


@pytest.fixture(scope="module")
def by_shares(model):
    """An engine whose requests select as many pages as reach a share of the attention; one of them,
    a text to draft, and the answer where all drafts are wrong."""
    shares = {"page_size": PAGE, "budget": 96, "schedule": "every_step", "mass": 0.7}
    request = replace(REQUESTS["freekv"], options={})
    with opened(model, "device", shares) as served:
        served.replay(False)
        served.follow([request.prompt], 0.0)
        text = text_of(request, served.alone(request))
        served.follow([text], 0.0)
        yield served, request, text, served.alone(request)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *device_faults.DRAFT_FAULTS])
def test_faults_are_seen(by_shares, fault):
    """By the answer to wrong drafts, or by a trace."""
    served, request, text, expected = by_shares
    served.plant(fault)
    try:
        served.follow([text], 0.0)
        wrong = served.alone(request)
        answers, same = twice(served, request, text)
    finally:
        served.plant(None)
    sound = wrong == expected and answers[0] == answers[1] and all(same)
    assert sound == (fault is None)
