"""vLLM's V1 and V2 model runners serve the same answers, to the last bit.

Both engines run in one process (``tests/runners.py``), over small random models. A cache that is
too small for three long requests lets one of them be preempted.
"""

from typing import Any

import pytest

from tests import device_models, runners
from tests.engine import Request, by, prompt, random_llama

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {
    "attention_backend": "freekv",
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "num_gpu_blocks_override": 26,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}
BUDGET = {"budget": 128, "sink": 32, "window": 32}
FILE = BUDGET | {"also": ["quest"], "home": "disk"}
HOUSES: dict[str, dict[str, Any]] = {
    "memory": BUDGET | {"also": ["kvretrieval", "quest", "streamingllm", "snapkv"]},
    "file": FILE,
    "encoded": FILE | {"codec": "k8v4", "streaming_attention": True},
    "sliding windows": BUDGET | {"also": ["kvretrieval", "snapkv"]},
}
BLOCKS = {"sliding windows": 40}
"""Of a cache whose kinds of layers have their own blocks. Nobody is preempted there: with room for
one request of the greatest length there is room for three of the long ones."""
SLOW = pytest.mark.slow


def crowd(methods):
    """Prompts in chunks beside requests that decode; one is aborted, and one waits for a seat."""
    return [
        Request(prompt(200), 10, {}, cache=True),
        Request(prompt(90), 12, {}),
        Request(prompt(330), 6, {"correction_threshold": 1.0}, arrives=1),
        Request(prompt(250), 9, {}, arrives=2, aborts=9),
        *(
            Request(prompt(180 + number), 6, by(method), arrives=3 + number)
            for number, method in enumerate(methods)
        ),
        Request(prompt(260), 5, {"exact": True}, arrives=5),
    ]


def again():
    """Requests with a beginning that is in the prefix cache."""
    return [
        Request(prompt(200), 8, {}, cache=True),
        Request(prompt(200), 6, {}, arrives=3, cache=True),
        Request(prompt(200)[:130] + prompt(60), 6, {}, arrives=4, cache=True),
    ]


def outgrowing():
    """Three requests that outgrow the cache."""
    return [Request(prompt(n), 20, {}) for n in (250, 249, 248)]


class Served:
    """What an engine has answered, by its model runner."""

    def __init__(self, pool, model, house):
        self.pool, self.house, methods = pool, house, HOUSES[house]["also"]
        options = OPTIONS | {"additional_config": {"kv_retrieval": HOUSES[house]}}
        options["num_gpu_blocks_override"] = BLOCKS.get(house, OPTIONS["num_gpu_blocks_override"])
        self.modules, self.answers = {}, {}
        for runner in ("v1", "v2"):
            self._call(runners.open_engine, runner, model, options)
            (worker,) = self._call(runners.describe)
            self.modules[runner] = worker["runner"]
            self.answers[runner] = {
                "crowd": self._call(runners.drive, crowd(methods)),
                "idle": self._call(runners.idle),
                "again": self._call(runners.drive, again()),
                "outgrowing": self._call(runners.drive_preempting, outgrowing()),
                "session": self._call(
                    runners.converse, [prompt(200), prompt(100), prompt(1)], 6, {}
                ),
                "left": self._call(runners.left),
                "counted": self._call(runners.counted, Request(prompt(250), 9, {})),
            }
            self._call(runners.close_engine)

    def _call(self, function, *args):
        return self.pool.submit(function, *args).result()


def model_of(house, path):
    """A model for an engine, saved at a path: a small Llama, or Gemma 3."""
    if house == "sliding windows":
        device_models.make(device_models.windows, path)
        return str(path)
    return random_llama(path, layers=3, kv_heads=2)


@pytest.fixture(scope="module")
def pool():
    with runners.start() as pool:
        yield pool


@pytest.fixture(
    scope="module", params=["memory", "file", *(pytest.param(h, marks=SLOW) for h in [*HOUSES][2:])]
)
def served(request, pool, tmp_path_factory):
    model = model_of(request.param, tmp_path_factory.mktemp("toy") / "model")
    return Served(pool, model, request.param)


def test_both_runners_have_served(served):
    assert served.modules == {
        "v1": "vllm.v1.worker.cpu_model_runner",
        "v2": "vllm.v1.worker.cpu.model_runner",
    }


@pytest.mark.parametrize("part", ["crowd", "again", "outgrowing", "session"])
def test_answers_do_not_depend_on_the_runner(served, part):
    """Batches with chunks of prompts, prefix hits, a preempted request, and a session."""
    first, second = (served.answers[runner][part] for runner in ("v1", "v2"))
    assert first == second


def test_the_parts_are_what_they_are_meant_to_be(served):
    answers = served.answers["v2"]
    assert answers["idle"]
    # Of a shorter beginning the blocks of a sliding window are gone.
    shorter = 0 if served.house == "sliding windows" else 128
    assert [answer.cached for answer in answers["again"][1:]] == [192, shorter]
    _, preempted = answers["outgrowing"]
    assert bool(preempted) == (served.house not in BLOCKS)
    assert len(answers["session"]) == 3
    assert answers["left"] <= 1, "no request has kept its seat"


def test_counts_of_workers_arrive_with_their_outputs(served):
    """But for those that our connector brings."""
    first, second = (served.answers[runner]["counted"] for runner in ("v1", "v2"))
    assert first == second
    assert bool(first.get("heads_decoded")) == (HOUSES[served.house].get("home") != "disk")
