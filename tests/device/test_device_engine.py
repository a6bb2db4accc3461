"""The engine as it is on a GPU, emulated: vLLM's V2 model runner, its scheduler, our kernels.

One engine for the whole module, with a cache too small for three long requests; see
``support/device_engine.py``. Its model is random, and computes in float16, which rounds less than
bfloat16. Its steps of single tokens are replays of graphs, or eager.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.support import device_engine
from tests.support.device_engine import BOTH, SELECTIONS, WHOLE
from tests.support.engine import (
    Request,
    alone,
    assert_same,
    by,
    difference,
    drive,
    engine,
    random_llama,
)

pytestmark = pytest.mark.engine

PAGE, BLOCK, BUDGET = 16, 32, 96
CHUNK = 128  # tokens per step
STOCK: dict[str, Any] = {
    "dtype": "float16",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
}
RETRIEVAL: dict[str, Any] = {
    "attention_backend": "freekv",
    "additional_config": {
        "kv_retrieval": {
            "page_size": PAGE,
            "sink": PAGE,
            "window": 2 * PAGE,
            "budget": BUDGET,
            "also": {
                "quest": {},
                "streamingllm": {},
                "shadowkv": {},
                "by scores": {"preset": "shadowkv", "outliers": 0},
            },
        }
    },
}
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4],
}
EMULATED = STOCK | {
    "block_size": BLOCK,
    "max_num_batched_tokens": CHUNK,
    "compilation_config": GRAPHS,
}
TOLERANCE = 0.02
"""The tolerance of log-probs, whose sums differ in float16. Retrieval changes them by far more."""


def prompt(tokens: int, seed: int) -> list[int]:
    """Token ids without meaning."""
    state, ids = 2 * seed + 1, []
    for _ in range(tokens):
        state = state * 6364136223846793005 % 2**64
        ids.append((state >> 40) % 512)
    return ids


# Of these prompts no answer has a token that is nearly as likely as the one chosen.
SHORT = Request(prompt(70, 17), 12, {})
EXACT = Request(prompt(200, 15), 8, {"exact": True})
SPARSE = {
    "freekv": Request(EXACT.prompt, 8, {"correction_threshold": -1.0}),
    "quest": Request(prompt(260, 18), 8, by("quest")),
    "streamingllm": Request(prompt(150, 23), 6, by("streamingllm")),
    "shadowkv": Request(prompt(220, 19), 8, by("shadowkv")),
    "at every step": Request(prompt(180, 13), 8, {"correction_threshold": 1.0, "budget": 80}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("toy") / "model", layers=3, kv_heads=2)


@pytest.fixture(scope="module")
def expected(model):
    """The answers of vLLM without retrieval, and those of our engine on the CPU."""
    answers = {}
    with engine(model, enforce_eager=True, **STOCK) as llm:
        for name, request in (("short", SHORT), ("exact", EXACT)):
            answers[name] = drive(llm, [Request(request.prompt, request.tokens)])[0]
    with engine(model, enforce_eager=True, **STOCK, **RETRIEVAL) as llm:
        for name, request in SPARSE.items():
            answers[name] = alone(llm, request)
    return answers


class Served:
    """The emulated engine, in its process, with the home of its cache."""

    def __init__(self, pool, home="device"):
        self.pool, self.home = pool, home
        self._eager = {}

    def replays(self):
        """How many steps have been replays of a graph."""
        return sum(self.replays_by_rows().values())

    def __getattr__(self, function):
        """A function of ``tests/support/device_engine.py``, to be called in that process."""
        return lambda *args: self.pool.submit(getattr(device_engine, function), *args).result()

    def eager(self, name):
        """The answer to one of ``SPARSE`` that has the engine for itself, without graphs."""
        if name not in self._eager:
            self.replay(False)
            self._eager[name] = self.drive([SPARSE[name]])[0]
            self.replay(True)
        return self._eager[name]


@pytest.fixture(scope="module")
def served(model, expected):
    with device_engine.start() as pool:
        served = Served(pool)
        served.open_engine(
            model,
            {
                **EMULATED,
                **RETRIEVAL,
                "num_gpu_blocks_override": 26,  # one of them vLLM's own
            },
        )
        yield served


def test_everything_is_as_on_a_gpu(served):
    """No part of the CPU's engine is in use."""
    assert served.describe() == {
        "runner": "DeviceRunner",
        "scheduler": "RetrievalAsyncScheduler",
        "state": "DefaultModelState",
        "builders": ["RetrievalMetadataBuilder"],
        "retrieving": ["model.layers.1.self_attn.attn", "model.layers.2.self_attn.attn"],
        "block": BLOCK,
        "blocks": [PAGE],
        "graphs": [1, 2, 4],
    }


