"""Presets that select pages, with each home that serves them, in a GPU's engine, emulated.

Those that other modules do not hold against the CPU path; see ``support/device_engine.py``.
"""

from typing import Any

import pytest

from tests.device.test_device_engine import EMULATED, PAGE, STOCK, TOLERANCE, Served, prompt
from tests.support import device_engine
from tests.support.engine import (
    Request,
    alone,
    assert_same,
    by,
    difference,
    engine,
    model_of,
    random_llama,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPTIONS: dict[str, Any] = {
    "page_size": PAGE,
    "sink": PAGE,
    "window": 2 * PAGE,
    "budget": 6 * PAGE,
    "dense_layers": 1,
}
SERVED = {
    "device": ("arkvale", "infllm", "oracle"),
    "host": ("arkvale", "infllm", "shadowkv", "streamingllm"),
}
"""Presets by home."""
NAMES = sorted({name for names in SERVED.values() for name in names})
LONG, SHORT = prompt(230, 18), prompt(90, 17)


def options(home, names):
    given = OPTIONS | {"home": home, "also": list(names)}
    return {"attention_backend": "freekv", "additional_config": {"kv_retrieval": given}}


def requests(names):
    """Of each preset, contexts beyond the budget, and soon beyond it."""
    return [Request(text, 8, by(name)) for name in names for text in (LONG, SHORT)]


model = model_of(random_llama, 3, 2)


@pytest.fixture(scope="module")
def expected(model):
    """By preset, and the exact answers."""
    asked = [*requests(NAMES), *(Request(text, 8, {"exact": True}) for text in (LONG, SHORT))]
    with engine(model, enforce_eager=True, **STOCK, **options("device", NAMES)) as llm:
        answers = [alone(llm, request) for request in asked]
    pairs = zip(answers[::2], answers[1::2], strict=True)
    return dict(zip([*NAMES, "exact"], pairs, strict=True))


@pytest.mark.parametrize("home", SERVED)
def test_answers_are_those_of_the_cpu(model, expected, home):
    """Four at a time, by replays of graphs."""
    names = SERVED[home]
    with device_engine.start() as pool:
        served = Served(pool)
        served.open_engine(model, EMULATED | options(home, names) | {"num_gpu_blocks_override": 40})
        for first in range(0, len(names), 2):
            two, before = names[first : first + 2], served.replays()
            answers = served.drive(requests(two))
            assert served.replays() > before
            for number, name in enumerate(two):
                for answer, wanted in zip(answers[2 * number :], expected[name], strict=False):
                    assert_same(answer, wanted, TOLERANCE)
                if name != "oracle":
                    assert difference(answers[2 * number], expected["exact"][0]) > TOLERANCE
