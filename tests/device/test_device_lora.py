"""Adapters (LoRA) in a GPU's engine, emulated: requests of two of them in one batch.

vLLM's layers apply them, by its implementation for the CPU; see ``support/device_engine.py``. It
takes requests without an adapter for some of the last one where they are beside others, so such a
request comes alone here; and it has no padding of batches.
"""

from dataclasses import replace

import pytest

from tests.device.test_device_engine import (
    EMULATED,
    GRAPHS,
    RETRIEVAL,
    STOCK,
    TOLERANCE,
    Served,
    model,  # noqa: F401
    prompt,
)
from tests.support import device_engine
from tests.support.adapters import random_lora
from tests.support.engine import Request, assert_same, by, difference, drive, engine

pytestmark = pytest.mark.engine

UNPADDED = GRAPHS | {"cudagraph_capture_sizes": [1, 2, 3, 4]}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
WHOLE = {
    "within the budget": Request(prompt(70, 17), 6, {}),
    "exact": Request(prompt(150, 18), 6, {"exact": True}),
}
SPARSE = {
    "freekv": Request(prompt(150, 18), 6, {}),
    "quest": Request(prompt(180, 19), 6, by("quest")),
}
REQUESTS = WHOLE | SPARSE


@pytest.fixture(scope="module")
def requests(tmp_path_factory, model):  # noqa: F811
    """The requests by name, each with one of two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    first, second = (random_lora(model, folder / str(number), number) for number in (1, 2))
    adapters = dict(zip(REQUESTS, (second, first, first, second), strict=True))
    return {name: replace(r, lora=adapters[name]) for name, r in REQUESTS.items()}


@pytest.fixture(scope="module")
def expected(model, requests):  # noqa: F811
    """The answers of vLLM without retrieval, and those of our engine on the CPU."""
    answers = {}
    with engine(model, enforce_eager=True, **STOCK, **LORA) as llm:
        for name in WHOLE:
            answers[name] = drive(llm, [replace(requests[name], options=None)])[0]
    with engine(model, enforce_eager=True, **STOCK, **RETRIEVAL, **LORA) as llm:
        for name in SPARSE:
            answers[name] = drive(llm, [requests[name]])[0]
        answers["without"] = drive(llm, [SPARSE["freekv"]])[0]
    return answers


@pytest.fixture(scope="module")
def served(model, expected):  # noqa: F811
    with device_engine.start() as pool:
        served = Served(pool)
        served.open_engine(
            model,
            {
                **EMULATED,
                **RETRIEVAL,
                **LORA,
                "num_gpu_blocks_override": 64,
                "compilation_config": UNPADDED,
            },
        )
        yield served


def test_adapters(served, requests, expected):
    """In company, answers are those of stock vLLM and of the CPU, each with its own adapter."""
    crowd = [replace(r, arrives=2 * number) for number, r in enumerate(requests.values())]
    answers = dict(zip(requests, served.drive(crowd), strict=True))
    answers["without"] = served.drive([SPARSE["freekv"]])[0]
    for name, answer in answers.items():
        assert_same(answer, expected[name], TOLERANCE)
    assert difference(answers["exact"], answers["freekv"]) > 10 * TOLERANCE, "retrieval counts"
    assert difference(answers["without"], answers["freekv"]) > 10 * TOLERANCE, "adapters count"
    assert served.replays() > 10
