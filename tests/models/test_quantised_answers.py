"""An engine whose weights are rounded as it loads them, against transformers with these weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.spec import quantised as reference
from tests.support.adapters import random_lora
from tests.support.engine import Request, alone, by, drive, engine, likely, prompt, random_llama
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.quantization.rounding import rounded
from vllm_kvretrieval.store.serving.identity import identity_of

pytestmark = pytest.mark.engine

TOLERANCE = 0.06
"""Of log-probs: a rounding of float32 decides between two numbers of a token, and then of more."""


METHODS = ("freekv", "quest", "snapkv", "streamingllm")
RETRIEVAL = {"budget": 128, "sink": 32, "window": 32, "also": [*METHODS]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("toy") / "model", layers=3, kv_heads=2)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, model):
    return random_lora(model, tmp_path_factory.mktemp("adapters") / "1", 1)


@pytest.fixture(scope="module")
def llm(model):
    with engine(
        model,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=6,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        quantization="kvr_int8",
        attention_backend="kvretrieval",
        additional_config={"kv_retrieval": RETRIEVAL},
    ) as llm:
        yield llm


class Rounded(torch.nn.Module):
    """A linear layer in float32, its weights in 8 bits, and an adapter beside it.

    The first tokens are multiplied as those of a prompt, the others as those of single steps.
    """

    def __init__(self, layer, by_outputs, adapter, together):
        super().__init__()
        self.packed, self.adapter = rounded(layer.weight.detach(), 8, by_outputs), adapter
        self.together, self.tiles = together, reference.by_tiles(cpu.isa(), together)

    def forward(self, x):
        many, few = x[..., : self.together, :], x[..., self.together :, :]
        parts = (
            reference.quantised_linear(many, self.packed, tiles=self.tiles),
            reference.quantised_linear(few, self.packed),
        )
        product = torch.cat(parts, -2).float()
        return product + x @ self.adapter.T if self.adapter is not None else product


def with_rounded_weights(path, prompt_tokens, adapter=None):
    """The model of transformers with such layers; the output layer meets single tokens."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    added = load_file(Path(adapter.path) / "adapter_model.safetensors") if adapter else {}
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            parts = [added.get(f"base_model.model.{name}.lora_{part}.weight") for part in "BA"]
            beside = None if parts[0] is None else parts[0] @ parts[1]
            head = name == "lm_head"
            together = 0 if head else prompt_tokens
            model.set_submodule(name, Rounded(layer, head, beside, together))
    return model


def apart(one, other):
    """The mean difference of log-probs."""
    differences = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
    return sum(differences) / len(differences)


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "adapter"])
def test_answers(llm, model, adapter, lora):
    """Prompts and steps multiply the rounded weights, also below adapters."""
    given = adapter if lora else None
    request = Request(prompt(300), 12, {"exact": True}, lora=given)
    answer = drive(llm, [request, Request(prompt(40), 12, {})])[0]
    rounded_model = with_rounded_weights(model, len(request.prompt), given)
    expected = likely(rounded_model, request.prompt, answer)
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
    if not lora:
        plain = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        assert apart(answer, expected) < apart(answer, likely(plain, request.prompt, answer)) / 2


def test_selection(llm):
    """A budget below the context is served, and a step's result does not depend on others."""
    request = Request(prompt(500), 12, {})
    first, *_ = drive(llm, [request, Request(prompt(200), 12, {}), Request(prompt(60), 12, {})])
    assert first.tokens == alone(llm, request).tokens


def test_methods(llm):
    """Within the budget every group of methods attends to the whole context."""
    asked = [Request(prompt(90), 12, {}), *(Request(prompt(90), 12, by(m)) for m in METHODS)]
    expected, *found = drive(llm, asked)
    for method, answer in zip(METHODS, found, strict=True):
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3), method


def test_a_store_is_not_shared_with_other_weights(llm):
    """The identity of a store names the quantisation, beside the hash of what was loaded."""
    config = llm.llm_engine.vllm_config
    options = RetrievalConfig.from_vllm(config)
    assert options is not None
    assert identity_of(config, options, [], [])["quantization"] == "kvr_int8"
