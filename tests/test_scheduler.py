"""Which blocks of the prefix cache requests share; vLLM's own scheduler, no model."""

import pytest

from tests.scheduling import BLOCK, Stepper

pytestmark = pytest.mark.model
BUDGET = 128


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [(seed + 3 * i) % 499 for i in range(tokens)]


@pytest.fixture(scope="module")
def stepper():
    return Stepper({"budget": BUDGET, "max_budget": 1024})


def test_exact_requests_share_no_decoded_blocks(stepper):
    first = prompt(900)
    answer, _ = stepper.ask(first, 300)
    chat = first + answer + prompt(20, 5)
    full = 900 // BLOCK * BLOCK
    assert stepper.ask(chat, 4, {"exact": True})[1] == full
    assert stepper.ask(chat, 4, {"exact": True})[1] == len(chat) // BLOCK * BLOCK
