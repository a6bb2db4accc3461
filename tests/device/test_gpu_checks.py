"""The checks of tests/gpu/test_engine.py find faults: in an emulated engine they pass, and fail
where a fault is planted in the ops of every layer and step (tests/support/device_faults.py)."""

import functools
from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.device.test_device_engine import STOCK, prompt
from tests.support import device_engine, engine_checks
from tests.support.device_faults import FAULTS
from tests.support.engine import Answer, random_llama
from tests.support.engine_checks import Case

pytestmark = pytest.mark.engine

PAGE, BUDGET = 16, 1024
CASE = Case([prompt(330, 1), prompt(260, 2), prompt(33, 3)], [2], 4, {"budget": 192})
OPTIONS = {"page_size": PAGE, "sink": PAGE, "window": 2 * PAGE, "budget": BUDGET}
ENGINE = STOCK | {
    "attention_backend": "freekv",
    "block_size": 2 * PAGE,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
    },
    "num_gpu_blocks_override": 40,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("toy"), layers=3, kv_heads=2)


@pytest.fixture(scope="module")
def stock(model):
    """What transformers' model answers, in place of stock vLLM."""
    judge, answers = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), []
    for asked in CASE.prompts:
        ids, answer = torch.tensor([asked]), Answer()
        for _ in range(CASE.tokens):
            with torch.no_grad():
                logprobs = judge(ids).logits[0, -1].log_softmax(-1)
            best = logprobs.topk(engine_checks.LIKELIEST)
            answer.choices.append(
                dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            )
            answer.tokens.append(int(best.indices[0]))
            answer.logprobs.append(float(best.values[0]))
            ids = torch.cat([ids, best.indices[None, :1]], 1)
        answers.append(answer)
    return answers


class Emulated:
    """See :class:`tests.support.engine_checks.Engine`."""

    def __init__(self, pool):
        self.pool = pool

    def __getattr__(self, function):
        """A function of ``tests/support/device_engine.py``, to be called in its process."""
        return lambda *args: self.pool.submit(getattr(device_engine, function), *args).result()


HOMES = "device", "host"
QUICK = {
    "device": (
        "nothing selected ahead",
        "another seat's list",
        "index never updated",
        "dropped merge",
    ),
    "host": ("recall into a wrong slot", "missing units not read at home", "tail not written"),
}
"""Faults of each kind; the others are like one of these."""
PLANTED = [
    pytest.param(
        home, name, marks=() if name in QUICK[home] else pytest.mark.slow, id=f"{home} {name}"
    )
    for home in HOMES
    for name, fault in FAULTS.items()
    if home in fault.homes
]


@pytest.fixture(scope="module")
def engines(model):
    """Emulated engines by their homes, each started when it is asked for, and the answers of the
    specification."""
    with ExitStack() as opened:

        @functools.cache
        def of(home):
            served = Emulated(opened.enter_context(device_engine.start()))
            own = {} if home == "device" else {"home": home}
            served.open_engine(
                model, ENGINE | {"additional_config": {"kv_retrieval": OPTIONS | own}}
            )
            return served, engine_checks.specified(served, CASE)

        yield of


@pytest.mark.slow  # test_device_engine.py and test_device_home.py compare such answers, too
@pytest.mark.parametrize("home", HOMES)
def test_whole_contexts(engines, stock, home):
    engine_checks.whole_contexts(engines(home)[0], CASE, stock)


@pytest.mark.parametrize("home", HOMES)
def test_selections(engines, stock, home):
    engine, expected = engines(home)
    outcome = engine_checks.run(engine, CASE)
    engine_checks.check_layer(outcome)
    engine_checks.check_answers(outcome, CASE, expected, stock)
    compared = ("lists", "attention", "records", *(["units"] if home == "host" else []))
    assert all(outcome.layer[name] > 20 for name in compared)


@pytest.mark.parametrize(("home", "name"), PLANTED)
def test_planted(engines, stock, home, name):
    """The checks find what a fault does to a layer, and to answers."""
    (engine, expected), fault = engines(home), FAULTS[name]
    engine.plant(name)
    try:
        outcome = engine_checks.run(engine, CASE)
    finally:
        engine.plant(None)
    if fault.layer:
        with pytest.raises(AssertionError, match="not as specified") as found:
            engine_checks.check_layer(outcome)
        assert all(wrong in str(found.value) for wrong in fault.layer)
    if fault.answers:
        with pytest.raises(AssertionError):
            engine_checks.check_answers(outcome, CASE, expected, stock)
