"""Tensor parallelism: every worker retrieves for its own KV heads; pipelines: for its own layers.

A small Llama with random weights, in float32: what is at stake is which head attends to what, and
the answers are to be those of a single worker to rounding.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.engine import (
    Request,
    assert_same,
    difference,
    drive,
    engine,
    model_of,
    random_llama,
)

pytestmark = [pytest.mark.engine, pytest.mark.cores]

BUDGET = 128
LAYERS, KV_HEADS = 4, 4


@dataclass
class House:
    """Methods of one engine, and what its cache has beside those of one worker in memory.

    Attributes:
        method: The engine's own.
        options: Its options.
        asks: Options of the requests beyond the budget.
        divided: Options of the engine with two workers.
    """

    method: str
    options: dict[str, Any]
    asks: list[dict[str, Any]]
    divided: dict[str, Any]


ON_DISK = {"home": "disk", "recall_cache_bytes": "8MiB"}
UNEVEN = {"budget_shares": [[2, 0.5, 1, 0.5], [1, 1, 1, 1], [0, 3, 0, 1]]}
HEADS = [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
HOUSES = {
    # A file and slots for each worker; each selects for its own heads.
    "pages on disk": House(
        "freekv",
        {"also": {"uneven": UNEVEN}},
        [{}, {"correction_threshold": 0.9}, {"method": "uneven"}],
        ON_DISK,
    ),
    # Heads of a layer keep the same, by the attention of all of them, and so do budgets of layers;
    # one worker has most of the heads that attend to everything.
    "tokens": House(
        "entropykv",
        {"also": {"tova": {}, "h2o": {}, "razor": {"heads": HEADS}}},
        [{}, {"method": "tova"}, {"method": "h2o"}, {"method": "razor"}],
        {},
    ),
    # Layers that share a selection attend by the heads of all workers.
    "shared layers on disk": House(
        "omnikv", {"filters": [0], "observation": "uniform"}, [{}, {}, {}], ON_DISK
    ),
}


def selections(worker):
    """What the filters of a worker selected last, seat by seat."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    watchers = [w for layer in layers for w in layer.impl.watchers.values()]
    return [w.selectors.rows.chosen.tolist() for w in watchers if hasattr(w, "selectors")]


model = model_of(random_llama, LAYERS, KV_HEADS)


def answers(model, house, workers=1, stages=1, **options):
    """Answers of an engine with so many workers of so many stages, the last answer exact, the KV
    heads of each worker, and what its filters selected."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(512, (length,), generator=generator).tolist()
        for length in (60, 500, 900, 700, 600)
    ]
    with engine(
        model,
        tensor_parallel_size=workers,
        pipeline_parallel_size=stages,
        attention_backend=house.method,
        additional_config={"kv_retrieval": {"budget": BUDGET} | house.options | options},
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=5,
        skip_tokenizer_init=True,
        enforce_eager=True,
    ) as llm:
        if stages > 1:  # vLLM's workers on a CPU have no room for activations otherwise, if eager
            llm.collective_rpc(lambda worker: worker.model_runner.profile_run() and None)
        asks = [{}, *house.asks]
        requests = [Request(p, 24, o) for p, o in zip(prompts, asks, strict=False)]
        found = drive(llm, requests) + drive(llm, [Request(prompts[1], 24, {"exact": True})])
        heads = llm.collective_rpc(
            lambda worker: [i.choosers[0].store.kv_heads for i in worker.retrieval_layers.values()]
        )
        states = llm.collective_rpc(
            lambda worker: (worker.storage.check(), worker.storage.usage.slots > 0)
        )
        selected = llm.collective_rpc(selections)
    assert {*states} == {("", "home" in options)}
    return found, heads, selected


@pytest.mark.parametrize("house", HOUSES.values(), ids=HOUSES)
def test_two_workers_answer_as_one(model, house):
    expected, heads, _ = answers(model, house)
    assert {*heads[0]} == {KV_HEADS}
    ours, divided, selected = answers(model, house, 2, **house.divided)
    assert divided == [[KV_HEADS // 2] * len(heads[0])] * 2
    assert selected[0] == selected[1]
    for answer, single in zip(ours, expected, strict=True):
        assert_same(answer, single, tolerance=1e-3)
    assert difference(expected[-1], expected[1]) > 0.05, "retrieval attends to a part"


def test_filters_select_by_the_heads_of_their_worker(model):
    house = HOUSES["shared layers on disk"]
    ours, _, selected = answers(model, house, 2, filter_heads="own", **house.divided)
    assert selected[0] != selected[1], "each by other heads"
    assert all(any(map(any, filters[0])) for filters in selected)
    assert ours[-1].logprobs != ours[1].logprobs, "retrieval attends to a part"


def test_two_stages_answer_as_one(tmp_path):
    """The second stage begins with a filter: it has no selection of the first one's."""
    model = random_llama(tmp_path, 6, KV_HEADS)
    whole, divided = (
        House("omnikv", {"filters": filters, "also": ["freekv"]}, [{}, {"method": "freekv"}], {})
        for filters in ([0, 3], [0])
    )
    expected, heads, _ = answers(model, whole)
    ours, of_stages, _ = answers(model, divided, stages=2, **ON_DISK)
    assert [len(layers) for layers in of_stages] == [len(heads[0]) // 2] * 2
    for answer, single in zip(ours, expected, strict=True):
        assert_same(answer, single, tolerance=1e-3)
    assert len({answer.logprobs[-1] for answer in (ours[-1], ours[1], ours[2])}) == 3


def test_stages_read_the_share_of_the_cache_that_one_worker_reads(model):
    """Budgets follow from prompts, by the layers of a stage as by all."""
    share = {"memory_fraction": 0.3, "max_budget": 512, "dense_layers": 0}
    house = House("freekv", share, [{}, {}, {}], {})
    expected, _, _ = answers(model, house)
    ours, of_stages, _ = answers(model, house, stages=2)
    assert [len(layers) for layers in of_stages] == [LAYERS // 2] * 2
    for answer, single in zip(ours, expected, strict=True):
        assert_same(answer, single, tolerance=1e-3)
    assert difference(expected[-1], expected[1]) > 0.05, "retrieval attends to a part"
