"""vLLM's V1 and V2 model runners serve the same answers, to the last bit.

Both engines run in one process (``support/runners.py``), over small random models. A cache that is
too small for three long requests lets one of them be preempted. Answers to adapters, embeddings
and images are held against stock vLLM and transformers by ``tests/models/test_inputs.py``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.support import device_models, mixed_models, runners
from tests.support.adapters import random_lora
from tests.support.engine import Request, by, difference, prompt, random_llama

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {
    "attention_backend": "freekv",
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "num_gpu_blocks_override": 26,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}
BUDGET = {"budget": 128, "sink": 32, "window": 32}
FILE = BUDGET | {"also": ["quest"], "home": "disk"}
HOUSES: dict[str, dict[str, Any]] = {
    "memory": BUDGET | {"also": ["kvretrieval", "quest", "streamingllm", "snapkv"]},
    "file": FILE,
    "encoded": FILE | {"codec": "k8v4", "streaming_attention": True},
    "sliding windows": BUDGET | {"also": ["kvretrieval", "snapkv"]},
    "windows and a file": FILE,
    "states and a file": FILE,
    "shared keys and a file": FILE,
}
MODELS = {
    "sliding windows": device_models.windows,
    "windows and a file": device_models.windows,
    "states and a file": device_models.states,
    "shared keys and a file": lambda path: mixed_models.gemma4_shared(),
}
"""The small models of some engines; others have a Llama."""
BLOCKS = {
    "sliding windows": 40,
    "windows and a file": 26 + 2 * 4 * (16 + 7),
    "states and a file": 13 + 2 * 4 * (8 + 2),
    "shared keys and a file": 26 + 2 * 4 * 5,
}
"""Of a cache whose kinds of layers have their own blocks. In memory nobody is preempted: with room
for one request of the greatest length there is room for three of the long ones. In a file, 26 lie
there, or 13 with twice the tokens; the others are twice those of four requests in the dense layer,
in windows and of states."""
SLOW = pytest.mark.slow
MODULES = {"v1": "vllm.v1.worker.cpu_model_runner", "v2": "vllm.v1.worker.cpu.model_runner"}
MEMORY = OPTIONS | {"additional_config": {"kv_retrieval": HOUSES["memory"]}}
ADAPTED = MEMORY | {
    "enable_lora": True,
    "max_loras": 3,  # one more than there are: see docs/limits.md
    "max_lora_rank": 8,
    "enable_prompt_embeds": True,
}
WITH_IMAGES = MEMORY | {
    "limit_mm_per_prompt": {"image": 1},
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": False,
}
LONG = prompt(300)


def crowd(methods):
    """Prompts in chunks beside requests that decode; one is aborted, and one waits for a seat."""
    return [
        Request(prompt(200), 10, {}, cache=True),
        Request(prompt(90), 12, {}),
        Request(prompt(330), 6, {"correction_threshold": 1.0}, arrives=1),
        Request(prompt(250), 9, {}, arrives=2, aborts=9),
        *(
            Request(prompt(180 + number), 6, by(method), arrives=3 + number)
            for number, method in enumerate(methods)
        ),
        Request(prompt(260), 5, {"exact": True}, arrives=5),
    ]


def again():
    """Requests with a beginning that is in the prefix cache."""
    return [
        Request(prompt(200), 8, {}, cache=True),
        Request(prompt(200), 6, {}, arrives=3, cache=True),
        Request(prompt(200)[:130] + prompt(60), 6, {}, arrives=4, cache=True),
    ]


def outgrowing():
    """Three requests that outgrow the cache."""
    return [Request(prompt(n), 20, {}) for n in (250, 249, 248)]


class Served:
    """What an engine has answered, by its model runner."""

    def __init__(self, call, model, house):
        self.house, methods = house, HOUSES[house]["also"]
        options = OPTIONS | {"additional_config": {"kv_retrieval": HOUSES[house]}}
        options["num_gpu_blocks_override"] = BLOCKS.get(house, OPTIONS["num_gpu_blocks_override"])
        self.modules, self.answers = {}, {}
        for runner in ("v1", "v2"):
            call(runners.open_engine, runner, model, options)
            (worker,) = call(runners.describe)
            self.modules[runner] = worker["runner"]
            self.answers[runner] = {
                "crowd": call(runners.drive, crowd(methods)),
                "idle": call(runners.idle),
                "again": call(runners.drive, again()),
                "outgrowing": call(runners.drive_preempting, outgrowing()),
                "session": call(runners.converse, [prompt(200), prompt(100), prompt(1)], 6, {}),
                "left": call(runners.left),
                "counted": call(runners.counted, Request(prompt(250), 9, {})),
            }
            call(runners.close_engine)


def model_of(house, path):
    """A model for an engine, saved at a path."""
    if house in MODELS:
        device_models.make(MODELS[house], path)
        return str(path)
    return random_llama(path, layers=3, kv_heads=2)


@pytest.fixture(
    scope="module", params=["memory", "file", *(pytest.param(h, marks=SLOW) for h in [*HOUSES][2:])]
)
def served(request, emulated, tmp_path_factory):
    model = model_of(request.param, tmp_path_factory.mktemp("toy") / "model")
    return Served(emulated, model, request.param)


def test_both_runners_have_served(served):
    assert served.modules == MODULES


@pytest.mark.parametrize("part", ["crowd", "again", "outgrowing", "session"])
def test_answers_do_not_depend_on_the_runner(served, part):
    """Batches with chunks of prompts, prefix hits, a preempted request, and a session."""
    first, second = (served.answers[runner][part] for runner in ("v1", "v2"))
    assert first == second


def test_the_parts_are_what_they_are_meant_to_be(served):
    answers = served.answers["v2"]
    assert answers["idle"]
    # Of a shorter beginning the blocks of a sliding window are gone.
    shorter = 0 if served.house == "sliding windows" else 128
    assert [answer.cached for answer in answers["again"][1:]] == [192, shorter]
    _, preempted = answers["outgrowing"]
    assert bool(preempted) == (served.house != "sliding windows")
    assert len(answers["session"]) == 3
    assert answers["left"] <= 1, "no request has kept its seat"


def test_counts_of_workers_arrive_with_their_outputs(served):
    """But for those that our connector brings."""
    first, second = (served.answers[runner]["counted"] for runner in ("v1", "v2"))
    assert first == second
    assert bool(first.get("heads_decoded")) == (HOUSES[served.house].get("home") != "disk")


def both(call, model, options, parts):
    """What an engine answers to each part, one after the other, with either runner."""
    found = []
    for runner in "v1", "v2":
        call(runners.open_engine, runner, model, options)
        assert call(runners.describe)[0]["runner"] == MODULES[runner]
        found.append({name: call(runners.drive, requests) for name, requests in parts.items()})
        call(runners.close_engine)
    return found


def test_adapters_and_embeddings(emulated, tmp_path):
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
    theirs, ours = both(emulated, model, ADAPTED, parts)
    assert ours == theirs
    for part in "adapters", "again":
        first_answer, second_answer, *_ = ours[part]
        assert difference(first_answer, second_answer) > 0.01, "adapters count"
    assert all(answer.cached > 128 for answer in (*ours["again"][:3], *ours["found"]))
    assert [a.tokens for a in ours["embeddings"]] == [a.tokens for a in ours["ids"]]
    assert difference(ours["ids"][0], ours["exact"][0]) > 0.01, "retrieval counts"


@pytest.mark.slow
def test_images_among_text(emulated, tmp_path):
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
    theirs, ours = both(emulated, str(tmp_path), WITH_IMAGES, parts)
    assert ours == theirs
    assert difference(ours["exact"][0], ours["sparse"][0]) > 0.01, "retrieval counts"
