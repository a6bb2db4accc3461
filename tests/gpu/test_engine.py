"""Whole engines on a GPU: right before they are fast.

A model of random weights with the attention of Llama-3.1-8B, and little beside it; weights are
large enough for attention to be sharp, which vLLM's dummy weights are not. FREEKV is held against
stock vLLM where it attends to whole contexts, and against the specification where it does not: see
support/engine_checks.py, and device/test_gpu_checks.py for the faults that these checks find. A
step of an engine with graphs that waits for the GPU is an error.

    pytest tests/gpu/test_engine.py -k "eager or graphs"
    pytest tests/gpu/test_engine.py -k host
"""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import engine_checks
from tests.support.engine import Answer, Request, drive, engine, preemptions
from tests.support.engine_checks import LIKELIEST, Case, agree, alone

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)

pytestmark = pytest.mark.engine
BUDGET, TOKENS = 4096, 16
SPARSE = {"budget": 512}
"""Of a request; the engine's budget holds every context."""
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


CASE = Case([prompt(700, 1), prompt(1500, 2), prompt(33, 3), prompt(2049, 4)], [2], TOKENS, SPARSE)
asked = CASE.asked


class InProcess:
    """An engine whose scheduler runs in this process; see :class:`engine_checks.Engine`."""

    def __init__(self, llm):
        self.llm = llm

    def drive(self, requests):
        return drive(self.llm, requests)

    def in_worker(self, function):
        return self.llm.collective_rpc(function)[0]


@pytest.fixture(scope="module")
def stock(model):
    """What stock vLLM answers."""
    with engine(model, attention_backend="FLASH_ATTN", enforce_eager=True, **SHARED) as llm:
        return alone(InProcess(llm), [asked(p) for p in CASE.prompts])


@pytest.fixture(scope="module", params=MODES)
def freekv(request, model):
    """An engine, by the mode that its steps run in."""
    with engine_of(request.param, model, **SHARED | options_of(request.param, BUDGET)) as llm:
        yield InProcess(llm)


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
    kept = {"additional_config": {"kv_retrieval": {"budget": budget, "exact_below": 0, **own}}}
    return {"attention_backend": "FREEKV"} | options | kept


def test_whole_contexts(freekv, stock):
    engine_checks.whole_contexts(freekv, CASE, stock)


def test_selections(freekv, stock):
    """By themselves or together, eager or replayed."""
    outcome = engine_checks.run(freekv, CASE)
    engine_checks.check_layer(outcome)
    engine_checks.check_answers(outcome, CASE, engine_checks.specified(freekv, CASE), stock)


def test_a_shared_prefix_and_an_abort(freekv):
    """Others go on as if they were alone, and so does who takes the seat of who has left."""
    prefix = prompt(1024, 5)
    requests = [
        asked(prefix + prompt(300, 6), SPARSE, cache=True),
        asked(prefix + prompt(200, 7), SPARSE, arrives=3, aborts=12, cache=True),
        asked(prefix + prompt(100, 8), SPARSE, arrives=14, cache=True),
    ]
    answers = freekv.drive(requests)
    assert 0 < len(answers[1].tokens) < TOKENS
    assert answers[2].cached >= 1024 - 32
    for i in (0, 2):
        agree(answers[i], alone(freekv, [requests[i]])[0])


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
            expected = alone(InProcess(llm), [request])[0]
            agreed = min(done, agree(part(answer, 0, done), part(expected, 0, done)))
            if agreed == done < len(answer.tokens):
                again = replace(
                    request,
                    prompt=request.prompt + answer.tokens[:done],
                    tokens=request.tokens - done,
                )
                agree(part(answer, done, None), alone(InProcess(llm), [again])[0])


def part(answer, start, end):
    """An answer's tokens from one place to another."""
    places = slice(start, end)
    kept = {"logprobs": answer.logprobs[places], "choices": answer.choices[places]}
    return Answer(answer.tokens[places], **kept)
