"""Retrieval inside vLLM's scheduler: what a request gets does not depend on its company.

One engine with a cache too small for four long requests. Its model runs in float32: what matters
here is whose pages and whose state a request gets, and rounding would only blur that (a sum over
another batch is rounded differently, and in bfloat16 that turns near-ties into other tokens, in
stock vLLM just as here).
"""

import os
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engine import (
    Answer,
    Request,
    alone,
    assert_resumed,
    assert_same,
    difference,
    drive,
    engine,
    model_of,
    novel,
    preemptions,
    shortened,
)
from tests.support.turns import chat, record_sparse, recorded_sparse, with_and_without_cache
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.exactness_levels import EXACT
from vllm_kvretrieval.upstream import primitives

pytestmark = [pytest.mark.engine, pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
LAYERS = 4
BUDGET = 256
EXACT_BELOW, PROMPT = 266, 258  # beyond the budget
CHUNK = 256  # tokens per step
BLOCK = 128
SEQUENCES = 4
STOCK = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": SEQUENCES,
    "max_num_batched_tokens": CHUNK,
    "num_gpu_blocks_override": 26,  # one of them vLLM's own
    "enforce_eager": True,
}
TOLERANCE = 1e-3

model = model_of(shortened, MODEL, LAYERS)


@pytest.fixture(scope="module")
def stock(model):
    """The answers of vLLM without retrieval. Its engine ends before ours starts."""
    with engine(model, **STOCK) as llm:
        short = Request(novel(llm, 200, 0), BUDGET - 200)
        long = Request(novel(llm, 700, 50), 16)
        grows = Request(novel(llm, PROMPT, 0), 80)
        asked = {"short": short, "long": long, "grows": grows}
        return {name: alone(llm, request) for name, request in asked.items()}


@pytest.fixture(scope="module")
def llm(model, stock):
    with engine(
        model,
        attention_backend="freekv",
        additional_config={"kv_retrieval": {"budget": BUDGET, "exact_below": EXACT_BELOW}},
        **STOCK,
    ) as llm:
        yield llm


def test_the_worker_keeps_few_of_what_products_need(llm):
    """tests/engine/test_primitives.py has what that is good for."""
    kept = llm.collective_rpc(lambda worker: os.environ.get(primitives.CAPACITIES[0]))
    assert kept == [str(primitives.FEW)]


def slots_in_use(llm):
    """Slots of the table of requests that are taken, once the worker knows who has finished."""
    (state,) = llm.collective_rpc(
        lambda worker: (len(worker.requests), sorted(worker.requests._free))
    )
    used, free = state
    assert len(set(free)) == SEQUENCES - used, "no slot is free twice"
    return used


def corrected_by(llm, request):
    """KV heads that were corrected for a request, per slot."""
    llm.collective_rpc(lambda worker: worker.requests.corrected.zero_())
    drive(llm, [request])
    return llm.collective_rpc(lambda worker: worker.requests.corrected.tolist())[0]


