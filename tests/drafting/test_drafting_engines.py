"""Drafts in engines with adapters, with a store, and with several workers.

Requests attend to their whole contexts, or to parts; which drafts are right decides about neither.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from vllm import LLM

from tests.support.adapters import random_lora
from tests.support.drafter import speculation
from tests.support.engine import (
    Answer,
    Request,
    alone,
    assert_same,
    difference,
    drive,
    engine,
    model_of,
    prompt,
    random_llama,
)

pytestmark = pytest.mark.engine

DRAFTS = 4
LENGTH, BLOCK, GENERATED = 600, 128, 150
TOLERANCE = 1e-3
BUDGET = 128
OPTIONS: dict[str, Any] = {
    "attention_backend": "kvretrieval",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}
DRAFTING = OPTIONS | {"speculative_config": speculation(DRAFTS)}

model = model_of(random_llama, 3, 2)


def retrieval(**options: Any) -> dict[str, Any]:
    """An engine's configuration, with options of KV retrieval."""
    return {"kv_retrieval": {"budget": BUDGET} | options}


def follow(llm: LLM, texts: Sequence[Sequence[int]], right: float) -> None:
    """See :meth:`Scripted.follow`; all workers draft alike."""
    llm.collective_rpc(lambda worker: worker.model_runner.drafter.follow(texts, right))


def steps(answers: Sequence[Answer]) -> int:
    return sum(len(set(answer.steps)) for answer in answers)


def texts_of(requests: Sequence[Request], answers: Sequence[Answer]) -> list[list[int]]:
    return [one.prompt + got.tokens for one, got in zip(requests, answers, strict=True)]


def test_adapters_with_drafts(model, tmp_path):
    """Two adapters and none in a batch: drafts are verified by the adapter of their request."""
    adapters = [random_lora(model, tmp_path / str(number), number) for number in (1, 2)]
    with engine(
        model,
        additional_config=retrieval(),
        enable_lora=True,
        max_loras=3,
        max_lora_rank=8,
        **DRAFTING,
    ) as llm:
        asked = [
            Request(prompt(LENGTH), 24, options, lora=adapter)
            for adapter in (*adapters, None)
            for options in ({"exact": True}, {})
        ]
        expected = [drive(llm, [request])[0] for request in asked]
        for one, other in (0, 2), (0, 4), (2, 4), (0, 1), (2, 3):
            assert difference(expected[one], expected[other]) > 10 * TOLERANCE
        for right in (0.0, 0.8):
            # Of one prompt the answers differ, so drafts are those of another request's adapter.
            follow(llm, texts_of(asked, expected)[:: 2 if right else 1], right)
            answers = drive(llm, asked)
            whole = 2 if right else 1  # right drafts share a selection
            for answer, own in zip(answers[::whole], expected[::whole], strict=True):
                assert_same(answer, own, TOLERANCE)
        assert steps(answers[::2]) < 0.8 * steps(expected[::2])


@pytest.fixture(params=["device", pytest.param("disk", marks=pytest.mark.slow)])
def stored(request, tmp_path) -> dict[str, Any]:
    return retrieval(home=request.param, store=str(tmp_path / "store"), page_size=32)


def test_a_store_holds_nothing_of_rejected_drafts(model, stored):
    """A later engine without drafts finds what one with drafts has stored: keys, values and records
    of the tokens alone that were kept."""
    exact = {"exact": True}
    asked = Request(prompt(LENGTH), GENERATED, exact, cache=True)
    with engine(model, additional_config=stored, **DRAFTING) as llm:
        plain = alone(llm, asked)
        llm.reset_prefix_cache()
        follow(llm, texts_of([asked], [plain]), 0.6)
        (answer,) = drive(llm, [asked])
    assert_same(answer, plain, TOLERANCE)
    assert steps([answer]) < 0.9 * GENERATED
    more = [*asked.prompt, *answer.tokens, *asked.prompt[:5]]
    with engine(model, additional_config=stored, **OPTIONS) as llm:
        for options in exact, {}:
            found = drive(llm, [Request(more, 12, options, cache=True)])[0]
            assert found.cached == len(more) // BLOCK * BLOCK > LENGTH
            assert_same(found, alone(llm, Request(more, 12, options)), TOLERANCE)


@pytest.mark.slow
@pytest.mark.cores
def test_two_workers_with_drafts(model):
    """Each verifies by its own KV heads, and all accept the same."""
    asked = [
        Request(prompt(LENGTH - 90 * n), 24, options, arrives=n)
        for n, options in enumerate(({"exact": True}, {}, {"exact": True}))
    ]
    with engine(model, additional_config=retrieval(), **DRAFTING) as llm:
        expected = [alone(llm, request) for request in asked]
    with engine(model, additional_config=retrieval(), tensor_parallel_size=2, **DRAFTING) as llm:
        for right in (0.0, 0.8):
            follow(llm, texts_of(asked, expected), right)
            answers = drive(llm, asked)
            for number in (0, 1, 2) if right == 0 else (0, 2):
                assert_same(answers[number], expected[number], TOLERANCE)
        assert steps(answers) < 0.8 * steps(expected)
