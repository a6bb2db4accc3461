"""KV heads that select different numbers of pages in a GPU's engine, emulated, by shares or up to a
mass of the attention, and budgets by the lengths of prompts; see ``support/device_engine.py``."""

from dataclasses import replace
from typing import Any

import pytest

from tests.device.test_device_engine import EMULATED, PAGE, STOCK, TOLERANCE, Served, prompt
from tests.support import device_engine
from tests.support.engine import Request, alone, assert_same, by, difference, engine, random_llama

pytestmark = pytest.mark.engine

NARROW = {"preset": "quest", "pooling": "mean_softmax", "mass": 0.6}
OURS: dict[str, Any] = {
    "attention_backend": "freekv",
    "additional_config": {
        "kv_retrieval": {
            "page_size": PAGE,
            "sink": PAGE,
            "window": 2 * PAGE,
            "budget": 6 * PAGE,
            "max_budget": 10 * PAGE,
            "memory_fraction": 0.6,
            "budget_shares": [[0, 2], [1.5, 0.5], [1, 4]],
            "also": {"quest": {}, "narrow": NARROW},
        }
    },
}
REQUESTS = {
    "by its prompt": Request(prompt(200, 51), 6, {}),
    "by its own": Request(prompt(170, 52), 6, {"budget": 5 * PAGE}),
    "at every step": Request(prompt(180, 53), 5, {"correction_threshold": 1.0}),
    "evenly": Request(prompt(190, 54), 5, by("quest")),
    "up to a mass": Request(prompt(175, 56), 5, by("narrow")),
    "soon beyond": Request(prompt(78, 55), 6, {"budget": 5 * PAGE}),
}


def test_answers_are_those_of_the_cpu(tmp_path):
    """Alone and eagerly, and in a crowd by replays of graphs."""
    model = random_llama(tmp_path / "model", layers=4, kv_heads=2)
    with engine(model, enforce_eager=True, **STOCK, **OURS) as llm:
        expected = [alone(llm, request) for request in REQUESTS.values()]
    with device_engine.start() as pool:
        served = Served(pool)
        served.open_engine(model, EMULATED | OURS | {"num_gpu_blocks_override": 38})
        served.replay(False)
        own = REQUESTS["by its prompt"]
        assert_same(served.drive([own])[0], expected[0], TOLERANCE)
        even = served.drive([Request(own.prompt, own.tokens, by("quest"))])[0]
        assert difference(even, expected[0]) > 10 * TOLERANCE
        wide = served.drive([replace(REQUESTS["up to a mass"], options=by("quest"))])[0]
        assert difference(wide, expected[4]) > 10 * TOLERANCE
        served.replay(True)
        for answer, wanted in zip(served.drive([*REQUESTS.values()]), expected, strict=True):
            assert_same(answer, wanted, TOLERANCE)
        late, _ = served.launched_late()
        assert late == []