# ------------------------------------------------------------------------ against stock vLLM


def test_within_the_budget_answers_are_those_of_stock_vllm(served, expected):
    before = served.replays()
    assert_same(served.drive([SHORT])[0], expected["short"], TOLERANCE)
    assert served.replays() - before == SHORT.tokens - 1, "all steps but that of the prompt"


def test_exact_requests_get_the_answers_of_stock_vllm(served, expected):
    assert_same(served.drive([EXACT])[0], expected["exact"], TOLERANCE)
    assert difference(expected["exact"], expected["freekv"]) > 10 * TOLERANCE


def test_short_contexts_get_the_answers_of_stock_vllm(served, expected):
    """Contexts beyond the budget are attended to in full up to a length; from there on heads select
    anew, in replays of the same graphs."""
    whole, grows = expected["exact"], len(EXACT.prompt) + 4
    asked, before = Request(EXACT.prompt, EXACT.tokens, {}), served.replays()
    sparse = served.sparse_steps()
    try:
        served.exact_below(grows + EXACT.tokens)
        assert_same(served.drive([asked])[0], whole, TOLERANCE)
        assert served.sparse_steps() == sparse
        served.exact_below(grows)
        answer = served.drive([asked])[0]
        assert sum(served.corrected_by(asked)) >= 2 * 2
    finally:
        served.exact_below(0)
    assert served.replays() - before == 3 * (EXACT.tokens - 1)
    assert answer.logprobs[:4] == pytest.approx(whole.logprobs[:4], abs=TOLERANCE)
    assert difference(answer, whole) > 10 * TOLERANCE


# ------------------------------------------------------------------------- against the CPU's


@pytest.mark.parametrize("name", SPARSE)
def test_answers_are_those_of_the_cpu(served, expected, name):
    """Another model runner, other kernels, other layouts; the same algorithms."""
    assert_same(served.eager(name), expected[name], TOLERANCE)


def test_outliers_are_attended_to(served, expected):
    """Without them other pages are."""
    request = replace(SPARSE["shadowkv"], options=by("by scores"))
    assert difference(served.drive([request])[0], expected["shadowkv"]) > 10 * TOLERANCE


# --------------------------------------------------------------------------- batches of many


def test_a_crowd_of_different_requests(served):
    """In company, and in replays of graphs, requests get what they get alone and eagerly.

    Prompts are read in chunks beside decoding neighbours, batches of three are padded to four, and
    requests leave from the middle of a batch.
    """
    crowd = [
        Request(r.prompt, r.tokens, r.options, arrives=2 * i) for i, r in enumerate(SPARSE.values())
    ]
    before, _ = served.replays_by_rows(), served.graphs_taken()
    answers = served.drive(crowd)
    for answer, name in zip(answers, SPARSE, strict=True):
        assert_same(answer, served.eager(name), TOLERANCE)
    after = served.replays_by_rows()
    assert all(after[rows] > before[rows] for rows in (1, 2, 4))
    assert set(served.graphs_taken()) == {SELECTIONS}


def test_graphs_with_one_half_of_attention(served):
    """A step takes one if all of its rows need the same half, and no other step does: requests
    beyond their budgets, within them and soon beyond them, exact ones, and the last token of a
    prompt."""
    crowd = [
        Request(SPARSE["quest"].prompt, 14, by("quest")),
        Request(SHORT.prompt, 5, {}, arrives=3),
        Request(EXACT.prompt, 4, {"exact": True}, arrives=8),
        Request(prompt(BUDGET - 2, 31), 6, {}, arrives=8),
        Request(prompt(CHUNK + 1, 6), 2, {"exact": True}, arrives=14),
    ]
    served.drive(crowd[:1])
    served.graphs_taken()
    answers = served.drive(crowd)
    taken = served.graphs_taken()
    assert set(taken) == {SELECTIONS, WHOLE, BOTH}
    alone = [served.drive([replace(request, arrives=0)])[0] for request in crowd]
    for answer, other in zip(answers, alone, strict=True):
        assert_same(answer, other, TOLERANCE)


