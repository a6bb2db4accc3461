"""vLLM's V2 model runner with several workers: tensor parallelism, and stages of a pipeline.

Its answers are those of V1 with as many workers to the last bit, and those of one worker to
rounding. Executor, queues and groups of processes (gloo) are vLLM's; each worker emulates Triton
as ``tests/support/runners.py`` does.
"""

from typing import Any

import pytest

from tests.engine.test_runners import HOUSES, MODULES, OPTIONS, again, crowd, outgrowing
from tests.support import runners
from tests.support.engine import Request, assert_same, difference, prompt, random_llama

pytestmark = [pytest.mark.engine, pytest.mark.cores]

TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
LAYERS, KV_HEADS = 4, 2
OF_STAGES = {TENSOR: [[1, 2, 3], [1, 2, 3]], PIPELINE: [[1], [2, 3]]}
"""Layers that retrieve, by worker; the first one is dense."""
TOLERANCE = 1e-3


def answers(call, model, house, runner, size=None):
    """What an engine answers, and what it says of its workers."""
    options: dict[str, Any] = OPTIONS | {"additional_config": {"kv_retrieval": HOUSES[house]}}
    call(runners.open_engine, runner, model, options | ({size: 2} if size else {}))
    if (runner, size) == ("v1", PIPELINE):
        call(runners.make_room)
    found = {
        "crowd": call(runners.drive, crowd(HOUSES[house]["also"])),
        "again": call(runners.drive, again()),
        "exact": call(runners.drive, [Request(prompt(200), 8, {"exact": True})]),
        "outgrowing": call(runners.drive_preempting, outgrowing()),
        "counted": call(runners.counted, Request(prompt(250), 9, {})),
    }
    workers = call(runners.describe)
    call(runners.close_engine)
    return found, workers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("toy") / "model", LAYERS, KV_HEADS)


@pytest.mark.parametrize(
    ("size", "house"),
    [
        (TENSOR, "memory"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((TENSOR, "file"), (PIPELINE, "memory"), (PIPELINE, "file"))
        ),
    ],
)
def test_two_workers_answer_as_v1_and_as_one(emulated, model, size, house):
    """Batches with chunks of prompts, prefix hits, and a preempted request."""
    ours, workers = answers(emulated, model, house, "v2", size)
    theirs, of_v1 = answers(emulated, model, house, "v1", size)
    assert [worker["runner"] for worker in workers] == 2 * [MODULES["v2"]]
    assert [worker["runner"] for worker in of_v1] == 2 * [MODULES["v1"]]
    names = [[f"model.layers.{n}.self_attn.attn" for n in part] for part in OF_STAGES[size]]
    for worker, layers in zip(workers, names, strict=True):
        assert worker["layers"] == layers
        assert worker["kv_heads"] == {KV_HEADS // (2 if size == TENSOR else 1)}
        assert worker["slots"] == (HOUSES[house].get("home") == "disk")
        assert not worker["wrong"]
    assert ours == theirs
    single, _ = answers(emulated, model, house, "v1")
    for part in "crowd", "again", "exact":
        for answer, expected in zip(ours[part], single[part], strict=True):
            assert_same(answer, expected, TOLERANCE)
    outgrown, preempted = ours["outgrowing"]
    assert preempted
    if size == TENSOR:  # with stages vLLM preempts at another step, up to which a context is exact
        for answer, expected in zip(outgrown, single["outgrowing"][0], strict=True):
            assert_same(answer, expected, TOLERANCE)
        assert ours["counted"].get("heads_decoded") == single["counted"].get("heads_decoded")
    assert difference(ours["exact"][0], ours["again"][0]) > 10 * TOLERANCE, "retrieval counts"
