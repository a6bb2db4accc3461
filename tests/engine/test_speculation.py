"""Drafts are verified over what retrieval selects, and rejected ones leave no trace.

The drafter does as the tests say. Steps of the same shapes compute the same to the last bit, so
what rejected drafts have left behind would show: the tests change these, and nothing else. The
engine in memory runs always, the others among the slow tests.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from tests.support import mixed_models
from tests.support.drafter import speculation
from tests.support.engine import (
    Answer,
    Request,
    alone,
    assert_same,
    by,
    drive,
    engine,
    model_of,
    novel,
    preemptions,
    prompt,
    shortened,
)
from tests.support.turns import with_and_without_cache

pytestmark = [pytest.mark.engine, pytest.mark.model]

DRAFTS = 6
TOLERANCE = 1e-3
BLOCK = 128
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 20,
    "enforce_eager": True,
    "speculative_config": speculation(DRAFTS),
}


@dataclass
class Kind:
    """An engine.

    Attributes:
        methods: Those that it serves, its own first.
        retrieval: Options beside.
        rounds: Whether its home rounds to few bits. Then a last bit of a key, which depends on how
            many rows a product of matrices has, may become much more.
    """

    methods: list[str]
    retrieval: dict[str, Any] = field(default_factory=dict)
    rounds: bool = False

    def assert_same(self, answer: Answer, expected: Answer) -> None:
        """They are equal, to what rounding makes of them."""
        if not self.rounds:
            assert_same(answer, expected, TOLERANCE)


ENGINES = {
    "memory": Kind(["kvretrieval", "quest", "freekv", "twilight"]),
    "other methods": Kind(["oracle", "streamingllm", "infllm", "arkvale", "full"]),
    "tokens in a file": Kind(["fier", "quest", "streamingllm"], {"home": "disk"}),
    "kept prompts": Kind(["fier", "snapkv", "entropykv"]),
    "vLLM's kernel": Kind(["kvretrieval", "quest"], {"attention": "vllm"}),
    "pages in a file": Kind(["kvretrieval", "quest", "freekv"], {"home": "disk"}),
    "encoded pages": Kind(["kvretrieval", "freekv"], {"home": "disk", "codec": "k8v4"}, True),
    "streamed pages": Kind(["kvretrieval"], {"home": "disk", "streaming_attention": True}),
    "filters": Kind(["omnikv", "fier"], {"filters": [1], "observation": "uniform"}),
    "filters and a file": Kind(["omnikv"], {"filters": [1], "home": "disk"}),
    "heads": Kind(["razor", "shadowkv"], {"heads": [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]]}),
    "prompts that retrieve": Kind(["kvretrieval"], {"prefill_budget": 256, "prefill_chunk": 128}),
}
FAST = ("memory",)

model = model_of(shortened, "SmolLM2-135M-Instruct", 4)


def kinds():
    return [
        pytest.param(name, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name in ENGINES
    ]


@pytest.fixture(scope="module", params=kinds())
def served(request, model):
    """An engine, and what it is."""
    kind = ENGINES[request.param]
    options = {"budget": 192, "also": kind.methods[1:], "attention": "own"} | kind.retrieval
    with engine(
        model,
        attention_backend=kind.methods[0],
        additional_config={"kv_retrieval": options},
        **OPTIONS,
    ) as llm:
        yield llm, kind


@pytest.fixture
def llm(served):
    return served[0]


@pytest.fixture
def kind(served):
    return served[1]


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


def spoiled(llm, request: Request, right: float, wrong: int = 0) -> Answer:
    """The answer to a request some of whose drafts are those of the answer without any."""
    text = text_of(request, one_by_one(llm, request))
    follow(llm, [text], right=right, lengths=3, wrong=wrong)
    return alone(llm, request)


def check_home(llm):
    """What fast memory has of a file is what the file has."""
    assert llm.collective_rpc(lambda worker: worker.storage.check()) == [""]


def test_rejected_drafts_leave_no_trace(llm, kind):
    """Two runs whose drafts are right at the same places, and wrong in different ways.

    And with drafts that are all wrong a request gets the answer that it gets without drafts.
    """
    for method in kind.methods:
        request = Request(novel(llm, 500, 40), 30, by(method))
        expected = one_by_one(llm, request)
        text, answers, traces = text_of(request, expected), [], []
        follow(llm, [text], right=0.0)
        answer = alone(llm, request)
        count, right = drafted(llm)
        assert (count > 50, right) == (True, 0)
        assert tokens_per_step(answer) == 1
        kind.assert_same(answer, expected)
        for wrong in (1, 2):
            follow(llm, [text], right=0.7, lengths=3, wrong=wrong)
            answers.append(alone(llm, request))
            traces.append(trace(llm, len(text) - 1))
            check_home(llm)
        assert 1.1 < tokens_per_step(answers[0]) < 4
        assert answers[0] == answers[1], method
        for number, (ours, theirs) in enumerate(zip(*traces, strict=True)):
            assert torch.equal(ours, theirs), (method, number)


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
def test_whole_contexts_are_verified_exactly(llm, kind, options):
    """Whatever the drafts are, log-probs are those of tokens that are decoded one by one."""
    request = Request(novel(llm, 500 if options else 120, 60), 48, options)
    request.likeliest = 3
    expected = one_by_one(llm, request)
    follow(llm, [text_of(request, expected)], right=0.8)
    answer = alone(llm, request)
    assert tokens_per_step(answer) > 1.5
    kind.assert_same(answer, expected)
    for ours, theirs in zip(answer.choices, expected.choices, strict=True):
        assert kind.rounds or ours == pytest.approx(theirs, abs=TOLERANCE)


def test_right_drafts_are_accepted(llm, kind):
    """The rows of a request share a selection: many tokens are those of single rows."""
    request = Request(novel(llm, 700, 90), 40, by(kind.methods[0]))
    answer = spoiled(llm, request, right=1.0)
    assert tokens_per_step(answer) > 1.3
    expected = one_by_one(llm, request)
    first = [a == b for a, b in zip(answer.tokens, expected.tokens, strict=True)]
    assert all(first[:4])


def test_drafts_beside_prompts_and_single_tokens(llm, kind):
    """Requests with drafts, without, exact ones and prompts in chunks share steps."""
    crowd = [
        Request(novel(llm, 600, 0), 30, by(kind.methods[0])),
        Request(novel(llm, 90, 100), 40, {}),
        Request(novel(llm, 800, 200), 20, by(kind.methods[-1]), arrives=4),
        Request(novel(llm, 500, 300), 20, {"exact": True}, arrives=6),
        Request(novel(llm, 450, 400), 16, by(kind.methods[0]), arrives=9, aborts=19),
        Request(novel(llm, 520, 500), 16, by(kind.methods[-1]), arrives=12),
    ]
    expected = [one_by_one(llm, request) for request in crowd]
    texts = [text_of(*pair) for pair in zip(crowd, expected, strict=True)]
    follow(llm, texts, right=0.0)
    for answer, other, request in zip(drive(llm, crowd), expected, crowd, strict=True):
        if request.aborts is None:
            kind.assert_same(answer, other)
    follow(llm, [texts[1], texts[3]], right=0.8)
    answers = drive(llm, crowd)
    for number in (1, 3):
        kind.assert_same(answers[number], expected[number])
        assert tokens_per_step(answers[number]) > 1.3
    check_home(llm)


def test_interrupted_requests_with_drafts(llm, kind, monkeypatch):
    """They give their seats and blocks back with drafts in them, and go on."""
    crowd = [Request(novel(llm, 700, 100 * i), 80, {"exact": True}, arrives=i) for i in range(3)]
    expected = [one_by_one(llm, request) for request in crowd]
    interrupted = preemptions(llm, monkeypatch)
    follow(llm, [text_of(*pair) for pair in zip(crowd, expected, strict=True)], right=0.7)
    for answer, other in zip(drive(llm, crowd), expected, strict=True):
        kind.assert_same(answer, other)
    assert interrupted
    check_home(llm)


def test_the_prefix_cache_after_drafts(llm, kind):
    """Blocks that drafts have filled are shared by those who want no better ones."""
    request = Request(novel(llm, 500, 140), 150, by(kind.methods[0]), cache=True)
    text = text_of(request, one_by_one(llm, request))
    llm.reset_prefix_cache()
    follow(llm, [text], right=0.8)
    (answer,) = drive(llm, [request])
    prompt = [*text_of(request, answer), *request.prompt[:9]]
    follow(llm, (), 0.0)
    cached, anew = with_and_without_cache(llm, prompt, {"exact": True})
    assert cached.cached <= len(request.prompt)
    kind.assert_same(cached, anew)
    again, _ = with_and_without_cache(llm, prompt, by(kind.methods[0]))
    assert again.cached >= (len(prompt) - 2 * BLOCK) // BLOCK * BLOCK


def test_structured_output_stops_and_seeds(llm, kind):
    """With drafts, of which the grammar forbids most, an exact request gets the same text."""
    prompt = TokensPrompt(prompt_token_ids=novel(llm, 500, 7))

    def answered(right: float, **options: Any) -> str:
        params = SamplingParams(
            max_tokens=24, extra_args={"kv_retrieval": {"exact": True}}, **options
        )
        follow(llm, [], 0.0)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        follow(llm, [text], right)
        (drafted,) = llm.generate([prompt], params, use_tqdm=False)
        if not options.get("temperature") and not kind.rounds:
            assert drafted.outputs[0].text == output.outputs[0].text
        return str(drafted.outputs[0].text)

    choices = ["Knightley met Woodhouse", "Woodhouse"]
    for right in (0.0, 0.8):
        forced = StructuredOutputsParams(choice=choices)
        assert answered(right, temperature=0, structured_outputs=forced) in choices
        whole = answered(right, temperature=0)
        stop = whole[len(whole) // 2 :][:3]
        assert stop not in answered(right, temperature=0, stop=[stop])
    first, second = (answered(0.8, temperature=1.0, seed=5, top_k=20) for _ in range(2))
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("home", ["device", "disk"])
def test_layers_that_read_the_keys_of_others(tmp_path, home):
    """They select by records that drafts enter and leave, too."""
    torch.manual_seed(0)
    mixed_models.gemma4_shared().save_pretrained(tmp_path)
    options = OPTIONS | {"skip_tokenizer_init": True, "num_gpu_blocks_override": None}
    retrieval = {"budget": 192, "home": home}
    with engine(
        str(tmp_path),
        attention_backend="freekv",
        additional_config={"kv_retrieval": retrieval},
        **options,
    ) as llm:
        request = Request(prompt(500), 40, {})
        expected, answers = one_by_one(llm, request), []
        for right, wrong in ((0.0, 0), (0.7, 1), (0.7, 2)):
            follow(llm, [text_of(request, expected)], right=right, lengths=3, wrong=wrong)
            answers.append(alone(llm, request))
    assert_same(answers[0], expected, TOLERANCE)
    assert tokens_per_step(answers[0]) == 1 < tokens_per_step(answers[1])
    assert answers[1] == answers[2]
