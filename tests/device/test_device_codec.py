"""A GPU's engine whose pages are encoded in host memory answers as a CPU's with the same codec.

The GPU's runs on the CPU: see support/device_engine.py. Its model is random, and computes in
float16. All requests of a CPU have the engine for themselves, since chunks of prompts see their
own tokens as the model made them.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.support import device_engine
from tests.support.engine import Request, alone, assert_same, by, engine, random_llama

pytestmark = pytest.mark.engine

PAGE, CHUNK = 16, 64
SIZES: dict[str, Any] = {"page_size": PAGE, "sink": PAGE, "window": 2 * PAGE, "budget": 5 * PAGE}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ttkv": ("ttkv", SIZES | {"also": {"shadowkv": {}}}),
    "kivi": ("kivi", {"page_size": PAGE, "codec": "k4v4"}),
    "kvquant": ("kvquant", {"page_size": PAGE, "codec": "k4v4_sparse"}),
    "freekv": ("freekv", SIZES | {"codec": "k4v4", "home": "host"}),
}
"""Of 2 bits a rounding of the model's decides which is nearer, and the answers part."""
WHOLE = "kivi", "kvquant"
"""Those that attend to whole contexts."""
STOCK = {
    "dtype": "float16",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": CHUNK,
    "skip_tokenizer_init": True,
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
TOLERANCE = 0.05
"""The tolerance of log-probs, whose sums differ in float16, and with them some codes of 4 bits. A
codec does ten times as much to the answers."""


def prompt(tokens, seed):
    """Token ids."""
    return [(place * place * 7 + place * seed + 11 * seed) % 509 + 1 for place in range(tokens)]


REQUESTS = {
    "beyond its budget": Request(prompt(150, 5), 14, {}),
    "soon beyond it": Request(prompt(70, 2), 20, {}),
    "exact": Request(prompt(111, 3), 8, {"exact": True}),
    "of a last token that comes alone": Request(prompt(129, 4), 4, {}),
}
OWN = {
    "kvquant": {"beyond its budget": Request(prompt(150, 9), 14, {})},
    "ttkv": {"by landmarks": Request(prompt(150, 6), 14, by("shadowkv"))},
}
"""Requests of a method, to whose answer no other token is nearly as likely as the one chosen; or by
an index that is built of entries as they become complete."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("toy") / "model", layers=3, kv_heads=2)


def options(name, **more):
    backend, given = METHODS[name]
    return {"attention_backend": backend, "additional_config": {"kv_retrieval": given | more}}


@pytest.fixture(
    scope="module",
    params=[
        *("ttkv", "kivi"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("kvquant", "freekv")),
    ],
)
def answers(request, model):
    """The name of the method, its answers on the CPU, and the emulated engine's process."""
    name, expected = request.param, {}
    with engine(model, enforce_eager=True, **STOCK, **options(name, home="disk")) as llm:
        for asked, one in (REQUESTS | OWN.get(name, {})).items():
            expected[asked] = alone(llm, one)
    with device_engine.start() as pool:
        pool.submit(
            device_engine.open_engine,
            model,
            STOCK | options(name) | {"block_size": 2 * PAGE, "compilation_config": GRAPHS},
        ).result()
        yield name, expected, lambda function, *args: pool.submit(function, *args).result()


def test_answers_are_the_cpus(answers):
    """One by one, with pages that fill and leave the window in between."""
    name, expected, ask = answers
    for asked, one in (REQUESTS | OWN.get(name, {})).items():
        (answer,) = ask(device_engine.drive, [one])
        assert_same(answer, expected[asked], TOLERANCE)


def test_requests_do_not_depend_on_others(answers):
    """Prompts that are read in one piece beside steps that decode, and by themselves."""
    name, _, ask = answers
    asked = {} if name in WHOLE else {"budget": 4 * PAGE}
    crowd = [Request(prompt(55, 20), 14, asked)]
    crowd += [Request(prompt(28 + 7 * n, 20 + n), 8, asked, arrives=2 + n) for n in (1, 2)]
    together = ask(device_engine.drive, crowd)
    for one, answer in zip(crowd, together, strict=True):
        (alone_,) = ask(device_engine.drive, [replace(one, arrives=0)])
        assert_same(answer, alone_, TOLERANCE)


def test_graphs_serve_what_they_can(answers):
    """Exact requests, and all of a method that attends to everything, are eager."""
    name, _, ask = answers
    before = sum(ask(device_engine.replays_by_rows).values())
    ask(device_engine.drive, [REQUESTS["exact"]])
    assert sum(ask(device_engine.replays_by_rows).values()) == before
    ask(device_engine.drive, [REQUESTS["soon beyond it"]])
    assert (sum(ask(device_engine.replays_by_rows).values()) > before) == (name not in WHOLE)


def test_prefixes_of_others(answers):
    """A request that finds pages of another one reads them decoded, also while that one runs."""
    _, _, ask = answers
    first = Request(prompt(100, 7), 9, {}, cache=True)
    second = Request(first.prompt + prompt(30, 8), 3, {}, cache=True, arrives=5)
    _, running = ask(device_engine.drive, [first, second])
    ask(device_engine.reset_prefix_cache)
    ask(device_engine.drive, [first])
    (gone,) = ask(device_engine.drive, [replace(second, arrives=0)])
    assert (running.cached, gone.cached) == (96, 96)
    assert_same(running, gone, 1e-5)
