"""A GPU's engine with two workers answers as one: tensor and pipeline parallelism, emulated.

Executor, processes and their groups are vLLM's; see ``support/device_engine.py``. Requests and
expected answers are those of ``tests/device/test_device_engine.py``.
"""

from dataclasses import replace

import pytest

from tests.device.test_device_engine import (
    BLOCK,
    EMULATED,
    EXACT,
    PAGE,
    RETRIEVAL,
    SHORT,
    SPARSE,
    TOLERANCE,
    Served,
    expected,  # noqa: F401
    model,  # noqa: F401
)
from tests.support import device_engine
from tests.support.engine import assert_same, difference

pytestmark = pytest.mark.engine

TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
LAYERS = {
    TENSOR: [["1", "2"], ["1", "2"]],
    PIPELINE: [["1"], ["2"]],  # the first stage has the dense layer, too
}
MEMORY = {
    (TENSOR, "device"): 1 << 21,
    (TENSOR, "host"): 1 << 20,
    (PIPELINE, "device"): 1 << 21,
    # Where there is a dense layer, there is no room for as many blocks and slots.
    (PIPELINE, "host"): 1_500_000,
}


@pytest.fixture(
    scope="module",
    params=[
        (TENSOR, "device"),
        (PIPELINE, "host"),
        pytest.param((TENSOR, "host"), marks=pytest.mark.slow),
        pytest.param((PIPELINE, "device"), marks=pytest.mark.slow),
    ],
    ids=lambda param: "-".join(param).replace("_parallel_size", ""),
)
def served(request, model, expected):  # noqa: F811
    """The engine, how it is divided, and the home of its cache."""
    size, home = request.param
    with device_engine.start() as pool:
        served = Served(pool)
        options = RETRIEVAL["additional_config"]["kv_retrieval"] | {"home": home}
        served.open_engine(
            model,
            {
                **EMULATED,
                **RETRIEVAL,
                "additional_config": {"kv_retrieval": options},
                "kv_cache_memory_bytes": MEMORY[request.param],
                size: 2,
            },
        )
        yield served, size, home
        served.close_engine()


def test_workers_have_their_parts(served):
    """Workers have parts of the layers or KV heads, and the same number of blocks."""
    engine, size, home = served
    workers = engine.describe_workers()
    retrieving = [[f"model.layers.{n}.self_attn.attn" for n in part] for part in LAYERS[size]]
    assert [worker["retrieving"] for worker in workers] == retrieving
    assert all(worker["kv_heads"] == {1 if size == TENSOR else 2} for worker in workers)
    (blocks,) = workers[0]["blocks"]
    for worker in workers:
        assert worker["blocks"] == {blocks}
        assert worker["pages"] == {blocks * (BLOCK // PAGE)}
        assert worker["planned"] == (blocks if home == "host" else None)
    first, second = (worker["slots"] for worker in workers)
    assert (first < second) == ((size, home) == (PIPELINE, "host")), "there is more room"


def test_two_workers_answer_as_one(served, expected):  # noqa: F811
    """Prompts in chunks beside decode steps, whole contexts and selections, replays of graphs.

    Each worker rounds its part of a sum, which may decide between two pages.
    """
    engine, *_ = served
    requests = {"short": SHORT, "exact": EXACT, **SPARSE}
    crowd = [replace(r, arrives=2 * number) for number, r in enumerate(requests.values())]
    before = [worker["replays"] for worker in engine.describe_workers()]
    answers = dict(zip(requests, engine.drive(crowd), strict=True))
    for name, answer in answers.items():
        assert_same(answer, expected[name], TOLERANCE, tipped=int(name in SPARSE))
    assert difference(answers["exact"], answers["freekv"]) > 10 * TOLERANCE
    after = [worker["replays"] for worker in engine.describe_workers()]
    assert all(b - a > 10 for a, b in zip(before, after, strict=True))
