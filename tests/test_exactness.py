"""What the engine attends to, against an independent implementation of the paper's algorithm.

Queries, keys and values are those of a real model in a real run (``tests/recorder.py``).
"""

import pytest
from vllm import SamplingParams

from benchmarks.texts import emma
from tests.engine import checkpoint, engine

STEPS = 40  # crosses a page boundary at least once
LAYERS = (0, 14, 28)


@pytest.fixture(scope="module", params=[(32, 32), (16, 8)], ids=str)
def served(request):
    """The size of summaries comes with it: a page's, as in the paper, or less."""
    page_size, summary_size = request.param
    options = {"budget": 512, "sink": 64, "window": 128, "correction_threshold": 0.9}
    options |= {"page_size": page_size, "summary_size": summary_size}
    with engine(
        checkpoint("SmolLM2-135M-Instruct"),
        attention_backend="freekv",
        additional_config={"kv_retrieval": options},
        worker_extension_cls="tests.recorder.RecordingWorker",
        max_model_len=4096,
        max_num_seqs=4,
        enforce_eager=True,
    ) as llm:
        yield llm, summary_size


def run(served, requests):
    """Run (number of words, per-request options) pairs together, recorded; return the summary."""
    llm, summary_size = served
    words = emma().split()
    llm.collective_rpc("start_recording", args=(LAYERS, summary_size))
    prompts = [" ".join(words[1000 * i : 1000 * i + n]) for i, (n, _) in enumerate(requests)]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=STEPS,
            ignore_eos=True,
            extra_args={"kv_retrieval": options},
        )
        for _, options in requests
    ]
    llm.generate(prompts, params, use_tqdm=False)
    (summary,) = llm.collective_rpc("check_recording")
    return summary


def assert_equal_to_oracle(summary, requests):
    # The first token comes from prefill; all others from sparse decode steps.
    assert summary["steps"] == requests * (STEPS - 1) * len(LAYERS)
    assert summary["heads"] == summary["steps"] * 3
    assert summary["differ"] == 0
    assert summary["near_ties"] < summary["heads"] * 0.01
    # Outputs are rounded to bf16, and so are the probabilities inside vLLM's kernel.
    assert summary["worst_error"] < 2**-7
    assert summary["page_moves"] > 0, "a page boundary was crossed"


def test_speculation_and_correction(served):
    """Requests of different lengths, budgets and thresholds in one batch."""
    requests = [(700, {}), (1500, {"budget": 256}), (2300, {"correction_threshold": 0.95})]
    summary = run(served, requests)
    assert_equal_to_oracle(summary, len(requests))
    assert 0.05 < summary["corrected"] / summary["heads"] < 0.95, "both were exercised"


def test_threshold_of_one_selects_at_every_step(served):
    summary = run(served, [(1200, {"correction_threshold": 1.0})])
    assert_equal_to_oracle(summary, 1)
    assert summary["corrected"] == summary["heads"]


def test_threshold_of_minus_one_is_pure_reuse(served):
    summary = run(served, [(1200, {"correction_threshold": -1.0})])
    assert_equal_to_oracle(summary, 1)
    assert summary["corrected"] == 3 * len(LAYERS), "a request's first decode step corrects"