def scheduler(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


# ------------------------------------------------------------------------ against stock vLLM


def test_within_the_budget_answers_are_those_of_stock_vllm(llm, stock):
    answer = alone(llm, Request(novel(llm, 200, 0), BUDGET - 200, {}))
    assert_same(answer, stock["short"], tolerance=1e-5)


def test_contexts_below_a_length_are_attended_to_in_full(llm, stock):
    llm.collective_rpc(record_sparse)
    answer = alone(llm, Request(novel(llm, PROMPT, 0), 80, {}))
    ((positions,),) = (found.values() for found in llm.collective_rpc(recorded_sparse))
    assert min(positions) == EXACT_BELOW - 1, "the token that completes the length"
    assert len(positions) == PROMPT + 80 - EXACT_BELOW
    whole = EXACT_BELOW - PROMPT
    own, full = (Answer(of.tokens[:whole], of.logprobs[:whole]) for of in (answer, stock["grows"]))
    assert_same(own, full, tolerance=1e-5)


def test_exact_requests_get_the_answers_of_stock_vllm(llm, stock):
    long = Request(novel(llm, 700, 50), 16, {"exact": True})
    assert_same(alone(llm, long), stock["long"], tolerance=1e-5)
    long.options = {}
    apart = difference(alone(llm, long), stock["long"])
    assert apart > 100 * TOLERANCE, "retrieval attends to a part of the context"


# --------------------------------------------------------------------------- batches of many


def test_a_crowd_of_different_requests(llm):
    """More requests than run at once, of different lengths, options, arrivals and ends.

    Long prompts take several steps beside decoding neighbours (chunked prefill, mixed steps), and
    requests leave from the middle of the batch, so that vLLM moves the others.
    """
    crowd = [
        Request(novel(llm, 600, 0), 40, {}),
        Request(novel(llm, 60, 100), 50, {}),
        Request(novel(llm, 1100, 200), 24, {"budget": 128}, arrives=3),
        Request(novel(llm, 500, 300), 12, {"method": "streamingllm"}, arrives=5),
        Request(novel(llm, 700, 400), 30, {"correction_threshold": 1.0}, arrives=14),
        Request(novel(llm, 500, 500), 20, {"exact": True}, arrives=20),
        Request(novel(llm, 650, 600), 16, {"correction_threshold": -1.0}, arrives=21),
        Request(novel(llm, 30, 700), 9, {"exact": False, "method": "freekv"}, arrives=30),
    ]
    expected = [alone(llm, request) for request in crowd]
    answers = drive(llm, crowd)
    for answer, request in zip(answers, expected, strict=True):
        assert_same(answer, request, TOLERANCE)
    first = crowd[2].arrives, answers[2].steps[0]
    beside = [step for step in answers[0].steps if first[0] < step < first[1]]
    assert len(beside) >= 3, "a prompt was read in chunks beside a decoding request"
    assert answers[4].steps[0] > answers[3].steps[-1], "a request waited for another to end"


def test_the_order_of_arrival_does_not_matter(llm):
    """The same requests in two orders: other rows, other slots."""
    options: list[dict[str, Any]] = [{}, {"method": "streamingllm"}, {"correction_threshold": -1}]
    lengths = (400, 600, 850)
    requests = [Request(novel(llm, n, n), 8, o) for n, o in zip(lengths, options, strict=True)]
    there = drive(llm, requests)
    back = drive(llm, requests[::-1])[::-1]
    for a, b in zip(there, back, strict=True):
        assert_same(a, b, TOLERANCE)


def test_a_chunk_of_one_token_is_prefill(llm):
    """Attention over sink and window only would give another first token."""
    prompt = novel(llm, 3 * CHUNK + 1, 60)
    little = alone(llm, Request(prompt, 2, {"method": "streamingllm", "budget": 96}))
    exact = alone(llm, Request(prompt, 2, {"exact": True}))
    assert little.steps[0] == 3, "the last chunk was a step of its own"
    assert little.logprobs[0] == pytest.approx(exact.logprobs[0], abs=TOLERANCE)
    assert little.tokens[0] == exact.tokens[0]
    assert abs(little.logprobs[1] - exact.logprobs[1]) > 10 * TOLERANCE, "the next step decodes"


def test_a_slots_next_owner_starts_afresh(llm):
    """This holds even if its context is one token longer than the last one of the seat's owner
    before."""
    first = Request(novel(llm, 500, 70), 40, {"correction_threshold": -1})
    reached = 500 + 40 - 1  # tokens in the context at its last step
    second = Request(novel(llm, reached, 170), 5, {"correction_threshold": -1})
    heads = llm.collective_rpc(lambda worker: worker.requests.retrieval_heads)[0]
    by_first, by_second = (corrected_by(llm, request) for request in (first, second))
    assert sorted(by_first) == [0, 0, 0, heads], "at its first decode step, and never again"
    assert by_second == by_first, "the same slot, and the same there"


# ------------------------------------------------------------------------------ prefix caching


def test_prefix_caching(llm):
    """A second request over a document, a longer one, and one of another method."""
    document = novel(llm, 600, 80)
    question = novel(llm, 40, 180)
    plain = Request(document, 16, {}, cache=True)
    longer = Request(document + question, 16, {}, cache=True)
    other = Request(document, 16, {"method": "streamingllm"}, cache=True)
    expected = [alone(llm, request) for request in (plain, longer, other)]
    assert [answer.cached for answer in expected] == [0, 0, 0]
    assert expected[0].logprobs != expected[2].logprobs

    llm.reset_prefix_cache()
    first, second = (drive(llm, [plain])[0] for _ in range(2))
    assert first.cached == 0
    assert second.cached == len(document) // BLOCK * BLOCK
    assert_same(second, expected[0], TOLERANCE)
    answers = drive(llm, [longer, other, plain])  # together, on the same blocks
    for answer, request in zip(answers, [*expected[1:], expected[0]], strict=True):
        assert answer.cached == second.cached
        assert_same(answer, request, TOLERANCE)


@pytest.mark.parametrize("method", ["freekv", "streamingllm"])
def test_exact_answers_do_not_depend_on_what_was_decoded_before(llm, method):
    """A chat whose first answer is approximate: it ends block 5."""
    llm.reset_prefix_cache()
    own = {"budget": 128, "method": method}
    prompt = chat(llm, novel(llm, 740, 80), [own], 30)
    (ordinary,) = drive(llm, [Request(prompt, 1, own, cache=True)])
    assert ordinary.cached == 6 * BLOCK
    answer, expected = with_and_without_cache(llm, prompt, {"exact": True})
    assert answer.cached == 5 * BLOCK
    assert_same(answer, expected, TOLERANCE)
    answer, expected = with_and_without_cache(llm, prompt, {"exact": True})
    assert answer.cached == len(prompt) // BLOCK * BLOCK, "what it has computed is exact"
    assert_same(answer, expected, TOLERANCE)


def test_no_token_of_a_sparse_step_is_in_an_exact_block(llm, monkeypatch):
    """Levels against what the worker has done, in a crowd of which one is preempted."""
    blocks, manager = {}, scheduler(llm).kv_cache_manager
    free = manager.free

    def record(request):
        held = manager.get_blocks(request.request_id).blocks[0]
        blocks[request.request_id] = [(block, block.block_hash) for block in held]
        free(request)

    monkeypatch.setattr(manager, "free", record)
    llm.reset_prefix_cache()
    llm.collective_rpc(record_sparse)
    lengths = (1011, 1010, 950)
    options: list[dict[str, Any]] = [{}, {"method": "streamingllm"}, {"exact": True}]
    crowd = [Request(novel(llm, n, n), 40, o) for n, o in zip(lengths, options, strict=True)]
    crowd += [Request(novel(llm, n, 80), 150, {}, arrives=60) for n in (120, 380)]
    drive(llm, crowd)
    (sparse,) = llm.collective_rpc(recorded_sparse)
    assert len(sparse) == 4
    levels, seen = scheduler(llm).levels, []
    for name, positions in sparse.items():
        for place, (block, key) in enumerate(blocks[name]):
            if key is not None and block.block_hash == key:
                first = min(positions, default=1 << 20)
                holds_sparse = first < (place + 1) * BLOCK
                assert (levels.of(block) != EXACT) == holds_sparse, (name, place)
                seen.append(holds_sparse)
    assert True in seen
    assert False in seen


# ------------------------------------------------------------------- preemption and abortion


def test_preemption(llm, monkeypatch):
    """Three requests outgrow the cache; the last one is put back and resumed.

    Resumption computes the tokens generated so far again, as a prompt: from there on the request is
    to answer as a new one would that has them in its prompt. (Its last chunk is longer than one
    token here. A chunk of one generated token is a decode step, whoever computes it.)
    """
    preempted = preemptions(llm, monkeypatch)
    # 8 of the 25 blocks each, and soon 9 for the first two.
    crowd = [Request(novel(llm, n, n), 40, {}) for n in (1011, 1010, 950)]
    one, expected = (alone(llm, crowd[i]) for i in (1, 2))
    assert preempted == []
    _, neighbour, answer = drive(llm, crowd)
    assert [request_id.split("-")[0] for request_id in preempted] == ["2"]
    assert scheduler(llm).kv_cache_manager.usage == 0
    assert_same(neighbour, one, TOLERANCE)

    assert_resumed(llm, crowd[2], answer, expected, TOLERANCE)


def test_abortion(llm):
    """One request is aborted in its prefill, one while it decodes; the others go on."""
    lengths = (400, 500, 1200, 600)
    crowd = [Request(novel(llm, n, n), 30, {}) for n in lengths]
    expected = [alone(llm, crowd[i]) for i in (0, 3)]
    crowd[1].aborts = 12
    crowd[2].aborts = 8
    crowd[3].arrives = 13
    answers = drive(llm, crowd)
    assert 0 < len(answers[1].tokens) < 30
    assert answers[2].tokens == []
    assert_same(answers[0], expected[0], TOLERANCE)
    assert_same(answers[3], expected[1], TOLERANCE)
    drive(llm, [Request(novel(llm, 40, 0), 1, {})])
    assert slots_in_use(llm) == 1, "that of the last request, until the next step"


# -------------------------------------------------------------------------------- sampling


def test_several_completions_of_one_prompt(llm):
    prompt = TokensPrompt(prompt_token_ids=novel(llm, 600, 5))
    greedy = SamplingParams(temperature=1, top_k=1, n=3, max_tokens=10)
    (output,) = llm.generate([prompt], greedy, use_tqdm=False)
    expected = alone(llm, Request(prompt["prompt_token_ids"], 10, {}))
    for completion in output.outputs:
        assert list(completion.token_ids) == expected.tokens
    sampled = SamplingParams(temperature=1, n=3, max_tokens=10)
    (output,) = llm.generate([prompt], sampled, use_tqdm=False)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


def test_a_seed_repeats_an_answer(llm):
    """In however many steps the prompt is read, and whatever is read beside it.

    Of vLLM 0.32 alone a seed and a prompt in chunks end the engine on a CPU.
    """
    prompts = [TokensPrompt(prompt_token_ids=novel(llm, length, 5)) for length in (600, 1000)]

    def sampled(prompts, seed=7, chunks=True):
        params = SamplingParams(
            temperature=1, seed=seed, max_tokens=10, skip_reading_prefix_cache=chunks
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    together = sampled(prompts)
    assert [sampled([each])[0] for each in prompts] == together
    assert sampled(prompts, chunks=False) == together, "found in the prefix cache"
    assert sampled(prompts, seed=8)[0] != together[0]


def test_log_probs(llm):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5, prompt_logprobs=1)
    prompt = novel(llm, 600, 6)
    expected = alone(llm, Request(prompt, 6, {}))
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.token_ids == expected.tokens
    assert len(output.prompt_logprobs) == 600
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(position) == 5
        assert position[token].rank == 1
        assert max(entry.logprob for entry in position.values()) == position[token].logprob


def test_structured_output(llm):
    params = SamplingParams(
        temperature=0,
        max_tokens=16,
        structured_outputs=StructuredOutputsParams(choice=["Knightley", "Woodhouse"]),
    )
    prompt = TokensPrompt(prompt_token_ids=novel(llm, 600, 7))
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].text in ("Knightley", "Woodhouse")


def test_a_bad_option_fails_its_request_alone(llm):
    good = Request(novel(llm, 600, 8), 12, {})
    bad = Request(novel(llm, 600, 9), 12, {"budget": 2 * BUDGET})
    expected = alone(llm, good)
    core = llm.llm_engine
    prompt = TokensPrompt(prompt_token_ids=good.prompt)
    core.add_request("good", prompt, good.params())
    for _ in range(6):
        core.step()
    with pytest.raises(RetrievalConfigError, match="budget=512 exceeds the server's limit of 256"):
        core.add_request("bad", prompt, bad.params())
    answer = []
    while core.has_unfinished_requests():
        answer = [output.outputs[0].token_ids for output in core.step()]
    assert [list(tokens) for tokens in answer] == [expected.tokens]
    assert alone(llm, good).tokens == expected.tokens
