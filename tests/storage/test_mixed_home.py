"""A cache on disk for models with layers of several kinds.

Layers with full attention lie in the file; windows, recurrent states and chunks of the context stay
in memory, in blocks of their own. Small models with random weights, in float32.
"""

from contextlib import contextmanager

import pytest
import torch

from tests.support import mixed_models
from tests.support.device_models import ROTATED_IN_TORCH
from tests.support.engine import (
    Request,
    assert_resumed,
    assert_same,
    drive,
    engine,
    preemptions,
    prompt,
)

pytestmark = pytest.mark.engine

BUDGET = 256
ALSO = ["kvretrieval"]
METHODS = ["freekv", *ALSO]
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}
RETRIEVING = {
    "gemma3": [5, 11],
    "gemma3n": [1, 3, 5],
    "gemma4": [1, 3],
    "gemma4_shared": [1, 3, 5, 7],
    "gpt_oss": [1, 3],
    "llama4": [1, 3],
    "lfm2": [1, 3, 5],
    "granite": [1, 3],
    "nemotron": [1, 4],
    "falcon_h1": [1, 2, 3],
    "zamba2": [1, 3, 4, 6],
    "qwen3_next": [1, 3],
    "qwen3_5": [1, 3],
}
"""The layers that retrieve."""
BFLOAT16 = {"qwen3_next", "qwen3_5"}
"""Families whose kernels for CPUs take nothing else."""
UNCACHED = {"granite", "nemotron", "falcon_h1", "zamba2"}
"""Those that stock vLLM serves on CPUs without its prefix cache only, if prompts are long."""
OWN = {"gemma3n": [1, 3], "gemma4_shared": [1, 3]}
"""Those that have keys and values of their own, where others read them."""
ROUNDING = dict.fromkeys(RETRIEVING, 1e-4) | dict.fromkeys(BFLOAT16, 0.05) | {"zamba2": 1e-3}
"""Tolerance of log-probs. Most are equal bit by bit; where a prefix is found, or a request is
preempted, a prompt is read in other chunks, as in stock vLLM without its prefix cache."""


def crowd(options=None):
    """They take and give back blocks while others run; no context exceeds the budget."""
    return [Request(prompt(30 + 40 * i % 160, i), 60, options, arrives=5 * i) for i in range(10)]


def long(options=None):
    """Prompts in chunks, beside others that decode."""
    return [Request(prompt(900 + 100 * i, 50 + i), 40, options, arrives=3 * i) for i in range(3)]


def questions(options=None):
    """Three about one document, and what is asked after the last answer."""
    document = prompt(700, 100)
    return [Request(document + prompt(30, s), 140, options, cache=True) for s in (101, 102, 103)]


def ask(llm, options=None):
    """Answers to questions, one after the other, and to one that follows the first answer."""
    asked = questions(options)
    answers = [drive(llm, [request])[0] for request in asked]
    said = asked[0].prompt + answers[0].tokens
    turn = Request(said + prompt(9, 104), 8, options, cache=True)
    return [*answers, *drive(llm, [turn])]


QUICK = ["gemma4_shared", "lfm2"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in RETRIEVING if name not in QUICK]


