"""Sampled answers with drafts are distributed as the model's own, whatever is drafted.

All answers of a few tokens are counted, and compared with their probabilities as transformers gives
them. A right engine fails one of these tests by chance once in a million times, and the seeds are
fixed.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.sample import rejection_sampler

from tests.support.drafter import Scripted, reading_alone
from tests.support.engine import engine, model_of, prompt, random_llama
from vllm_kvretrieval.drafting.lookup import Match
from vllm_kvretrieval.engine import drafter

pytestmark = pytest.mark.engine

PLACES = 3
SAMPLES, EACH = 800, 50
CHANCE = 1e-6
"""Of a right engine to fail a test."""
LEAST = 5
"""Expected answers of a kind that is counted for itself."""
DRAFTS = 3
SHORT, LONG = 40, 385
OPTIONS: dict[str, Any] = {
    "attention_backend": "kvretrieval",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 64,
    "enforce_eager": True,
    "seed": 0,
}

model = model_of(random_llama, 2, 2)


class Sampled(NamedTuple):
    """How requests are sampled.

    Attributes:
        temperature: Of the softmax.
        top_k: The likeliest tokens that are left.
        top_p: Their probability, of which the rest is left out.
        seed: Of the first request; None: vLLM's own.
    """

    temperature: float
    top_k: int
    top_p: float = 1.0
    seed: int | None = None

    def params(self, number: int, options: dict[str, Any]) -> SamplingParams:
        """Of ``EACH`` answers to one prompt."""
        return SamplingParams(
            n=EACH,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=None if self.seed is None else self.seed + number * EACH,
            max_tokens=PLACES,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_retrieval": options},
        )

    def probabilities(self, logits: torch.Tensor) -> dict[int, float]:
        """Of the tokens that may come."""
        kept = (logits / self.temperature).topk(self.top_k)
        shares = kept.values.softmax(-1)
        ahead = shares.cumsum(-1) - shares
        shares = torch.where(ahead < self.top_p, shares, 0)
        pairs = zip(kept.indices.tolist(), (shares / shares.sum()).tolist(), strict=True)
        return {token: share for token, share in pairs if share > 0}


WARM = Sampled(1.0, 3)
HOT = Sampled(2.0, 4, top_p=0.8, seed=1000)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    retrieval = {"budget": 128, "drafts": DRAFTS}
    with engine(model, additional_config={"kv_retrieval": retrieval}, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def logits(model: str) -> Callable[[Sequence[int]], torch.Tensor]:
    """The model's logits behind a context."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @torch.inference_mode()
    def of(context: Sequence[int]) -> torch.Tensor:
        return whole(torch.tensor([context]), logits_to_keep=1).logits[0, -1]

    return of


def expected(
    sampled: Sampled, asked: list[int], logits: Callable[[Sequence[int]], torch.Tensor]
) -> dict[tuple[int, ...], float]:
    """Probabilities of all answers."""
    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(PLACES):
        answers = {
            (*answer, token): likely * share
            for answer, likely in answers.items()
            for token, share in sampled.probabilities(logits([*asked, *answer])).items()
        }
    assert sum(answers.values()) == pytest.approx(1, abs=1e-5)
    return answers


def deviation(answers: Counter[tuple[int, ...]], likely: dict[tuple[int, ...], float]) -> float:
    """The chi-square statistic, by the bound that it exceeds with a probability of ``CHANCE``.

    Rare answers count as one kind. The bound is that of Laurent and Massart.
    """
    assert answers.keys() <= likely.keys()
    count = answers.total()
    common = [a for a, share in likely.items() if share * count >= LEAST]
    kinds = [(answers[a], likely[a] * count) for a in common]
    rest = count - sum(n for n, _ in kinds), count - sum(share for _, share in kinds)
    if rest[1] >= LEAST:
        kinds.append(rest)
    assert len(kinds) > 8
    statistic = sum((n - share) ** 2 / share for n, share in kinds)
    freedom, far = len(kinds) - 1, -math.log(CHANCE)
    return statistic / (freedom + 2 * math.sqrt(freedom * far) + 2 * far)


def draw(
    llm: LLM,
    asked: list[int],
    options: dict[str, Any],
    kinds: Sequence[Sampled | None],
    turns: int = SAMPLES // EACH,
) -> list[Counter[tuple[int, ...]]]:
    """The answers to a prompt, by how they are sampled; None: greedily, and once per turn.

    Requests of all kinds share steps.
    """
    greedy = SamplingParams(temperature=0, max_tokens=PLACES, ignore_eos=True, detokenize=False)
    params = [
        greedy if kind is None else kind.params(number, options)
        for number in range(turns)
        for kind in kinds
    ]
    prompts = [TokensPrompt(prompt_token_ids=asked)] * len(params)
    answers = llm.generate(prompts, params, use_tqdm=False)
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in kinds]
    for count, answer in zip(itertools.cycle(counts), answers, strict=False):
        count.update(tuple(one.token_ids) for one in answer.outputs)
    return counts


def follow(llm: LLM, texts: Sequence[Sequence[int]], right: float) -> None:
    """Let a script draft in place of our drafter."""

    def script(worker: Any) -> None:
        scripted = Scripted(worker.vllm_config)
        scripted.follow(texts, right)
        worker.drafter.propose, worker.scripted = scripted.propose, scripted

    llm.collective_rpc(script)


