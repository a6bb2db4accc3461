"""Lossless mode in an engine: answers are full attention's, token by token, in fewer steps."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.texts import emma
from tests.support.drafter import reading_alone
from tests.support.engine import Answer, Request, drive, engine, preemptions, shortened
from vllm_kvretrieval.drafting.lookup import Match
from vllm_kvretrieval.engine import drafter

pytestmark = [pytest.mark.engine, pytest.mark.model]

FULL: dict[str, Any] = {"exact": True, "drafts": 0}
LOSSLESS: dict[str, Any] = {"lossless": True}
BLOCK = 128
TOKENS = 40
PROMPTS = 20
HOMES = [
    {},
    pytest.param({"home": "disk"}, marks=pytest.mark.slow),
    pytest.param({"page_size": 16, "index": "min_max"}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=HOMES, ids=str)
def llm(request, tmp_path_factory):
    """In float32, where a step of several rows differs from single ones by less than choices do."""
    options = {"budget": 256, "drafts": 4, "also": ["full"]}
    with engine(
        shortened(tmp_path_factory.mktemp("model"), "SmolLM2-135M-Instruct", 8),
        attention_backend="kvretrieval",
        additional_config={"kv_retrieval": options | request.param},
        max_model_len=2048,
        max_num_seqs=4,
        dtype="float32",
        enforce_eager=True,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts(llm) -> list[list[int]]:
    """Of 300 to 1,440 tokens; the shortest are within the budget for a while."""
    text = llm.get_tokenizer().encode(emma()[:120_000])
    return [text[1000 * n : 1000 * n + 240 + 60 * n] for n in range(PROMPTS)]


@pytest.fixture(scope="module")
def full(llm, prompts) -> list[Answer]:
    return drive(llm, [Request(prompt, TOKENS, FULL) for prompt in prompts])


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "alone"])
def drafting(request, llm) -> Iterator[Callable[[], list[int]]]:
    """Returns how many rows the model has drafted for, and how many tokens; ``alone``: lookups find
    nothing, and contexts cost all of a step, which are a small part of that of a small model."""

    alone = request.param

    def begin(worker: Any) -> None:
        names, model, counts = vars(drafter), worker.drafter._model, [0, 0]
        worker.before, worker.counts = (names["find"], worker.drafter._costs), counts
        draft = model.draft
        if alone:
            names["find"] = lambda tokens: Match(len(tokens) - 1, 0)
            worker.drafter._costs = reading_alone(worker)

        def counting(rows: Sequence[Any]) -> Any:
            counts[0] += len(rows)
            counts[1] += sum(row.drafts for row in rows)
            return draft(rows)

        model.draft = counting

    def end(worker: Any) -> None:
        vars(drafter)["find"], worker.drafter._costs = worker.before
        del worker.drafter._model.draft

    llm.collective_rpc(begin)
    yield lambda: llm.collective_rpc(lambda worker: worker.counts)[0]
    llm.collective_rpc(end)


def steps_of(answers: Sequence[Answer]) -> int:
    """At how many steps each of the answers got tokens, together."""
    return sum(len(set(answer.steps)) for answer in answers)


def test_answers_are_those_of_full_attention(request, llm, prompts, full, drafting):
    answers = drive(llm, [Request(prompt, TOKENS, LOSSLESS) for prompt in prompts])
    assert [a.tokens for a in answers] == [a.tokens for a in full]
    assert steps_of(answers) < 0.75 * steps_of(full), "drafts are accepted"
    for answer, other in zip(answers, full, strict=True):
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    if "alone" in request.node.name:
        rows, tokens = drafting()
        assert rows > 4 * PROMPTS
        assert tokens > 2 * rows


def test_beside_requests_of_other_kinds(llm, prompts, full, drafting):
    """They share steps: prompts that are read, drafts that are verified, and single tokens."""
    others: list[dict[str, Any]] = [{}, {"drafts": 0}, FULL, {"method": "streamingllm"}]
    requests = [
        Request(prompts[8 + n], TOKENS, LOSSLESS if n % 2 else others[n // 2], arrives=3 * n)
        for n in range(8)
    ]
    answers = drive(llm, requests)
    for n in (1, 3, 5, 7):
        assert answers[n].tokens == full[8 + n].tokens
    assert answers[4].tokens == full[12].tokens  # of FULL


def test_what_it_has_computed_is_shared_as_exact(llm, prompts, drafting):
    """And nothing of its drafts is in what others find."""
    prompt = [7, *prompts[18][: 10 * BLOCK - 10]]
    first = drive(llm, [Request(prompt, TOKENS, LOSSLESS, cache=True)])[0]
    more = [*prompt, *first.tokens]
    found = drive(llm, [Request(more, TOKENS, FULL, cache=True)])[0]
    anew = drive(llm, [Request(more, TOKENS, FULL)])[0]
    assert found.cached > len(prompt)
    assert found.tokens == anew.tokens
    assert found.logprobs == pytest.approx(anew.logprobs, abs=1e-3)


def test_after_a_lossless_answer_others_retrieve_as_before(llm, prompts, drafting):
    """Drafts leave nothing in what selects."""
    asked = Request(prompts[17], TOKENS, {"drafts": 0})
    before = drive(llm, [asked])[0]
    drive(llm, [Request(prompt, TOKENS, LOSSLESS) for prompt in prompts[14:18]])
    after = drive(llm, [dataclasses.replace(asked)])[0]
    assert after.tokens == before.tokens
    assert after.logprobs == before.logprobs


@pytest.mark.slow
def test_sampled_answers(llm, prompts, drafting):
    """Drafts are rejected by chance, so that tokens are as likely as without. At a temperature near
    0 few places have a choice."""
    handed_in = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts[8:20]]
    texts = []
    for options in (FULL, LOSSLESS):
        params = SamplingParams(
            temperature=0.01,
            seed=1,
            max_tokens=TOKENS // 2,
            ignore_eos=True,
            extra_args={"kv_retrieval": options},
        )
        answers = llm.generate(handed_in, params, use_tqdm=False)
        texts.append([list(answer.outputs[0].token_ids) for answer in answers])
    assert sum(one == other for one, other in zip(*texts, strict=True)) > 8


def test_a_stop_string_ends_within_a_draft(llm, prompts, full):
    tokenizer = llm.get_tokenizer()
    text = tokenizer.decode(full[15].tokens)
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    for options in (FULL, LOSSLESS):
        answer = _generate(llm, prompts[15], options, stop=[stop])
        assert answer == text[: text.index(stop)]


def test_structured_output(llm, prompts):
    """Drafts that the grammar forbids are not verified; what it leaves is full attention's."""
    choices = ["Knightley met Woodhouse", "Woodhouse met Emma again", "Emma"]
    forced = StructuredOutputsParams(choice=choices)
    for prompt in prompts[12:16]:
        texts = [_generate(llm, prompt, way, structured_outputs=forced) for way in (FULL, LOSSLESS)]
        assert texts[0] == texts[1] in choices


def test_interrupted_requests(llm, prompts, full, drafting, monkeypatch):
    """They lose their blocks with drafts in them, and go on."""
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    pool, of = scheduler.kv_cache_manager.block_pool, slice(17, 20)
    enough = sum(len(prompt) // BLOCK + 1 for prompt in prompts[of])  # for the prompts
    held = pool.get_new_blocks(pool.get_num_free_blocks() - enough)
    interrupted = preemptions(llm, monkeypatch)
    try:
        answers = drive(llm, [Request(prompt, TOKENS, LOSSLESS) for prompt in prompts[of]])
    finally:
        pool.free_blocks(held)
    assert interrupted
    assert [a.tokens for a in answers] == [a.tokens for a in full[of]]


def _generate(llm: LLM, prompt: list[int], options: dict[str, Any], **params: Any) -> str:
    asked = SamplingParams(
        temperature=0, max_tokens=TOKENS, extra_args={"kv_retrieval": options}, **params
    )
    (answer,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], asked, use_tqdm=False)
    return answer.outputs[0].text
