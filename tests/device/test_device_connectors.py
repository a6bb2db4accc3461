"""KV that a connector loads into a GPU's engine; see ``support/device_engine.py``.

The engine stores what it computes by vLLM's example of a connector, and loads it when the cache has
been filled with other texts: at once, or a step late, up to within a page.
"""

from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.device.test_device_engine import (
    EMULATED,
    GRAPHS,
    PAGE,
    RETRIEVAL,
    TOLERANCE,
    Served,
    prompt,
)
from tests.support import device_engine
from tests.support.engine import Request, assert_same, by, random_llama

pytestmark = pytest.mark.engine
SLOW = pytest.mark.slow

EVERY_STEP: dict[str, dict[str, Any]] = {
    "freekv": {"correction_threshold": 1.0},
    "quest": by("quest"),
    "shadowkv": by("shadowkv"),
}
DOCUMENTS = {
    name: Request(prompt(123, seed), 6, options, cache=True)
    for seed, (name, options) in enumerate(EVERY_STEP.items(), 60)
}
"""Beyond the budget; the example stores what the first chunk of a prompt has computed."""
STORED = 112
"""Tokens of each that are stored: whole blocks before the last token."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    (folder / "stored").mkdir()
    model = random_llama(folder / "model", layers=3, kv_heads=2)
    told = {"shared_storage_path": str(folder / "stored"), "kv_retrieval_layout": "rows"}
    transfer = KVTransferConfig(
        kv_connector="LateConnector",
        kv_role="kv_both",
        kv_connector_extra_config=told,
        kv_connector_module_path="tests.support.late_connector",
    )
    options = EMULATED | RETRIEVAL | {"compilation_config": GRAPHS, "block_size": PAGE}
    options |= {"kv_transfer_config": transfer, "num_gpu_blocks_override": 52}
    with device_engine.start() as pool:
        served = Served(pool)
        served.open_engine(model, options)
        yield served


@pytest.fixture(scope="module")
def computed(served):
    """The answers before anything is loaded."""
    answers = {name: served.drive([request])[0] for name, request in DOCUMENTS.items()}
    assert [answer.cached for answer in answers.values()] == [0, 0, 0]
    return answers


def forget(served):
    """Let others' texts fill the cache and its index."""
    served.drive([Request(prompt(400, seed), 2, {}) for seed in (90, 91)])
    served.reset_prefix_cache()


@pytest.mark.parametrize(
    ("late", "short"), [(False, 5), *(pytest.param(of, 0, marks=SLOW) for of in (False, True))]
)
def test_answers_are_those_of_computed_keys(served, computed, late, short):
    """Of requests alone, and of one that finds in the prefix cache what another one has loaded."""
    served.load(late, short)
    for name, request in DOCUMENTS.items():
        forget(served)
        answer = served.drive([request])[0]
        assert answer.cached == STORED - short
        assert_same(answer, computed[name], TOLERANCE)
        again = served.drive([request])[0]
        assert again.cached == STORED
        assert_same(again, computed[name], TOLERANCE)


def test_a_crowd(served, computed):
    """Loads come while others decode, whose steps are replays of graphs."""
    served.load(False, 0)
    forget(served)
    before = served.replays()
    crowd = [Request(r.prompt, r.tokens, r.options, arrives=n, cache=True)
             for n, r in enumerate(DOCUMENTS.values())]  # fmt: skip
    for answer, name in zip(served.drive(crowd), DOCUMENTS, strict=True):
        assert answer.cached == STORED
        assert_same(answer, computed[name], TOLERANCE)
    assert served.replays() > before
    late, early = served.launched_late()
    assert early > 3
    assert late == []