def test_a_prompts_last_token_alone_is_prefill(served):
    """This holds even if vLLM replays a graph of decode steps for it."""
    text = prompt(CHUNK + 1, 6)
    before = served.replays()
    little, exact = (
        served.drive([Request(text, 2, options)])[0]
        for options in (by("streamingllm"), {"exact": True})
    )
    assert served.replays() - before == 4, "the tail, and the step that decodes"
    assert little.steps[0] == 2, "the last chunk was a step of its own; answers come a step late"
    assert little.logprobs[0] == exact.logprobs[0]
    assert abs(little.logprobs[1] - exact.logprobs[1]) > TOLERANCE, "the next step decodes"


def test_a_seats_next_owner_starts_afresh(served):
    """This holds even if its context is one token longer than the last one of the seat's owner
    before."""
    first = Request(prompt(150, 7), 4, {"correction_threshold": -1})
    reached = 150 + 4 - 1  # tokens in the context at its last step
    second = Request(prompt(reached, 8), 4, {"correction_threshold": -1})
    by_first, by_second = (served.corrected_by(request) for request in (first, second))
    assert sorted(by_first) == [0, 0, 0, 2 * 2], "at its first decode step, and never again"
    assert by_second == by_first, "the same seat, and the same there"


# ---------------------------------------------------- prefix caching, abortion, and preemption


def test_prefix_caching(served):
    """Requests attend to pages that others have written, also by other methods."""
    name = "freekv"
    document = SPARSE[name]
    served.reset_prefix_cache()
    writer = Request(document.prompt + prompt(20, 9), 2, by("streamingllm"), cache=True)
    assert served.drive([writer])[0].cached == 0
    again = Request(document.prompt, document.tokens, document.options, cache=True)
    beside = Request(document.prompt, 3, by("quest"), cache=True)
    answer, other = served.drive([again, beside])
    assert answer.cached == other.cached == len(document.prompt) // BLOCK * BLOCK
    assert_same(answer, served.eager(name), TOLERANCE)


def test_exact_answers_do_not_depend_on_what_was_decoded_before(served):
    """Block 4 of the chat holds decoded tokens, and so does the end of block 3."""
    served.reset_prefix_cache()
    first = Request(prompt(120, 9), 42, {}, cache=True)
    chat = first.prompt + served.drive([first])[0].tokens + prompt(10, 11)
    ordinary = Request(chat, 1, {}, cache=True)
    exact = [Request(chat, 4, {"exact": True}, cache=cache) for cache in (True, False)]
    assert served.drive([ordinary])[0].cached == 5 * BLOCK
    answer, expected = (served.drive([request])[0] for request in exact)
    assert answer.cached == 3 * BLOCK
    assert_same(answer, expected, TOLERANCE)


def test_abortion(served):
    """One request is aborted in its prefill, one while it decodes; their seats are taken again."""
    crowd = [
        SPARSE["freekv"],
        Request(prompt(120, 10), 20, {}, aborts=5),
        Request(prompt(400, 11), 20, {}, arrives=2, aborts=4),
        Request(SPARSE["quest"].prompt, 5, SPARSE["quest"].options, arrives=6),
    ]
    answers = served.drive(crowd)
    assert 0 < len(answers[1].tokens) < 20
    assert answers[2].tokens == []
    assert_same(answers[0], served.eager("freekv"), TOLERANCE)
    expected = served.eager("quest")
    assert answers[3].tokens == expected.tokens[:5]
    assert answers[3].logprobs == pytest.approx(expected.logprobs[:5], abs=TOLERANCE)


def test_preemption(served):
    """Three requests outgrow the cache; the last one is put back and resumed.

    Resumption computes the tokens generated so far again, as a prompt: from there on the request is
    to answer as a new one would that has them in its prompt.
    """
    # 8 of the 25 blocks each, and soon 9 for the first two.
    crowd = [
        Request(prompt(251, 7), 16, {"exact": True}),
        Request(prompt(250, 8), 16, {"exact": True}),
        Request(prompt(230, 2), 14, {}),
    ]
    answers, preempted = served.drive_preempting(crowd)
    assert preempted == ["2"]
    expected = served.drive([Request(crowd[2].prompt, 14, {})])[0]
    served.assert_resumed(crowd[2], answers[2], expected, TOLERANCE)


def test_nothing_is_compiled_while_serving(served):
    """Warm-up has launched all kernels that these requests launch. Eager steps have any three
    rows."""
    served.replay(False)
    served.drive([Request(prompt(110, seed), 3, {}, arrives=seed) for seed in range(3)])
    served.replay(True)
    late, early = served.launched_late()
    assert early > 10
    assert late == []
