"""Methods that do not select pages in a GPU's engine, emulated; see ``support/device_engine.py``.

``fier`` selects single tokens in every layer, ``omnikv`` in filter layers for those after them,
with the KV cache on the device or in host memory. Of ``razor`` some KV heads attend to everything.
"""

from typing import Any

import pytest

from tests.device.test_device_engine import EMULATED, PAGE, STOCK, TOLERANCE, Served, prompt
from tests.support import device_engine
from tests.support.engine import Request, alone, assert_same, by, difference, engine, random_llama

pytestmark = pytest.mark.engine

OPTIONS = {"page_size": PAGE, "sink": PAGE, "window": PAGE, "budget": 4 * PAGE}
TIPPED = {"fier": 1, "omnikv": 0, "razor": 0}
"""Steps in which tokens may score nearly alike where selection ends: on a CPU `one_bit` rounds."""
METHODS: dict[str, dict[str, Any]] = {
    "fier": OPTIONS | {"dense_layers": 1},
    "omnikv": OPTIONS | {"filters": [0]},
    "razor": {"page_size": PAGE, "sink": PAGE, "budget": 4 * PAGE}
    | {"heads": [[1, 0], [0, 0], [0, 1], [1, 1]]},
}
FAR = {"home": "host"}
HOMES = [
    *((method, {}) for method in METHODS),
    *(pytest.param(method, FAR, marks=pytest.mark.slow) for method in ("fier", "omnikv")),
]
REQUESTS = {
    "own": Request(prompt(133, 44), 5, {}),
    "longer": Request(prompt(180, 42), 5, {}),
    "streamingllm": Request(prompt(130, 32), 4, by("streamingllm")),
    "soon beyond": Request(prompt(62, 34), 4, {}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("toy") / "model", layers=4, kv_heads=2)


def options(method, **more):
    given = METHODS[method] | more
    return {"attention_backend": method, "additional_config": {"kv_retrieval": given}}


@pytest.fixture(scope="module")
def expected(model):
    """The answers of the CPU's engine, by the name of the method."""
    answers = {}
    for method in METHODS:
        with engine(model, enforce_eager=True, **STOCK, **options(method)) as llm:
            answers[method] = [alone(llm, request) for request in REQUESTS.values()]
    return answers


@pytest.mark.parametrize(("method", "home"), HOMES)
def test_answers_are_those_of_the_cpu(model, expected, method, home):
    """Alone and eagerly, and in a crowd by replays of graphs."""
    ours, expected = options(method, **home), expected[method]
    with device_engine.start() as pool:
        served = Served(pool)
        served.open_engine(model, EMULATED | ours | {"num_gpu_blocks_override": 26})
        served.replay(False)
        own = REQUESTS["own"]
        assert_same(served.drive([own])[0], expected[0], TOLERANCE, TIPPED[method])
        exact = served.drive([Request(own.prompt, own.tokens, {"exact": True})])[0]
        assert difference(exact, expected[0]) > 10 * TOLERANCE
        served.replay(True)
        before = served.replays()
        for answer, wanted in zip(served.drive([*REQUESTS.values()]), expected, strict=True):
            assert_same(answer, wanted, TOLERANCE, TIPPED[method])
        assert served.replays() > before
        late, early = served.launched_late()
        assert early > 5
        assert late == [], "all kernels are compiled before requests come"
