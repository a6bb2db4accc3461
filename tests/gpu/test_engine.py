"""Whole engines on a GPU: right before they are fast.

A model of random weights with the attention of Llama-3.1-8B, and little beside it; weights are
large enough for attention to be sharp, which vLLM's dummy weights are not. FREEKV is held against
stock vLLM where it attends to whole contexts, and against itself where it does not: requests
together against the same alone, replays of graphs against eager steps. Kernels of other shapes
round otherwise, so tokens may differ from where two of them are almost equally likely: also
between eager steps and graphs, for which FlashAttention splits contexts into other parts. A step of
an engine with graphs that waits for the GPU is an error.

    pytest tests/gpu/test_engine.py -k "eager or graphs"
    pytest tests/gpu/test_engine.py -k host
"""

import math
from contextlib import contextmanager
from dataclasses import replace
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
LIKELIEST = 8
"""Tokens at each place whose log-probs are compared where answers part."""
AGREED = 0.5
"""Least share of tokens up to where answers part. Two of the likeliest are within TIE at about one
place in twelve; after it answers go on from other tokens."""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
"""Over the kernels of eager steps, so that little else differs."""
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


def asked(prompt, options=None, **more):
    """A request, as all tests make it."""
    return Request(prompt, TOKENS, options, likeliest=LIKELIEST, **more)


@pytest.fixture(scope="module")
def stock(model):
    """What stock vLLM answers."""
    with engine(model, attention_backend="FLASH_ATTN", enforce_eager=True, **SHARED) as llm:
        return [alone(llm, asked(p)) for p in PROMPTS]


@pytest.fixture(scope="module", params=MODES)
def freekv(request, model):
    """An engine, by the mode that its steps run in."""
    with engine_of(request.param, model, **SHARED | options_of(request.param, BUDGET)) as llm:
        yield llm


@contextmanager
def engine_of(mode, model, **options):
    """An engine that may not wait for the GPU in a step, unless steps are eager."""
    with pytest.MonkeyPatch.context() as environment:
        if mode != "eager":
            environment.setenv("VLLM_GPU_SYNC_CHECK", "error")
        with engine(model, **options) as llm:
            yield llm


def options_of(mode, budget):
    options, own = MODES[mode]
    kept = {"additional_config": {"kv_retrieval": {"budget": budget, **own}}}
    return {"attention_backend": "FREEKV"} | options | kept


def agree(answer, expected):
    """The number of equal tokens, up to a place where two are almost equally likely to both."""
    assert len(answer.tokens) == len(expected.tokens)
    for i, (token, other) in enumerate(zip(answer.tokens, expected.tokens, strict=True)):
        assert answer.logprobs[i] == pytest.approx(expected.logprobs[i], abs=TIE), f"token {i}"
        if token != other:
            for one in (answer, expected):
                to_one = [one.choices[i].get(t, -math.inf) for t in (token, other)]
                assert to_one[0] == pytest.approx(to_one[1], abs=TIE), f"token {i}"
            return i
    return len(answer.tokens)


def mostly_agree(answers, expected):
    """Answers agree up to such places, and these come late."""
    agreed = [agree(a, e) for a, e in zip(answers, expected, strict=True)]
    assert sum(agreed) > AGREED * sum(len(a.tokens) for a in answers), agreed


def test_whole_contexts(freekv, stock):
    """A budget that holds the context, or an exact request, gives what stock vLLM gives."""
    for options in ({}, {**SPARSE, "exact": True}):
        mostly_agree([alone(freekv, asked(p, options)) for p in PROMPTS], stock)
    mostly_agree(drive(freekv, [asked(p, {}) for p in PROMPTS]), stock)


_sparse_answers: dict[str, list[Answer]] = {}


def test_selections(freekv, stock, request):
    """Selections change what long contexts give; by themselves or together, eager or replayed."""
    requests = [asked(p, SPARSE) for p in PROMPTS]
    answers = [alone(freekv, a) for a in requests]
    agree(answers[2], stock[2])  # within its budget
    assert any(
        a.logprobs != pytest.approx(e.logprobs, abs=1e-3)
        for a, e in zip(answers, stock, strict=True)
    ), "something is left out"
    mostly_agree(drive(freekv, requests), answers)
    mode = request.node.callspec.params["freekv"]
    _sparse_answers[mode] = answers
    if "eager" in _sparse_answers and mode != "eager":
        mostly_agree(answers, _sparse_answers["eager"])


def test_a_shared_prefix_and_an_abort(freekv):
    """Others go on as if they were alone, and so does who takes the seat of who has left."""
    prefix = prompt(1024, 5)
    requests = [
        asked(prefix + prompt(300, 6), SPARSE, cache=True),
        asked(prefix + prompt(200, 7), SPARSE, arrives=3, aborts=12, cache=True),
        asked(prefix + prompt(100, 8), SPARSE, arrives=14, cache=True),
    ]
    answers = drive(freekv, requests)
    assert 0 < len(answers[1].tokens) < TOKENS
    assert answers[2].cached >= 1024 - 32
    for i in (0, 2):
        agree(answers[i], alone(freekv, requests[i]))


@pytest.mark.parametrize("mode", MODES)
def test_preemption(model, monkeypatch, mode):
    """A request that was preempted goes on as one whose prompt is all that it had by then."""
    kind = SHARED | options_of(mode, SPARSE["budget"])
    kind["additional_config"]["kv_retrieval"].pop("home_bytes", None)  # blocks say how many
    kind |= {"max_model_len": 2048, "block_size": 32, "num_gpu_blocks_override": 100}
    requests = [Request(prompt(1000, s), 100, likeliest=LIKELIEST) for s in (9, 10, 11)]
    with engine_of(mode, model, **kind) as llm:
        preempted = preemptions(llm, monkeypatch)
        answers = drive(llm, requests)
        assert preempted
        for request, answer in zip(requests, answers, strict=True):
            pauses = [b - a for a, b in pairwise(answer.steps)]
            done = len(pauses) + 1 if max(pauses) < 3 else pauses.index(max(pauses)) + 1
            expected = alone(llm, request)
            agreed = min(done, agree(part(answer, 0, done), part(expected, 0, done)))
            if agreed == done < len(answer.tokens):
                again = replace(
                    request,
                    prompt=request.prompt + answer.tokens[:done],
                    tokens=request.tokens - done,
                )
                agree(part(answer, done, None), alone(llm, again))


def part(answer, start, end):
    """An answer's tokens from one place to another."""
    places = slice(start, end)
    kept = {"logprobs": answer.logprobs[places], "choices": answer.choices[places]}
    return Answer(answer.tokens[places], **kept)
