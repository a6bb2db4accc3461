"""What the engine attends to, against an independent implementation of the papers' algorithms.

Queries, keys and values are those of a real model in a real run (``tests/support/recorder.py``).
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from benchmarks.texts import emma
from tests.support.engine import DTYPE, engine, shortened
from tests.support.recorder_scores import INDEXES, POOLINGS, Method

pytestmark = [pytest.mark.engine, pytest.mark.model]

STEPS = 40  # crosses a page boundary at least once
LAYERS = (0, 3, 5)
OWN = "freekv"
RETRIEVING, HEADS = 6, 3  # layers, and KV heads of each
# PyramidKV: from 2 - 1 / beta times the mean down to 1 / beta of it, linearly with depth.
PYRAMID = tuple((1.95 - 1.9 * layer / (RETRIEVING - 1),) * HEADS for layer in range(RETRIEVING))
BY_HEAD = [[1, 4, 0]] * 2 + [5 / 3] * (RETRIEVING - 2)
"""The option as a user writes it; 5 / 3 on average."""


def methods_of(page_size: int, summary_size: int) -> dict[str, Method]:
    """One for every index and for every pooling; those of softmax are freekv's.

    With every pooling as with every index, pages are selected anew at each step.
    """
    kinds = {f"by {index}": Method(index) for index in INDEXES}
    kinds |= {f"by {p}": Method(pooling=p) for p in POOLINGS if p != Method().pooling}
    kinds |= {"reranked": Method("mean", rerank=2), OWN: Method()}
    kinds["with outliers"] = Method("landmark", "max_softmax", outliers=0.3)
    kinds["with the rest"] = Method("exact", remainder=0.005)
    methods = {name: replace(kind, entry_tokens=summary_size) for name, kind in kinds.items()}
    methods["pyramid"] = replace(methods[OWN], shares=PYRAMID)
    by_head = tuple((0.6, 2.4, 0) if layer < 2 else (1,) * HEADS for layer in range(RETRIEVING))
    methods["by head"] = replace(methods[OWN], shares=by_head)
    if summary_size < 16:  # the least that it takes
        methods["by low_rank"] = Method("low_rank", entry_tokens=16, rank=8)
    two = 2 * page_size
    methods["by two pages"] = Method("low_rank", entry_tokens=two, entry_pages=2, rank=15)
    return methods


def options_of(method: Method) -> dict[str, Any]:
    """The option as a user writes it."""
    if method.shares:  # freekv's, with its schedule
        return {"budget_shares": "pyramid" if method.shares == PYRAMID else BY_HEAD}
    index: Any = {"low_rank": {"rank": method.rank}} if method.index == "low_rank" else method.index
    options = {"index": index, "pooling": method.pooling, "rerank": method.rerank}
    options |= {"remainder": method.remainder} if method.remainder else {}
    options |= {"outliers": method.outliers} if method.outliers else {}
    return options | {"schedule": "every_step", "summary_size": method.entry_tokens}


@dataclass
class Served:
    """An engine, what its methods are said to be, and the tokens of a page."""

    llm: LLM
    methods: dict[str, Method]
    page_size: int


@pytest.fixture(
    scope="module", params=[(32, 32), pytest.param((16, 8), marks=pytest.mark.slow)], ids=str
)
def served(request, tmp_path_factory):
    """The size of summaries comes with it: a page's, as in the paper, or less."""
    page_size, summary_size = request.param
    methods = methods_of(page_size, summary_size)
    options = {"budget": 512, "sink": 64, "window": 128, "correction_threshold": 0.9}
    options |= {"page_size": page_size, "summary_size": summary_size}
    also = {name: options_of(method) for name, method in methods.items() if name != OWN}
    with engine(
        shortened(tmp_path_factory.mktemp("model"), "SmolLM2-135M-Instruct", 1 + RETRIEVING),
        attention_backend=OWN,
        additional_config={"kv_retrieval": options | {"also": also}},
        worker_extension_cls="tests.support.recorder.RecordingWorker",
        max_model_len=4096,
        max_num_seqs=len(methods) + 1,
        enforce_eager=True,
    ) as llm:
        yield Served(llm, methods, page_size)


