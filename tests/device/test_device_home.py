"""A GPU's engine whose KV cache is in host memory answers as one whose cache is on the device.

Both run on the CPU: see support/device_engine.py. Launches of the work beside the model are made at
random between those of the model, until it is waited for.
"""

from dataclasses import replace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode

from tests.support import device_engine
from tests.support.device_engine import KINDS, SELECTIONS
from tests.support.engine import Request, assert_same, random_llama
from vllm_kvretrieval.engine.cuda.runner import RetrievalModelRunner

PAGE, BUDGET = 16, 64
ROUNDING = 0.1
"""The tolerance of log-probs in bfloat16: another kernel reads contexts within their budgets."""
NARROW = {"preset": "quest", "pooling": "mean_softmax", "mass": 0.5}
OPTIONS: dict[str, Any] = {"page_size": PAGE, "sink": 16, "window": 16, "budget": BUDGET}
OPTIONS |= {"also": {"quest": {}, "narrow": NARROW, "shadowkv": {}}}
ENGINE = {
    "attention_backend": "freekv",
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
    "dtype": "float16",
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "block_size": 2 * PAGE,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 18,
    "disable_log_stats": False,
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Functions that call those of support/device_engine.py: of home=device, and of home=host."""
    model = random_llama(tmp_path_factory.mktemp("toy"), layers=3, kv_heads=2)
    processes = [device_engine.start() for _ in range(2)]
    for process in processes:
        process.submit(watch_attaching).result()
    # Too little for all contexts, and for the slots of more than four requests at once.
    small = {"home": "auto"}, {"kv_cache_memory_bytes": 1_080_000, "max_num_seqs": 9}
    opened = [
        process.submit(
            device_engine.open_engine,
            model,
            ENGINE | size | {"additional_config": {"kv_retrieval": OPTIONS | home}},
        )
        for process, (home, size) in zip(processes, (({}, {}), small), strict=True)
    ]
    for future in opened:
        future.result()

    def both(function, *args):
        futures = [process.submit(function, *args) for process in processes]
        return [future.result() for future in futures]

    yield both
    for process in processes:
        process.shutdown()


caches: list[tuple[bool, list[int]]] = []
"""Of each KV cache of this process, whether its home is host memory, and the rows of its graphs."""


def watch_attaching():
    """Note the caches of this process."""
    attach = RetrievalModelRunner._attach_retrieval

    def noting(runner, tiers, encoded, is_profiling):
        attach(runner, tiers, encoded, is_profiling)
        full = runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
        caches.append((runner.retrieval_layers.tier is not None, [d.num_reqs for d in full]))

    RetrievalModelRunner._attach_retrieval = noting  # type: ignore[method-assign]


def attached():
    return caches


def prompt(tokens, seed):
    """Token ids."""
    return [(place * place * 7 + place * seed + 11 * seed) % 509 + 1 for place in range(tokens)]


def compare(engines, requests):
    near, far = engines(device_engine.drive, requests)
    assert all(engines(device_engine.idle))
    for request, one, other in zip(requests, near, far, strict=True):
        within = len(request.prompt) < BUDGET
        assert_same(other, one, ROUNDING if within else 1e-5)
    return far


def alone(engines, request):
    """The answer of home=host to a request that comes alone, and finds nothing in the cache."""
    _, (answer,) = engines(device_engine.drive, [replace(request, arrives=0, cache=False)])
    return answer


def test_answers(engines):
    """Prompts in chunks beside decode steps, contexts beyond their budgets and soon beyond them,
    whole contexts, tokens that are prompts' last, and other options; then with a cached prefix."""
    requests = [
        Request(prompt(150, 1), 9, {"correction_threshold": 0.0}, cache=True),
        Request(prompt(90, 2), 7, {"method": "quest"}, arrives=2),
        Request(prompt(65, 3), 5, {"budget": 48}, arrives=3),
        Request(prompt(120, 8), 5, {"method": "narrow"}, arrives=3),
        Request(prompt(100, 4), 4, {"exact": True}, arrives=4),
        Request(prompt(60, 5), 6, {}, arrives=5),
    ]
    compare(engines, requests)
    for taken in engines(device_engine.graphs_taken):
        assert {SELECTIONS} < set(taken) <= {*KINDS}
    again = [
        Request(prompt(150, 1) + prompt(20, 6), 4, {}, cache=True),
        Request(prompt(150, 1)[:110] + prompt(30, 7), 4, {}, cache=True),
    ]
    answers = compare(engines, again)
    assert all(sum(counts.values()) > 5 for counts in engines(device_engine.replays_by_rows))
    assert [answer.cached for answer in answers] == [128, 96]


def test_outliers(engines):
    """Pages that every query gets, of entries of half a page."""
    by_marks = {"method": "shadowkv"}
    requests = [
        Request(prompt(130, 9), 5, by_marks),
        Request(prompt(97, 10), 5, by_marks, arrives=2),
    ]
    compare(engines, requests)


@pytest.mark.parametrize(("tokens", "arrives"), [(40, 0), (104, 1)])
def test_a_prefix_that_the_same_step_fills(engines, tokens, arrives):
    """vLLM takes blocks for cached before they are written: by a prompt that comes in the same
    step, or by one that came before, and is read in chunks."""
    for seed in range(30, 33):  # as often the work beside the model comes at other times
        first = Request(prompt(tokens, seed), 1, {}, cache=True)
        second = replace(first, prompt=first.prompt + prompt(10, 29), arrives=arrives)
        engines(device_engine.reset_prefix_cache)
        _, answers = engines(device_engine.drive, [first, second])
        assert [answer.cached for answer in answers] == [0, tokens // 32 * 32]
        assert answers[0].steps == answers[1].steps, "the step that fills blocks finds them, too"
        for request, answer in zip((first, second), answers, strict=True):
            assert_same(answer, alone(engines, request), 1e-5)


def test_requests_wait_for_slots(engines):
    """Only as many requests run at once as have slots, which are fewer than the server was asked
    for."""
    assert engines(device_engine.limits) == [(4, 4), (4, 4)]
    requests = [Request(prompt(66 + 5 * seed, seed), 3 + seed % 2, {}) for seed in range(6)]
    near, far = engines(device_engine.drive, requests)
    assert [answer.steps for answer in near] == [answer.steps for answer in far]
    for one, other in zip(near, far, strict=True):
        assert_same(other, one, 1e-5)


def test_graphs_are_of_requests_that_run(engines):
    """None is captured for more rows than there are slots for, and their memory is measured over
    layers with slots. The second server was asked for nine requests."""
    rows = [4, 4, 4, 2, 2, 2, 1, 1, 1]  # with both halves of attention, and with either
    assert engines(attached) == [[(False, rows)] * 2, [(True, rows)] * 2]


def test_preemption(engines):
    """More than the cache has room for: someone is preempted, and starts again later."""
    requests = [Request(prompt(158, seed), 10, {}) for seed in (11, 12, 13)]
    (expected, near), (answers, far) = engines(device_engine.drive_preempting, requests)
    for answer, other in zip(answers, expected, strict=True):
        assert_same(answer, other, 1e-5)
    assert near == far != []


def test_metrics(engines):
    """The metrics of slots: pages are recalled ahead, and most pages that steps attend to are
    there."""
    _, far = engines(device_engine.metrics)
    assert far["units_attended"] <= far["units_looked_up"]
    assert 0 < far["units_missed"] < 0.5 * far["units_looked_up"]
    unit = PAGE * 2 * 64 * 2
    assert far["bytes_recalled"] > far["units_missed"] * unit
    assert 0 < far["slots_used"] <= far["slots"]


def test_nothing_is_compiled_while_serving(engines):
    """Warm-up has launched all kernels that these requests launch, also those that stage contexts,
    of any number of prompts."""
    engines(device_engine.drive, [Request(prompt(70, 21), 2, {})])
    engines(device_engine.drive, [Request(prompt(12, seed), 2, {}) for seed in (22, 23, 24, 25)])
    for late, early in engines(device_engine.launched_late):
        assert early > 10
        assert late == []
