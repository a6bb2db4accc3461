"""RazorAttention in an engine: which KV heads attend to everything, and which to sink and window.

Every list of recorded steps is held against what the file of scores says. Requests within the
budget and exact ones: ``tests/methods/test_methods.py``.
"""

import json
from typing import Any

import pytest

from tests.support.engine import (
    Request,
    assert_same,
    by,
    difference,
    drive,
    engine,
    model_of,
    novel,
    shortened,
)
from tests.support.heads_recorder import scored
from vllm_kvretrieval.retrieval.heads import SHIPPED

pytestmark = [pytest.mark.engine, pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
SCORES = json.loads((SHIPPED / f"{MODEL}.json").read_text())
SCORED = (7, 14, 17, 18, 20, 23)
"""The model's layers whose scores those of the test have."""
LAYERS, KV_HEADS = 6, 3
BUDGET = 256
PAGE = 32
CHUNK = 256  # tokens per step
STOCK: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": CHUNK,
    "num_gpu_blocks_override": 26,  # one of them vLLM's own
    "enforce_eager": True,
}
TOLERANCE = 1e-3


def by_hand():
    """A different head in each layer, in some layers none, and in one all."""
    flags = [[int(head == layer % 4) for head in range(KV_HEADS)] for layer in range(LAYERS)]
    flags[5] = [1, 1, 1]
    return flags


ALSO = {
    "by_hand": {"heads": by_hand()},
    "all": {"heads": [[1] * KV_HEADS] * LAYERS},
    "none": {"heads": [[0] * KV_HEADS] * LAYERS},
    "freekv": {},
}
RECORDED = (0, 2, 3, 5)

model = model_of(shortened, MODEL, LAYERS)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """The flags of each method that uses scores, and the file of these scores."""
    scores = tmp_path_factory.mktemp("scores") / "scores.json"
    told = SCORES | {key: [SCORES[key][i] for i in SCORED] for key in ("induction", "echo")}
    told |= {"shape": SCORES["shape"] | {"num_hidden_layers": LAYERS}, "layers": [*range(LAYERS)]}
    scores.write_text(json.dumps(told))
    return {"razor": scored(scores, 0.15), "many": scored(scores, 0.5)}, scores


@pytest.fixture(scope="module")
def llm(model, flags):
    """The file of scores that options name is gone before the first request."""
    scores = flags[1]
    also = ALSO | {"many": {"heads": {"file": str(scores), "share": 0.5}}}
    options = {"budget": BUDGET, "heads": str(scores), "also": also}
    with engine(
        model,
        attention_backend="razor",
        additional_config={"kv_retrieval": options},
        worker_extension_cls="tests.support.heads_recorder.HeadsRecorder",
        **STOCK,
    ) as llm:
        scores.unlink()
        yield llm


def test_what_each_head_attends_to(llm, flags):
    """Every step is compared, of prompts that are read and decoded together, and with other
    budgets."""
    crowd = [
        (Request(novel(llm, 700, 0), 40, {}), 8),
        (Request(novel(llm, 3 * CHUNK + 1, 60), 20, by("by_hand")), 8),
        (Request(novel(llm, 420, 120), 30, by("razor", budget=96), arrives=2), 3),
        (Request(novel(llm, 1000, 200), 12, by("many", budget=192), arrives=5), 6),
        (Request(novel(llm, 240, 300), 45, by("by_hand", budget=128), arrives=9), 4),
        (Request(novel(llm, 250, 9), 40, {}, arrives=12), 8),
        (Request(novel(llm, 500, 80), 10, by("none"), arrives=13), 8),
    ]
    llm.collective_rpc("start_recording", args=(RECORDED,))
    drive(llm, [request for request, _ in crowd])
    flags = flags[0] | {name: ALSO[name]["heads"] for name in ("by_hand", "none")}
    budgets = [budget for _, budget in crowd]
    (found,) = llm.collective_rpc("check_heads", args=(flags, budgets, RECORDED))
    layers = len(RECORDED)
    steps = {"razor": 39 + 29 + 33, "by_hand": 19 + 44, "many": 11, "none": 9}
    assert found.keys() == steps.keys()
    for name, summary in found.items():
        whole = sum(sum(flags[name][layer]) for layer in RECORDED)
        assert summary["steps"] == steps[name] * layers
        assert summary.get("whole", 0) == steps[name] * whole
        assert summary.get("part", 0) == steps[name] * (layers * KV_HEADS - whole)
        assert summary["differ"] == 0, name
        assert summary["worst_error"] < 1e-4, name
    assert sum(map(sum, flags["razor"])) == 3
    assert found["razor"]["whole"] > 0
    assert found["razor"]["page_moves"] == 3
    llm.collective_rpc("start_recording", args=(RECORDED,))


def test_all_heads_or_none(llm):
    """With all heads requests are exact. With none they attend to sink and window alone."""
    prompt = novel(llm, 700, 50)
    everything, nothing, window, some, exact = drive(
        llm,
        [Request(prompt, 16, by(m)) for m in ("all", "none", "streamingllm", "razor")]
        + [Request(prompt, 16, by("razor", exact=True))],
    )
    assert_same(everything, exact, TOLERANCE)
    assert_same(nothing, window, TOLERANCE)
    for answer in (nothing, some):
        assert difference(answer, everything) > 10 * TOLERANCE
    assert difference(nothing, some) > 10 * TOLERANCE


def test_counts(llm):
    """The counts of attended units are head by head."""
    drive(llm, [Request(novel(llm, 40, 0), 1, {})])
    llm.collective_rpc(lambda worker: tuple(worker.requests.take_counts()))
    whole = {"razor": 3, "by_hand": sum(map(sum, by_hand())), "all": 18, "none": 0}
    for method, heads in whole.items():
        drive(llm, [Request(novel(llm, 700, 0), 12, by(method))])
        drive(llm, [Request(novel(llm, 40, 0), 1, {})])
        (counts,) = llm.collective_rpc(lambda worker: worker.requests.take_counts()._asdict())
        pages = [-(-length // PAGE) for length in range(701, 712)]
        others = LAYERS * KV_HEADS - heads
        assert counts["sparse_steps"] == 11
        assert counts["attended"] == sum(n * heads + BUDGET // PAGE * others for n in pages)
        assert counts["corrected"] == 0
