"""Whole engines on a GPU: right before they are fast.

A model of random weights with the attention of Llama-3.1-8B, and little beside it; weights are
large enough for attention to be sharp, which vLLM's dummy weights are not. FREEKV is held against
stock vLLM where it attends to whole contexts, and against itself where it does not: requests
together against the same alone, replays of graphs against eager steps. Kernels of other shapes
round otherwise, so tokens may differ from where two of them are almost equally likely.

    pytest tests/gpu/test_engine.py -k eager
    VLLM_GPU_SYNC_CHECK=error pytest tests/gpu/test_engine.py -k graphs
    VLLM_GPU_SYNC_CHECK=error pytest tests/gpu/test_engine.py -k host
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine import Answer, Request, alone, drive, engine, preemptions

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)

pytestmark = pytest.mark.engine
BUDGET, TOKENS = 4096, 32
SPARSE = {"budget": 512}
"""Of a request; the engine's budget holds every context."""
TIE = 0.1
"""Log-probs that differ by less may change places."""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
"""Over the kernels of eager steps, so that nothing else differs."""
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eager": ({"enforce_eager": True}, {}),
    "graphs": ({"compilation_config": GRAPHS}, {}),
    "host": ({"compilation_config": GRAPHS}, {"home": "host", "home_bytes": 1 << 30}),
}
"""Options of vLLM's, and of ours."""
SHARED = {
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module", autouse=True)
def _spawn():
    """Workers are no forks of a process that has looked for a GPU."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Path of the checkpoint."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        initializer_range=0.05,
    )
    path = tmp_path_factory.mktemp("toy")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


def prompt(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 4000, (length,), generator=generator).tolist()


PROMPTS = [prompt(700, 1), prompt(1500, 2), prompt(33, 3), prompt(2049, 4)]


@pytest.fixture(scope="module")
def stock(model):
    """What stock vLLM answers."""
    with engine(model, attention_backend="FLASH_ATTN", enforce_eager=True, **SHARED) as llm:
        return [alone(llm, Request(p, TOKENS)) for p in PROMPTS]


@pytest.fixture(scope="module", params=MODES)
def freekv(request, model):
    """An engine, by the mode that its steps run in."""
    with engine(model, **SHARED | options_of(request.param, BUDGET)) as llm:
        yield llm


def options_of(mode, budget):
    options, own = MODES[mode]
    kept = {"additional_config": {"kv_retrieval": {"budget": budget, **own}}}
    return {"attention_backend": "FREEKV"} | options | kept


def agree(answer, expected):
    """Equal tokens, up to a place where two are almost equally likely."""
    assert len(answer.tokens) == len(expected.tokens)
    for i, (token, other) in enumerate(zip(answer.tokens, expected.tokens, strict=True)):
        assert answer.logprobs[i] == pytest.approx(expected.logprobs[i], abs=TIE), f"token {i}"
        if token != other:
            return i
    return len(answer.tokens)


def test_whole_contexts(freekv, stock):
    """A budget that holds the context, or an exact request, gives what stock vLLM gives."""
    for options in ({}, {**SPARSE, "exact": True}):
        answers = [alone(freekv, Request(p, TOKENS, options)) for p in PROMPTS]
        agreed = [agree(a, e) for a, e in zip(answers, stock, strict=True)]
        assert sum(agreed) > 0.8 * TOKENS * len(PROMPTS), agreed
    together = drive(freekv, [Request(p, TOKENS, {}) for p in PROMPTS])
    agreed = [agree(a, e) for a, e in zip(together, stock, strict=True)]
    assert sum(agreed) > 0.8 * TOKENS * len(PROMPTS), agreed


_sparse_answers: dict[str, list[Answer]] = {}


def test_selections(freekv, stock, request):
    """Selections change what long contexts give; by themselves or together, eager or replayed."""
    asked = [Request(p, TOKENS, SPARSE) for p in PROMPTS]
    answers = [alone(freekv, a) for a in asked]
    agree(answers[2], stock[2])  # within its budget
    assert any(
        a.logprobs != pytest.approx(e.logprobs, abs=1e-3)
        for a, e in zip(answers, stock, strict=True)
    ), "something is left out"
    for answer, expected in zip(drive(freekv, asked), answers, strict=True):
        agree(answer, expected)
    mode = request.node.callspec.params["freekv"]
    _sparse_answers[mode] = answers
    if "eager" in _sparse_answers and mode != "eager":
        for answer, expected in zip(answers, _sparse_answers["eager"], strict=True):
            assert answer.tokens == expected.tokens


def test_a_shared_prefix_and_an_abort(freekv):
    """Others go on as if they were alone, and so does who takes the seat of who has left."""
    prefix = prompt(1024, 5)
    asked = [
        Request(prefix + prompt(300, 6), TOKENS, SPARSE, cache=True),
        Request(prefix + prompt(200, 7), TOKENS, SPARSE, arrives=3, aborts=12, cache=True),
        Request(prefix + prompt(100, 8), TOKENS, SPARSE, arrives=14, cache=True),
    ]
    answers = drive(freekv, asked)
    assert 0 < len(answers[1].tokens) < TOKENS
    assert answers[2].cached >= 1024 - 32
    for i in (0, 2):
        agree(answers[i], alone(freekv, Request(asked[i].prompt, TOKENS, SPARSE)))


@pytest.mark.parametrize("mode", MODES)
def test_preemption(model, monkeypatch, mode):
    """A request that was preempted goes on as one whose prompt is all that it had by then."""
    kind = SHARED | options_of(mode, SPARSE["budget"])
    kind["additional_config"]["kv_retrieval"].pop("home_bytes", None)  # blocks say how many
    kind |= {"max_model_len": 2048, "block_size": 32, "num_gpu_blocks_override": 100}
    asked = [Request(prompt(1000, seed), 100) for seed in (9, 10, 11)]
    with engine(model, **kind) as llm:
        preempted = preemptions(llm, monkeypatch)
        answers = drive(llm, asked)
        assert preempted
        for request, answer in zip(asked, answers, strict=True):
            pauses = [b - a for a, b in pairwise(answer.steps)]
            done = len(pauses) + 1 if max(pauses) < 3 else pauses.index(max(pauses)) + 1
            expected = alone(llm, request)
            agreed = min(done, agree(answer_until(answer, done), answer_until(expected, done)))
            if agreed == done < len(answer.tokens):
                resumed = Request(request.prompt + answer.tokens[:done], request.tokens - done)
                agree(answer_from(answer, done), alone(llm, resumed))


def answer_until(answer, count):
    return type(answer)(answer.tokens[:count], answer.logprobs[:count])


def answer_from(answer, count):
    return type(answer)(answer.tokens[count:], answer.logprobs[count:])
