"""Drafts are verified over what retrieval selects, and rejected ones leave no trace.

One engine, whose drafter does as the tests say. Steps of the same shapes compute the same to the
last bit, so what rejected drafts have left behind would show: the tests change these, and nothing
else.
"""

from typing import Any

import pytest
import torch

from tests.support.drafter import speculation
from tests.support.engine import (
    Answer,
    Request,
    alone,
    assert_same,
    by,
    difference,
    drive,
    engine,
    model_of,
    novel,
    shortened,
)

pytestmark = [pytest.mark.engine, pytest.mark.model]

DRAFTS = 6
METHODS = ["kvretrieval", "quest", "freekv", "streamingllm", "twilight", "infllm", "arkvale"]
TOLERANCE = 1e-3
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "enforce_eager": True,
    "speculative_config": speculation(DRAFTS),
}

model = model_of(shortened, "SmolLM2-135M-Instruct", 4)


@pytest.fixture(scope="module")
def llm(model):
    options = {"budget": 192, "also": METHODS[1:], "attention": "own"}
    with engine(
        model,
        attention_backend="kvretrieval",
        additional_config={"kv_retrieval": options},
        **OPTIONS,
    ) as llm:
        yield llm


def follow(llm, *args, **options):
    """See :meth:`Scripted.follow`."""
    llm.collective_rpc(lambda worker: worker.model_runner.drafter.follow(*args, **options))


def drafted(llm):
    """See :attr:`Scripted.drafted`."""
    return llm.collective_rpc(lambda worker: worker.model_runner.drafter.drafted)[0]


def text_of(request: Request, answer: Answer) -> list[int]:
    return request.prompt + answer.tokens


def tokens_per_step(answer: Answer) -> float:
    return len(answer.tokens) / len(set(answer.steps))


def one_by_one(llm, request: Request) -> Answer:
    follow(llm, (), 0.0)
    return alone(llm, request)


@pytest.mark.parametrize("method", METHODS)
def test_rejected_drafts_change_nothing(llm, method):
    """With drafts that are all wrong a request gets the answer that it gets without drafts."""
    request = Request(novel(llm, 500, 40), 40, by(method))
    expected = one_by_one(llm, request)
    follow(llm, [text_of(request, expected)], right=0.0)
    answer = alone(llm, request)
    count, right = drafted(llm)
    assert (count > 60, right) == (True, 0)
    assert tokens_per_step(answer) == 1
    assert_same(answer, expected, TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_no_trace_of_what_was_rejected(llm, method):
    """Two runs whose drafts are right at the same places, and wrong in different ways."""
    request = Request(novel(llm, 500, 40), 40, by(method))
    text, answers, traces = text_of(request, one_by_one(llm, request)), [], []
    for wrong in (1, 2):
        follow(llm, [text], right=0.7, lengths=3, wrong=wrong)
        answers.append(alone(llm, request))
        traces.append(trace(llm, len(text) - 1))
    assert 1.2 < tokens_per_step(answers[0]) < 4
    assert answers[0] == answers[1]
    for name, (ours, theirs) in enumerate(zip(*traces, strict=True)):
        assert torch.equal(ours, theirs), name


def trace(llm, tokens: int) -> list[torch.Tensor]:
    """Keys, values and index records of the pages that the last request has filled."""

    def of(worker: Any) -> list[torch.Tensor]:
        found, table = [], worker.model_runner.input_batch.block_table.block_tables[0]
        page, size = worker.retrieval_config.page_size, worker.cache_config.block_size
        blocks = torch.from_numpy(table.get_numpy_array()[0, : -(-tokens // size)]).long()
        pages = (blocks[:, None] * (size // page) + torch.arange(size // page)).flatten()
        pages = pages[: tokens // page]
        for name, impl in worker.retrieval_layers.items():
            layer = worker.vllm_config.compilation_config.static_forward_context[name]
            found.append(layer.kv_cache[pages].clone())
            for index in impl.indexes:
                of_pages = index.records.view(index.pages // index.spans, -1)
                found.append(of_pages[pages[:: index.spans] // index.spans].clone())
        return found

    return llm.collective_rpc(of)[0]


@pytest.mark.parametrize("options", [{"exact": True}, {}], ids=["exact", "within the budget"])
def test_whole_contexts_are_verified_exactly(llm, options):
    """Whatever the drafts are, log-probs are those of tokens that are decoded one by one."""
    length = 500 if options else 120
    request = Request(novel(llm, length, 60), 48, options)
    expected = one_by_one(llm, request)
    follow(llm, [text_of(request, expected)], right=0.8)
    answer = alone(llm, request)
    assert tokens_per_step(answer) > 1.5
    assert_same(answer, expected, TOLERANCE)


def test_right_drafts_are_accepted(llm):
    """The rows of a request share a selection: most tokens are those of single rows."""
    request = Request(novel(llm, 700, 90), 40, by("kvretrieval"))
    expected = one_by_one(llm, request)
    follow(llm, [text_of(request, expected)], right=1.0)
    answer = alone(llm, request)
    assert tokens_per_step(answer) > 2
    same = [a == b for a, b in zip(answer.tokens, expected.tokens, strict=True)]
    first = same.index(False) if False in same else len(same)
    assert first > 4
    assert difference(answer, expected) < 2 or first < len(same)


def test_drafts_beside_prompts_and_single_tokens(llm):
    """Requests with drafts, without, exact ones and prompts in chunks share steps."""
    crowd = [
        Request(novel(llm, 600, 0), 30, by("kvretrieval")),
        Request(novel(llm, 90, 100), 40, {}),
        Request(novel(llm, 800, 200), 20, by("quest"), arrives=4),
        Request(novel(llm, 500, 300), 20, {"exact": True}, arrives=6),
        Request(novel(llm, 450, 400), 16, by("streamingllm"), arrives=9, aborts=19),
        Request(novel(llm, 520, 500), 16, by("freekv"), arrives=12),
    ]
    expected = [one_by_one(llm, request) for request in crowd]
    texts = [text_of(*pair) for pair in zip(crowd, expected, strict=True)]
    follow(llm, texts, right=0.0)
    for answer, other, request in zip(drive(llm, crowd), expected, crowd, strict=True):
        if request.aborts is None:
            assert_same(answer, other, TOLERANCE)
    follow(llm, [texts[1], texts[3]], right=0.8)
    answers = drive(llm, crowd)
    for number in (1, 3):
        assert_same(answers[number], expected[number], TOLERANCE)
        assert tokens_per_step(answers[number]) > 1.3
