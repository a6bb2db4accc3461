"""VLLM's draft models on a CPU, whose keys and values lie beside those of a model that retrieves.

One is the model itself, whose drafts are right; another one's are wrong.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from vllm import LLM

from tests.support.engine import (
    Answer,
    Request,
    alone,
    assert_same,
    difference,
    drive,
    engine,
    likely,
    model_of,
    prompt,
    random_llama,
)

pytestmark = pytest.mark.engine

DRAFTS = 3
TOLERANCE = 1e-3
BUDGET = 128
OPTIONS: dict[str, Any] = {
    "attention_backend": "kvretrieval",
    "additional_config": {"kv_retrieval": {"budget": BUDGET, "also": ["quest"]}},
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}
EXACT = {"exact": True}

model = model_of(random_llama, 3, 2)


def random_eagle(model: str, path: Path) -> str:
    """A head of EAGLE for a model of :func:`random_llama`, with random weights, at ``path``."""
    drawn = Path(random_llama(path, layers=1, kv_heads=2)) / "model.safetensors"
    names = {name: name.removeprefix("model.") for name in load_file(drawn)}
    kept = [n for n in names if "layers" in n and "input_layernorm" not in n]
    weights = {names[n]: weight for n, weight in load_file(drawn).items() if n in kept}
    hidden = weights["layers.0.self_attn.q_proj.weight"].shape[1]
    torch.manual_seed(1)
    save_file(weights | {"fc.weight": 0.1 * torch.randn(hidden, 2 * hidden)}, drawn)
    return str(path)


def crowd() -> list[Request]:
    """Prompts in chunks beside tokens of answers; beyond the budget and within."""
    return [
        Request(prompt(500), 24, EXACT),
        Request(prompt(90), 30, {}),
        Request(prompt(700), 20, EXACT, arrives=3),
        Request(prompt(300), 24, {}, arrives=5),
        Request(prompt(400), 24, {"method": "quest"}, arrives=6),
    ]


@pytest.fixture(scope="module")
def plain(model: str) -> list[Answer]:
    """Answers of an engine without drafts."""
    with engine(model, **OPTIONS) as llm:
        return [alone(llm, request) for request in crowd()]


def tokens_per_step(answers: Sequence[Answer]) -> float:
    return sum(len(a.tokens) for a in answers) / sum(len(set(a.steps)) for a in answers)


@pytest.fixture(scope="module")
def right(model: str) -> Iterator[LLM]:
    """An engine whose draft model is the model."""
    by = {"method": "draft_model", "model": model, "num_speculative_tokens": DRAFTS}
    with engine(model, speculative_config=by, **OPTIONS) as llm:
        yield llm


def test_the_models_own_drafts_are_accepted(model, plain, right):
    """Where both attend to everything, all of them: what a draft model reads is what it wrote."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    requests = [Request(prompt(size), 32, options) for size, options in ((500, EXACT), (60, {}))]
    answers = drive(right, requests)
    for request, answer in zip(requests, answers, strict=True):
        assert len(set(answer.steps)) == 1 + -(-(len(answer.tokens) - 1) // (1 + DRAFTS))
        assert_same(answer, likely(whole, request.prompt, answer), TOLERANCE)
    together = drive(right, crowd())
    for number in (0, 1, 2):
        assert_same(together[number], plain[number], TOLERANCE)
    assert difference(plain[3], drive(right, [Request(prompt(300), 24, EXACT)])[0]) > 0.05


def test_the_prefix_cache_has_what_a_draft_model_reads(right):
    request = Request(prompt(650), 24, EXACT, cache=True)
    first, second = (drive(right, [request])[0] for _ in range(2))
    assert second.cached >= 512 > first.cached
    assert_same(second, first, TOLERANCE)
    assert tokens_per_step([second]) > 0.9 * tokens_per_step([first]) > 2.5


@pytest.fixture(scope="module", params=["eagle", pytest.param("small", marks=pytest.mark.slow)])
def wrong(request, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine whose drafts come from random weights."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "eagle":
        by = {"method": "eagle", "model": random_eagle(model, path)}
    else:
        by = {"method": "draft_model", "model": random_llama(path, layers=1, kv_heads=1)}
    drafts = {"num_speculative_tokens": DRAFTS}
    with engine(model, speculative_config=by | drafts, **OPTIONS) as llm:
        yield llm


def test_wrong_drafts_change_nothing(plain, wrong):
    """Neither whole contexts nor selections."""
    (known,) = wrong.collective_rpc(
        lambda worker: (list(worker.planner.retrieval_heads), list(worker.retrieval_layers))
    )
    assert known[0] == known[1], "no draft model's layer counts as one that retrieves"
    answers = drive(wrong, crowd())
    assert tokens_per_step(answers) < 1.1
    for answer, other in zip(answers, plain, strict=True):
        assert_same(answer, other, TOLERANCE)


GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "dtype": "float32",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
}
"""GLM-4.5, with a layer that predicts a further token."""


@pytest.mark.slow
def test_layers_that_predict_further_tokens(tmp_path):
    """MTP: their weights are the checkpoint's, here random."""
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    options = OPTIONS | {"load_format": "dummy"}
    with engine(str(tmp_path), **options) as llm:
        expected = [alone(llm, request) for request in crowd()[:3]]
    by = {"method": "mtp", "num_speculative_tokens": 2}
    with engine(str(tmp_path), speculative_config=by, **options) as llm:
        answers = drive(llm, crowd()[:3])
    for answer, other in zip(answers, expected, strict=True):
        assert_same(answer, other, TOLERANCE)
