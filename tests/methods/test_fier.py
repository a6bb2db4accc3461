"""FIER in an engine: single tokens, in a KV cache that retrieval layers keep token by token.

What each step selects is compared with a straightforward implementation of the paper, on queries,
keys and values of a real model in a real run (``recorder.py``); what requests are answered is
held against stock vLLM and against the same requests by themselves in ``methods/test_methods.py``.
"""

from typing import Any

import pytest

from tests.support.engine import Request, by, drive, engine, model_of, novel, shortened
from tests.support.recorder_scores import Method

pytestmark = [pytest.mark.engine, pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
BUDGET = 256
CHUNK = 256  # tokens per step
SEQUENCES = 4
STOCK: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": SEQUENCES,
    "max_num_batched_tokens": CHUNK,
    "num_gpu_blocks_override": 26,  # one of them vLLM's own
    "enforce_eager": True,
}
METHODS = {
    "fier": Method("one_bit", per_token=True),
    "turning": Method("one_bit", per_token=True),
    "fine": Method("one_bit", per_token=True, entry_tokens=16),
    "freekv": Method(),
    "one_bit": Method("one_bit"),
}
ALSO = {
    "turning": {"schedule": "speculative"},
    "fine": {"summary_size": 16},
    "freekv": {},
    "one_bit": {"unit": "page"},
}
OPTIONS = {"budget": BUDGET, "also": ALSO, "max_budget": 512, "sink": 0}
LAYERS = 6
RECORDED = (0, 2, 3)

model = model_of(shortened, MODEL, LAYERS)


@pytest.fixture(scope="module")
def llm(model):
    with engine(
        model,
        attention_backend="fier",
        additional_config={"kv_retrieval": OPTIONS},
        worker_extension_cls="tests.support.recorder.RecordingWorker",
        **STOCK,
    ) as llm:
        yield llm


def test_the_tokens_of_the_paper_are_chosen(llm):
    """One request of each method, all in one batch; those of pages keep to theirs."""
    steps = 8
    llm.reset_prefix_cache()
    llm.collective_rpc("start_recording", args=(RECORDED,))
    lengths = dict(zip(METHODS, (3 * CHUNK + 1, 410, 520, 400, 300), strict=True))
    drive(llm, [Request(novel(llm, n, n), steps, by(m)) for m, n in lengths.items()])
    (summaries,) = llm.collective_rpc("check_recording", args=(METHODS,))
    assert summaries.keys() == METHODS.keys()
    for name, summary in summaries.items():
        assert summary["steps"] == (steps - 1) * len(RECORDED)
        assert summary["differ"] == 0, name
        assert summary["agree"] > 0.99 * summary["pages"], name
        assert summary["worst_error"] < 1e-4, name
    assert summaries["fier"]["corrected"] == summaries["fier"]["heads"]
    assert summaries["turning"]["corrected"] < summaries["turning"]["heads"]


def test_counts(llm):
    """Counts are the tokens that a step attends to, in pages; without a sink, of small budgets."""
    drive(llm, [Request(novel(llm, 40, 0), 1, {})])
    llm.collective_rpc(lambda worker: tuple(worker.requests.take_counts()))
    budgets = (64, 256, 512)
    drive(llm, [Request(novel(llm, 700, 0), 12, {"budget": budget}) for budget in budgets])
    drive(llm, [Request(novel(llm, 40, 0), 1, {})])
    (counts,) = llm.collective_rpc(lambda worker: worker.requests.take_counts()._asdict())
    assert counts["sparse_steps"] == len(budgets) * 11
    assert counts["attended"] == (LAYERS - 2) * 3 * 11 * sum(budgets) // 32
    assert counts["corrected"] == (LAYERS - 2) * 3 * 11 * len(budgets)
