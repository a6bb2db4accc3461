"""What requests bring along besides token ids: adapters (LoRA), prompt embeddings, images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.support import device_models
from tests.support.adapters import random_lora
from tests.support.engine import (
    Request,
    alone,
    assert_same,
    by,
    difference,
    drive,
    engine,
    random_llama,
)
from tests.support.engine import prompt as meaningless

pytestmark = pytest.mark.engine

PAGE, BUDGET = 32, 128
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 6,
    "enforce_eager": True,
}
INPUTS = ENGINE | {
    "skip_tokenizer_init": True,
    "enable_lora": True,
    "max_loras": 3,  # one more than there are: see docs/limits.md
    "max_lora_rank": 8,
    "enable_prompt_embeds": True,
}
RETRIEVAL = {
    "attention_backend": "freekv",
    "additional_config": {
        "kv_retrieval": {"page_size": PAGE, "budget": BUDGET, "sink": PAGE, "window": PAGE}
        | {"also": ["quest"]}
    },
}
TOLERANCE = 1e-3
ANOTHER_CODE = 0.01
"""The tolerance of log-probs against transformers, whose image encoder rounds in other places."""
LONG = meaningless(400)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("toy") / "model", layers=3, kv_heads=2)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("adapters")
    return [random_lora(model, folder / str(number), number) for number in (1, 2)]


@pytest.fixture(scope="module")
def whole(model, adapters):
    """Requests that attend to their whole context, with the answers of vLLM without retrieval."""
    first, second = adapters
    embeddings = load_file(Path(model) / "model.safetensors")["model.embed_tokens.weight"]
    requests = {
        "within the budget": Request(meaningless(90), 8, {}, lora=first),
        "first": Request(LONG, 8, {"exact": True}, lora=first, cache=True),
        "second": Request(LONG, 8, {"exact": True}, lora=second, cache=True),
        "embeddings": Request(LONG, 8, {"exact": True}, embeddings=embeddings[LONG], cache=True),
        "ids": Request(LONG, 8, {"exact": True}),
    }
    with engine(model, **INPUTS) as llm:
        stock = [drive(llm, [replace(r, options=None)])[0] for r in requests.values()]
    return dict(zip(requests, zip(requests.values(), stock, strict=True), strict=True))


@pytest.fixture(scope="module")
def llm(model, whole):
    with engine(model, **INPUTS, **RETRIEVAL) as llm:
        yield llm


@pytest.mark.parametrize("name", ["within the budget", "first", "second", "embeddings", "ids"])
def test_whole_contexts(llm, whole, name):
    """Answers are those of vLLM without retrieval, on the same prompt with another input, too."""
    request, expected = whole[name]
    assert_same(drive(llm, [request])[0], expected, TOLERANCE)


def test_prompt_embeddings_are_retrieved_from(llm, whole):
    """As the ids are that they stand for; the cache of the one does not serve the other."""
    request, _ = whole["embeddings"]
    for options in {}, by("quest"):
        ids = alone(llm, Request(LONG, 8, options))
        (embeddings,) = drive(llm, [replace(request, options=options)])
        assert_same(embeddings, ids, TOLERANCE)
        assert difference(ids, whole["ids"][1]) > 10 * TOLERANCE, "retrieval counts"


def test_adapters_are_retrieved_with(llm, whole, adapters):
    """Two adapters and none in a batch, their prompts in the prefix cache: each as if it were
    alone."""
    asked = [
        Request(LONG, 8, options, lora=adapter, cache=True)
        for adapter in (*adapters, None)
        for options in ({}, by("quest"))
    ]
    expected = [drive(llm, [replace(request, cache=False)])[0] for request in asked]
    together = drive(llm, asked)
    for answer, own in zip(together, expected, strict=True):
        assert_same(answer, own, TOLERANCE)
        assert answer.cached > BUDGET
    for answer, name in (together[0], "first"), (together[2], "second"):
        assert difference(answer, whole[name][1]) > 10 * TOLERANCE, "retrieval counts"
    for one, other in (0, 2), (0, 4), (2, 4):
        assert difference(together[one], together[other]) > 10 * TOLERANCE, "adapters count"


@pytest.mark.slow
def test_images_among_text(tmp_path):
    """Whole contexts have transformers' answers; others retrieve from an image as from text."""
    reference = device_models.make(device_models.vision, tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (56, 84, 3), dtype=np.uint8))
    text = [token if token < device_models.IMAGE else 7 for token in LONG]
    one = {"limit_mm_per_prompt": {"image": 1}}
    with engine(str(tmp_path), **ENGINE, **RETRIEVAL, **one) as llm:
        for place in 20, 250:
            ids = [*text[:place], 502, device_models.IMAGE, 503, *text[place:]]
            asked = [Request(ids, 6, options, images=[image]) for options in ({"exact": True}, {})]
            whole, sparse = (drive(llm, [request])[0] for request in asked)
            expected = device_models.logprobs(reference, tmp_path, asked[0], whole.tokens)
            assert whole.logprobs == pytest.approx(expected, abs=ANOTHER_CODE)
            assert sparse.logprobs[0] == whole.logprobs[0], "the prompt is exact"
            expected = device_models.logprobs(reference, tmp_path, asked[1], sparse.tokens)
            assert sparse.logprobs != pytest.approx(expected, abs=5 * ANOTHER_CODE)