@pytest.fixture
def own_drafts(llm: LLM) -> Iterator[Callable[[], int]]:
    """Afterwards our drafter drafts again. The model drafts where it may, whatever lookups would
    find, and however little it takes to read the weights of a small one; returns how often."""

    def begin(worker: Any) -> None:
        names, model = vars(drafter), worker.drafter._model
        worker.before, worker.drafted = (names["find"], worker.drafter._costs), 0
        names["find"] = lambda tokens: Match(len(tokens) - 1, 0)
        worker.drafter._costs = reading_alone(worker)
        draft = model.draft

        def counting(rows: Sequence[Any]) -> Any:
            worker.drafted += len(rows)
            return draft(rows)

        model.draft = counting

    def end(worker: Any) -> None:
        vars(drafter)["find"], worker.drafter._costs = worker.before
        del worker.drafter._model.draft
        vars(worker.drafter).pop("propose", None)

    llm.collective_rpc(begin)
    yield lambda: llm.collective_rpc(lambda worker: worker.drafted)[0]
    llm.collective_rpc(end)


@pytest.mark.parametrize("right", [0.0, 0.7], ids=["all wrong", "some right"])
def test_each_request_is_sampled_by_its_own_numbers(llm, logits, own_drafts, right):
    """Two kinds of requests, and greedy ones, share steps in which drafts are verified."""
    asked, likeliest = prompt(SHORT), list[int]()
    for _ in range(PLACES):
        likeliest.append(int(logits([*asked, *likeliest]).argmax()))
    follow(llm, [[*asked, *likeliest]], right)
    kinds = [WARM, HOT, None]
    *counts, greedy = draw(llm, asked, {}, kinds)
    assert greedy == {tuple(likeliest): SAMPLES // EACH}
    of = [expected(kind, asked, logits) for kind in kinds if kind is not None]
    for answers, likely in zip(counts, of, strict=True):
        assert deviation(answers, likely) < 1
    # Requests that are sampled in another way would be found out.
    assert deviation(counts[0], expected(Sampled(2.0, 3), asked, logits)) > 1
    drafted, accepted = llm.collective_rpc(lambda worker: worker.scripted.drafted)[0]
    assert drafted > SAMPLES
    assert (accepted > 0) == (right > 0)


def test_a_seed_repeats_an_answer(llm, own_drafts):
    """As long as the same is drafted."""
    asked = prompt(SHORT)
    follow(llm, [asked], 0.0)
    first = draw(llm, asked, {}, [HOT], turns=3)
    follow(llm, [asked], 0.0)
    assert draw(llm, asked, {}, [HOT], turns=3) == first


def test_an_answer_may_end_behind_its_drafts(llm, own_drafts):
    """As soon as it has ``min_tokens`` with them, and not before."""

    def answer(**others: Any) -> list[int]:
        params = SamplingParams(
            temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, **others
        )
        (got,) = llm.generate([TokensPrompt(prompt_token_ids=asked)], params, use_tqdm=False)
        return list(got.outputs[0].token_ids)

    asked, ended = prompt(SHORT), 0
    follow(llm, [], 0.0)
    text = answer()
    for place in (n for n in range(2, 14) if text[n] not in text[:n]):
        stops = {"stop_token_ids": [text[place]]}
        follow(llm, [[*asked, *text]], 1.0)
        assert answer(min_tokens=place, **stops) == text[: place + 1]
        ended += 1
        follow(llm, [], 0.0)
        longer = answer(min_tokens=place + 1, **stops)
        follow(llm, [[*asked, *text]], 1.0)
        assert answer(min_tokens=place + 1, **stops) == longer
    assert ended > DRAFTS


def test_steps_without_drafts_verify_nothing(llm, own_drafts):
    """They are sampled as in an engine that never drafts, which takes less time."""

    def count(worker: Any) -> None:
        verify, worker.verified = rejection_sampler.rejection_sample, 0

        def counting(*args: Any, **options: Any) -> torch.Tensor:
            worker.verified += 1
            return verify(*args, **options)

        rejection_sampler.rejection_sample, worker.uncounted = counting, verify

    def counted(worker: Any) -> int:
        rejection_sampler.rejection_sample = worker.uncounted
        return worker.verified

    asked = prompt(SHORT)
    for texts in ([], [asked]):  # without texts nothing is drafted
        follow(llm, texts, 0.0)
        llm.collective_rpc(count)
        draw(llm, asked, {}, [WARM, HOT, None], turns=1)
        assert (llm.collective_rpc(counted)[0] > 0) == bool(texts)


def test_lossless_answers_are_sampled_as_full_attention_does(llm, logits, own_drafts):
    """And those of the budget's pages are not."""
    asked = prompt(LONG)
    of = [expected(kind, asked, logits) for kind in (WARM, HOT)]
    for answers, likely in zip(draw(llm, asked, {"lossless": True}, [WARM, HOT]), of, strict=True):
        assert deviation(answers, likely) < 1
    assert own_drafts() > SAMPLES
    approximate = draw(llm, asked, {}, [WARM])[0]
    outside = approximate.total() - sum(approximate[answer] for answer in of[0])
    assert outside > 0 or deviation(approximate, of[0]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("drawn", ["greedy", "probabilistic"])
def test_drafts_of_a_model(model, logits, drawn):
    """The model itself as draft model, which knows nothing of ``top_k`` and ``top_p``."""
    by = {
        "method": "draft_model",
        "model": model,
        "num_speculative_tokens": DRAFTS,
        "draft_sample_method": drawn,
    }
    asked = prompt(SHORT)
    with engine(model, speculative_config=by, **OPTIONS) as llm:
        *counts, greedy = draw(llm, asked, {}, [WARM, HOT, None])
    assert len(greedy) == 1
    for answers, kind in zip(counts, (WARM, HOT), strict=True):
        assert deviation(answers, expected(kind, asked, logits)) < 1
