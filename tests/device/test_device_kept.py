"""Methods that keep tokens of prompts in a GPU's engine; see ``support/device_engine.py``.

Prompts are read in chunks of 128 tokens, so the queries that decide what is kept may be in two.
"""

from typing import Any

import pytest
from transformers import LlamaForCausalLM

from tests.device.test_device_drafts import SEED, opened
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

OURS: dict[str, Any] = {
    "attention_backend": "snapkv",
    "additional_config": {
        "kv_retrieval": {
            "page_size": PAGE,
            "budget": 4 * PAGE,
            "max_budget": 5 * PAGE,
            "also": {
                "entropykv": {},
                "soon": {"preset": "entropykv", "observation": 20},
                "pyramid": {"preset": "snapkv", "budget_shares": "pyramid"},
                "pages": {"preset": "raas", "schedule": "once"},
                "streamingllm": {},
            },
        }
    },
}
REQUESTS = {
    "snapkv": Request(prompt(CHUNK + 5, 44), 6, {"budget": 5 * PAGE}),
    "its last token alone": Request(prompt(CHUNK + 1, 45), 5, {}),
    "entropykv": Request(prompt(180, 42), 5, by("entropykv")),
    "soon": Request(prompt(CHUNK + 3, 46), 5, by("soon")),
    "pyramid": Request(prompt(170, 47), 5, by("pyramid")),
    "pages": Request(prompt(150, 48), 5, by("pages")),
    "streamingllm": Request(prompt(130, 32), 4, by("streamingllm")),
    "within its budget": Request(prompt(60, 34), 8, {}),
    "exact": Request(prompt(140, 35), 4, {"exact": True}),
}
KEEPING = ("snapkv", "its last token alone", "entropykv", "soon", "pyramid", "pages")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its second layer looks wider than the others."""
    path = random_llama(tmp_path_factory.mktemp("toy") / "model", layers=4, kv_heads=2)
    made = LlamaForCausalLM.from_pretrained(path)
    made.model.layers[1].self_attn.q_proj.weight.data *= 0.2
    made.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(model):
    """Of each request the CPU's answer, and what it keeps of the prompt."""
    with engine(model, enforce_eager=True, **STOCK, **OURS) as llm:
        return {
            name: (alone(llm, request), llm.collective_rpc(kept_tokens.on_a_cpu)[0])
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
    """Each alone, decoded by replays of graphs; and the same tokens are kept."""
    before, (answer, kept) = served.replays(), expected[name]
    assert_same(served.drive([REQUESTS[name]])[0], answer, TOLERANCE)
    assert served.replays() - before == REQUESTS[name].tokens - 1
    if name not in KEEPING:
        return
    kept_tokens.assert_same(served.kept(), kept)
    exact = served.drive([Request(REQUESTS[name].prompt, REQUESTS[name].tokens, {"exact": True})])
    assert difference(answer, exact[0]) > 10 * TOLERANCE


def test_layers_that_look_wider_keep_more(served):
    served.drive([REQUESTS["entropykv"]])
    of_layers = [[len(head) for head in heads] for heads in served.kept()]
    assert all(first == second for first, second in of_layers)
    counts = [first for first, _ in of_layers]
    assert counts[1] > max(*counts[:1], *counts[2:])
    assert 4 * (4 * PAGE - 1) < sum(counts) <= 4 * 4 * PAGE


def test_a_crowd_of_different_requests(served, expected):
    """In company prompts are read beside steps that decode, and several end in one step."""
    crowd = [*REQUESTS]
    for names in (crowd[:4], crowd[4:8]):
        before = served.replays()
        answers = served.drive([REQUESTS[name] for name in names])
        for answer, name in zip(answers, names, strict=True):
            assert_same(answer, expected[name][0], TOLERANCE)
        assert served.replays() > before


def test_prefix_caching(served):
    """Keys of a prefix that others have read are there to be attended to; the last queries are the
    request's own. By all queries nothing is read from the cache."""
    text = prompt(6 * BLOCK, 50)
    own, every = (Request(text, 5, options) for options in ({}, by("entropykv")))
    expected = [served.drive([request])[0] for request in (own, every)]
    served.reset_prefix_cache()
    served.drive([Request(text, 1, by("streamingllm"), cache=True)])
    asked = [Request(text, 5, request.options, cache=True) for request in (own, every)]
    answers = [served.drive([request])[0] for request in asked]
    assert [answer.cached for answer in answers] == [5 * BLOCK, 0]
    for answer, wanted in zip(answers, expected, strict=True):
        assert_same(answer, wanted, TOLERANCE)


def test_preemption(served):
    """A request that is put back and resumed keeps tokens of a prompt that has all of its own."""
    crowd = [
        Request(prompt(251, 7), 16, {"exact": True}),
        Request(prompt(250, 8), 16, {"exact": True}),
        Request(prompt(230, 2), 14, {}),
    ]
    answers, preempted = served.drive_preempting(crowd)
    assert preempted == ["2"]
    expected = served.drive([Request(crowd[2].prompt, 14, {})])[0]
    served.assert_resumed(crowd[2], answers[2], expected, TOLERANCE)


def test_an_aborted_prompt_leaves_nothing(served, expected):
    """Its seat's next owner keeps tokens of its own prompt, and steps are replays again."""
    long = Request(prompt(300, 12), 4, {}, aborts=2)
    asked = REQUESTS["snapkv"]
    after = Request(asked.prompt, asked.tokens, asked.options, arrives=3)
    assert_same(served.drive([long, after])[1], expected["snapkv"][0], TOLERANCE)
    test_answers_are_those_of_the_cpu(served, expected, "snapkv")


def test_lists_are_those_of_the_specification(served):
    """At every step so far; and nothing was compiled while requests were served."""
    assert served.pool.submit(device_specification.lists).result() > 100
    late, early = served.launched_late()
    assert early > 3
    assert late == []


LAYERS, KV_HEADS = 4, 2
SLOTS = 5 * PAGE
"""Of a KV head, where the home is host memory: the largest budget, and less than some lists."""


@pytest.fixture(scope="module")
def far(model, expected):
    """The same engine, with the KV cache in host memory."""
    a_slot = STOCK["max_num_seqs"] * LAYERS * KV_HEADS * (2 * 2 * 64 + 8)
    options = OURS["additional_config"]["kv_retrieval"]
    options = options | {"home": "host", "recall_cache_bytes": SLOTS * a_slot}
    options["also"] = {name: by for name, by in options["also"].items() if name != "pyramid"}
    with device_engine.start() as pool:
        served = Served(pool)
        ours = OURS | {"additional_config": {"kv_retrieval": options}}
        served.open_engine(model, EMULATED | ours | {"num_gpu_blocks_override": 26})
        assert served.describe_workers()[0]["slots"] == SLOTS
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REQUESTS.keys() - {"pyramid"}))
def test_host_memory(far, expected, name):
    """Kept tokens are in slots once they have been attended to, and so are those of contexts within
    their budgets. The last tokens of some answers are read at home."""
    before, (answer, kept) = far.replays(), expected[name]
    assert_same(far.drive([REQUESTS[name]])[0], answer, TOLERANCE)
    assert far.replays() - before == REQUESTS[name].tokens - 1
    if name in KEEPING:
        kept_tokens.assert_same(far.kept(), kept)


