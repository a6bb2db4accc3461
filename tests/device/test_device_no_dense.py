"""A GPU's engine, emulated, all of whose layers retrieve; see ``support/device_engine.py``."""

from typing import Any

import pytest

from tests.device.test_device_engine import EMULATED, PAGE, STOCK, TOLERANCE, Served, prompt
from tests.support import device_engine
from tests.support.engine import Request, alone, assert_same, difference, engine, random_llama

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {
    "page_size": PAGE,
    "sink": PAGE,
    "window": 2 * PAGE,
    "budget": 6 * PAGE,
    "dense_layers": 0,
}
REQUESTS = [
    Request(prompt(200, 15), 8, {"correction_threshold": -1.0}),
    Request(prompt(180, 13), 6, {}),
    Request(prompt(90, 17), 12, {}),
]


def ours(**options: Any) -> dict[str, Any]:
    """An engine's options, with these of retrieval."""
    return {
        "attention_backend": "freekv",
        "additional_config": {"kv_retrieval": OPTIONS | options},
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("toy") / "model", layers=2, kv_heads=2)


@pytest.fixture(scope="module")
def expected(model):
    """The CPU's answers to requests that come alone; and one where the first layer is dense."""
    with engine(model, enforce_eager=True, **STOCK, **ours()) as llm:
        answers = [alone(llm, request) for request in REQUESTS]
    with engine(model, enforce_eager=True, **STOCK, **ours(dense_layers=1)) as llm:
        return answers, alone(llm, REQUESTS[0])


@pytest.mark.parametrize("home", ["device", "host"])
def test_answers_are_those_of_the_cpu(model, expected, home):
    """Together, by replays of graphs; with work beside the model from the first layer on."""
    answers, dense = expected
    assert difference(answers[0], dense) > 10 * TOLERANCE
    with device_engine.start() as pool:
        served = Served(pool)
        served.open_engine(model, EMULATED | ours(home=home) | {"num_gpu_blocks_override": 26})
        retrieving = [f"model.layers.{number}.self_attn.attn" for number in range(2)]
        assert served.describe()["retrieving"] == retrieving
        for answer, wanted in zip(served.drive(REQUESTS), answers, strict=True):
            assert_same(answer, wanted, TOLERANCE)
        assert served.idle()
        assert served.replays() > 10
