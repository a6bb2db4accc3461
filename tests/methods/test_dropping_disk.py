"""Methods that drop tokens with the KV cache on disk: the same answers as in memory.

What a request keeps lies in fast memory, packed; what it generates is read in place, and what it
has dropped not at all. A small Llama with random weights, in float32.
"""

from typing import Any

import pytest

from tests.support.engine import Request, assert_same, drive, engine, model_of, prompt, random_llama

pytestmark = pytest.mark.engine

BUDGET = 128
LAYERS, KV_HEADS = 4, 2
ALSO = ["snapkv", "h2o", "tova", "raas", "freekv"]
METHODS = ("entropykv", *ALSO)
TOLERANCE = 1e-4

model = model_of(random_llama, LAYERS, KV_HEADS)


def requests():
    """More than run at once, beyond the budget or within it; some outgrow it as they generate."""
    made = [
        Request(prompt(500 + 31 * i), 30, {"method": name}, arrives=3 * i)
        for i, name in enumerate(METHODS)
    ]
    made += [Request(prompt(100 + i), 60, {"method": name}) for i, name in enumerate(METHODS)]
    made += [
        Request(prompt(700), 12, {"method": "h2o", "exact": True}, arrives=5),
        Request(prompt(531), 12, {"method": "snapkv", "exact": True}, arrives=5),
        Request(prompt(640), 12, {"method": "snapkv", "budget": 64}, arrives=9),
        Request(prompt(500), 9, {"method": "snapkv"}, arrives=40, cache=True),
        Request(prompt(700), 20, {"method": "raas"}, arrives=8, aborts=20),
    ]
    return made


def answers(model, **retrieval):
    """All answers, then all once more, and the counts of recalls."""
    with engine(
        model,
        attention_backend="entropykv",
        additional_config={"kv_retrieval": {"budget": BUDGET, "also": ALSO} | retrieval},
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        skip_tokenizer_init=True,
        enforce_eager=True,
    ) as llm:
        found = [drive(llm, requests()) for _ in range(2)]
        complaints = llm.collective_rpc(lambda worker: worker.storage.check())
        slots: Any = llm.collective_rpc(
            lambda worker: [
                tuple(impl.storage.slots.shape)
                for impl in worker.retrieval_layers.values()
                if hasattr(impl.storage, "slots")
            ]
        )
    assert complaints == [""]
    return found, slots[0]


def test_answers_are_those_of_memory(model):
    expected, none = answers(model)
    ours, slots = answers(model, home="disk", recall_cache_bytes="8MiB")
    assert not none
    assert len(slots) == LAYERS
    for seats, heads, capacity, _ in slots:
        assert (seats, heads) == (4, KV_HEADS)
        assert capacity >= 2 * BUDGET, "layers may keep twice their part, by entropy"
    for run, single in zip(ours, expected, strict=True):
        for answer, other in zip(run, single, strict=True):
            assert_same(answer, other, TOLERANCE)
    dropping, exact = expected[0][METHODS.index("snapkv")], expected[0][2 * len(METHODS) + 1]
    pairs = zip(dropping.logprobs, exact.logprobs, strict=False)
    assert max(abs(a - b) for a, b in pairs) > 0.01