def run(served, requests, steps=STEPS):
    """Run (first word, words, per-request options) together, recorded; summaries by method."""
    words = emma().split()
    served.llm.collective_rpc("start_recording", args=(LAYERS,))
    prompts = [" ".join(words[first : first + count]) for first, count, _ in requests]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=steps,
            ignore_eos=True,
            extra_args={"kv_retrieval": options},
        )
        for *_, options in requests
    ]
    served.llm.generate(prompts, params, use_tqdm=False)
    (summaries,) = served.llm.collective_rpc("check_recording", args=(served.methods,))
    return summaries


def assert_equal_to_oracle(summary, requests, steps=STEPS):
    # The first token comes from prefill; all others from sparse decode steps.
    assert summary["steps"] == requests * (steps - 1) * len(LAYERS)
    assert summary["heads"] == summary["steps"] * 3
    assert summary["differ"] == 0
    # In bf16 outputs are rounded, and so are the probabilities inside vLLM's kernel.
    assert summary["worst_error"] < (1e-4 if DTYPE == "float32" else 2**-7)


def assert_nothing_left_to_rounding(summary):
    assert summary["near_ties"] < summary["heads"] * 0.01
    assert summary["page_moves"] > 0, "a page boundary was crossed"


def test_speculation_and_correction(served):
    """Requests of different lengths, budgets and thresholds in one batch."""
    requests = [
        (0, 700, {}),
        (1000, 1500, {"budget": 256}),
        (2000, 2300, {"correction_threshold": 0.95}),
    ]
    summary = run(served, requests)[OWN]
    assert_equal_to_oracle(summary, len(requests))
    assert_nothing_left_to_rounding(summary)
    assert 0.05 < summary["corrected"] / summary["heads"] < 0.95, "both were exercised"


def test_threshold_of_one_selects_at_every_step(served):
    summary = run(served, [(0, 1200, {"correction_threshold": 1.0})])[OWN]
    assert_equal_to_oracle(summary, 1)
    assert_nothing_left_to_rounding(summary)
    assert summary["corrected"] == summary["heads"]


def test_threshold_of_minus_one_is_pure_reuse(served):
    summary = run(served, [(0, 1200, {"correction_threshold": -1.0})])[OWN]
    assert_equal_to_oracle(summary, 1)
    assert_nothing_left_to_rounding(summary)
    assert summary["corrected"] == 3 * len(LAYERS), "a request's first decode step corrects"


def test_every_index_and_every_pooling(served):
    """One request of each method, all in one batch, over beginnings of one text.

    So each reads pages that another has written, and by another index.
    """
    steps = 16
    requests = [(2000, 1600 - 40 * i, {"method": name}) for i, name in enumerate(served.methods)]
    summaries = run(served, requests, steps)
    assert summaries.keys() == served.methods.keys()
    for name, summary in summaries.items():
        assert_equal_to_oracle(summary, 1, steps)
        method = served.methods[name]
        agreement = 0.98 if method.index != "low_rank" else 0.8 if method.entry_pages > 1 else 0.9
        assert summary["agree"] > agreement * summary["pages"], name
        if not served.methods[name].shares and name != OWN:
            assert summary["corrected"] == summary["heads"], name
    most = {name: summary["most"] for name, summary in summaries.items()}
    select = most[OWN]
    assert most["pyramid"] - round(1.95 * select) in (-1, 0, 1)
    assert most["by head"] - round(2.4 * select) in (-1, 0, 1)
    moves = sum(summary["page_moves"] for summary in summaries.values())
    assert moves >= 2, "page boundaries were crossed"