@pytest.mark.slow
def test_host_memory_in_a_crowd(far, expected):
    """Seats change hands, prompts are read beside steps that decode, and prefixes are found."""
    names = ["snapkv", "entropykv", "within its budget", "exact"]
    for answer, name in zip(far.drive([REQUESTS[n] for n in names]), names, strict=True):
        assert_same(answer, expected[name][0], TOLERANCE)
    text = prompt(6 * BLOCK, 50)
    wanted, *_ = far.drive([Request(text, 5, {})])
    far.drive([Request(text, 1, by("streamingllm"), cache=True)])
    found, *_ = far.drive([Request(text, 5, {}, cache=True)])
    assert found.cached == 5 * BLOCK
    assert_same(found, wanted, TOLERANCE)
    late, early = far.launched_late()
    assert early > 3
    assert late == []


def test_drafts_change_nothing(model, served):
    """Which tokens are kept does not follow from queries that decode, so answers are those without
    drafts, whether these are right or wrong."""
    asked = [Request(REQUESTS[name].prompt, 12, by(name)) for name in ("snapkv", "entropykv")]
    expected = [served.drive([request])[0] for request in asked]
    texts = [r.prompt + answer.tokens for r, answer in zip(asked, expected, strict=True)]
    options = OURS["additional_config"]["kv_retrieval"]
    with opened(model, "device", options, attention_backend="snapkv") as drafting:
        for right in (0.0, 0.7):
            drafting.follow(texts, right, SEED)
            answers = drafting.drive(asked)
            for answer, wanted in zip(answers, expected, strict=True):
                assert_same(answer, wanted, TOLERANCE)
            steps = max(len({*answer.steps}) for answer in answers)
            assert (steps < 10) == (right > 0)
