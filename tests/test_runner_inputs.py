"""Adapters (LoRA), prompt embeddings and images with vLLM's V2 model runner: V1's answers.

What they are to be is held against stock vLLM and transformers by ``tests/test_inputs.py``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from tests import device_models, runners
from tests.adapters import random_lora
from tests.engine import Request, by, difference, prompt, random_llama
from tests.test_runners import HOUSES, OPTIONS

pytestmark = pytest.mark.engine

INPUTS: dict[str, Any] = OPTIONS | {
    "additional_config": {"kv_retrieval": HOUSES["memory"]},
    "enable_lora": True,
    "max_loras": 3,
    "max_lora_rank": 8,
    "enable_prompt_embeds": True,
}
LONG = prompt(300)


def answers(pool, runner, model, options, parts):
    """What an engine answers to each part, one after the other."""

    def call(function, *args):
        return pool.submit(function, *args).result()

    call(runners.open_engine, runner, model, options)
    assert ("v2" if ".cpu." in call(runners.describe)[0]["runner"] else "v1") == runner
    found = {name: call(runners.drive, requests) for name, requests in parts.items()}
    call(runners.close_engine)
    return found


@pytest.fixture(scope="module")
def pool():
    with runners.start() as pool:
        yield pool


def test_adapters_and_embeddings(pool, tmp_path):
    """In company: adapters, and embeddings in place of ids; with prefix hits."""
    model = random_llama(tmp_path / "model", layers=3, kv_heads=2)
    first, second = (random_lora(model, tmp_path / str(number), number) for number in (1, 2))
    table = load_file(Path(model) / "model.safetensors")["model.embed_tokens.weight"]
    asked = [
        Request(LONG, 8, {}, lora=first, cache=True),
        Request(LONG, 8, {}, lora=second, cache=True),
        Request(LONG, 8, by("kvretrieval"), lora=second, arrives=2, cache=True),
        Request(prompt(200), 8, {}, arrives=3),
    ]
    embedded = Request(LONG, 8, {}, embeddings=table[LONG])
    parts = {
        "adapters": asked,
        "again": asked,
        "embeddings": [embedded, replace(embedded, options=by("snapkv"), arrives=2)],
        "found": [replace(embedded, cache=True)],
        "ids": [Request(LONG, 8, {}), Request(LONG, 8, by("snapkv"), arrives=2)],
        "exact": [Request(LONG, 8, {"exact": True})],
    }
    theirs, ours = (answers(pool, runner, model, INPUTS, parts) for runner in ("v1", "v2"))
    assert ours == theirs
    for part in "adapters", "again":
        first_answer, second_answer, *_ = ours[part]
        assert difference(first_answer, second_answer) > 0.01, "adapters count"
    assert all(answer.cached > 128 for answer in (*ours["again"], *ours["found"]))
    assert [a.tokens for a in ours["embeddings"]] == [a.tokens for a in ours["ids"]]
    assert difference(ours["ids"][0], ours["exact"][0]) > 0.01, "retrieval counts"


@pytest.mark.slow
def test_images_among_text(pool, tmp_path):
    device_models.make(device_models.vision, tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (56, 84, 3), dtype=np.uint8))
    text = [token if token < device_models.IMAGE else 7 for token in LONG]
    ids = [*text[:150], 502, device_models.IMAGE, 503, *text[150:]]
    parts = {
        name: [
            Request(ids, 6, options, images=[image]),
            Request(text, 6, options, arrives=2),
        ]
        for name, options in (("exact", {"exact": True}), ("sparse", {}))
    }
    options = INPUTS | {"limit_mm_per_prompt": {"image": 1}, "max_num_batched_tokens": 512}
    for name in "enable_lora", "max_loras", "max_lora_rank", "enable_prompt_embeds":
        del options[name]
    options["skip_tokenizer_init"] = False
    theirs, ours = (
        answers(pool, runner, str(tmp_path), options, parts) for runner in ("v1", "v2")
    )
    assert ours == theirs
    assert difference(ours["exact"][0], ours["sparse"][0]) > 0.01, "retrieval counts"