@pytest.fixture(scope="module", params=[*QUICK, *SLOW])
def model(request, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    getattr(mixed_models, request.param)().save_pretrained(path)
    return request.param, str(path)


def options_of(name):
    """Of the engine of a family."""
    return OPTIONS | ({"dtype": "bfloat16"} if name in BFLOAT16 else {})


@pytest.fixture(scope="module")
def stock(model):
    """The answers of vLLM without retrieval; of LFM2 without the kernel that rotates it wrongly."""
    options = options_of(model[0]) | {"enable_prefix_caching": model[0] not in UNCACHED}
    if model[0] == "lfm2":
        options["compilation_config"] = ROTATED_IN_TORCH
    with engine(model[1], **options) as llm:
        return drive(llm, crowd()), drive(llm, long()), ask(llm)


def retrieving(model, **home):
    retrieval = {"kv_retrieval": {"budget": BUDGET, "max_budget": 2048, "also": ALSO} | home}
    options = options_of(model[0])
    return engine(model[1], attention_backend="freekv", additional_config=retrieval, **options)


@pytest.fixture(scope="module")
def in_memory(model, stock):
    """The answers with the cache in memory. Its engine ends before that with the file starts."""
    with retrieving(model) as llm:
        return {method: drive(llm, long({"method": method})) for method in METHODS}


@pytest.fixture(scope="module")
def llm(model, in_memory, tmp_path_factory):
    with retrieving(model, home="disk", home_path=str(tmp_path_factory.mktemp("home"))) as llm:
        yield llm


def scheduler(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


@contextmanager
def scarce(llm, tokens):
    """Home has blocks for so many tokens."""
    pool = scheduler(llm).kv_cache_manager.block_pool
    free = tokens // llm.llm_engine.vllm_config.cache_config.block_size
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - free)
    yield
    pool.free_blocks(taken)


def test_where_layers_lie(llm, model):
    """Those with full attention in the file, the others in memory; a block lies in one of both."""

    def describe(worker):
        layers = worker.vllm_config.compilation_config.static_forward_context
        at_home, numbers = {*worker.storage.slow_layers}, worker.planner.layer_numbers
        blocks = worker.planner.split
        shapes = {
            name: layer.kv_cache.shape[0] for name, layer in layers.items() if name in at_home
        }
        pages = worker.storage.block_pages
        return (
            [numbers[name] for name in worker.retrieval_layers],
            [numbers[name] for name in at_home],
            {shape // pages for shape in shapes.values()} == {blocks.blocks},
            blocks,
        )

    ((retrieve, at_home, only_its_blocks, split),) = llm.collective_rpc(describe)
    assert retrieve == RETRIEVING[model[0]]
    assert sorted(at_home) == OWN.get(model[0], retrieve)
    assert only_its_blocks
    managers = scheduler(llm).kv_cache_manager.coordinator.single_type_managers
    for number, manager in enumerate(managers):
        free = manager.block_pool.free_block_queue.get_all_free_blocks()
        home = number in split.homes
        assert {block.block_id < split.blocks for block in free} == {home}
        assert len(free) == (split.blocks - 1 if home else split.others)


def test_short_contexts_are_answered_as_by_stock_vllm(llm, model, stock):
    for answer, expected in zip(drive(llm, crowd({})), stock[0], strict=True):
        assert_same(answer, expected, tolerance=ROUNDING[model[0]])


@pytest.mark.parametrize("options", [{"exact": True}, {"budget": 2048}], ids=str)
def test_whole_contexts_are_answered_as_by_stock_vllm(llm, model, stock, options):
    """Read in place, or in slots."""
    for answer, expected in zip(drive(llm, long(options)), stock[1], strict=True):
        assert_same(answer, expected, tolerance=ROUNDING[model[0]])


@pytest.mark.parametrize("method", METHODS)
def test_same_answers_as_in_memory(llm, model, in_memory, stock, method):
    """And others than stock's: what is attended to is selected."""
    answers = drive(llm, long({"method": method}))
    for answer, expected, whole in zip(answers, in_memory[method], stock[1], strict=True):
        assert_same(answer, expected, tolerance=ROUNDING[model[0]])
        assert answer.logprobs[1:] != pytest.approx(whole.logprobs[1:], abs=1e-3)


def test_every_question_finds_the_document(llm, model, stock):
    """The second one, too, and a next turn finds the last answer."""
    answers = ask(llm, {"exact": True})
    for answer, expected in zip(answers, stock[2], strict=True):
        assert_same(answer, expected, tolerance=ROUNDING[model[0]])
    size = max(
        m.block_size for m in scheduler(llm).kv_cache_manager.coordinator.single_type_managers
    )
    whole = 700 // size * size
    expected = [0, whole, whole, 868 // size * size]
    assert [answer.cached for answer in answers] == expected


def test_a_preempted_request_goes_on(llm, model, monkeypatch):
    requests = [Request(prompt(n, n), 40, {}) for n in (1011, 1010, 950)]
    alone = [drive(llm, [request])[0] for request in requests]
    preempted = preemptions(llm, monkeypatch)
    with scarce(llm, 3 * 1024):
        answers = drive(llm, requests)
    assert preempted
    for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if str(number) in {name.split("-")[0] for name in preempted}:
            assert_resumed(llm, request, answer, alone[number], ROUNDING[model[0]])
        else:
            assert_same(answer, alone[number], tolerance=ROUNDING[model[0]])


def test_blocks_that_home_has_lost(llm):
    """The request that holds them fails, and others go on."""

    def lose(worker, block):
        lost = [{block * worker.storage.block_pages}]
        worker.storage.home.take_lost = lambda page_bytes: lost.pop() if lost else set()

    core, requests = llm.llm_engine, {"lost": prompt(600, 70), "other": prompt(40, 71)}
    for name, ids in requests.items():
        core.add_request(name, {"prompt_token_ids": ids}, Request(ids, 20, {}).params())
    reasons = {}
    for step in range(60):
        if step == 6:
            blocks = scheduler(llm).kv_cache_manager.coordinator.get_blocks(
                next(r.request_id for r in scheduler(llm).running if len(r.prompt_token_ids) == 600)
            )
            (home,) = (b for n, b in enumerate(blocks) if n in scheduler(llm)._homes)
            llm.collective_rpc(lose, args=(home[0].block_id,))
        for output in core.step():
            if output.finished:
                reasons[output.request_id] = output.outputs[0].finish_reason
    assert reasons == {"lost": "error", "other": "length"}
