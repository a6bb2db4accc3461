"""KV that vLLM's own connectors load: the page index follows, and so do prefix hits on it.

A prefill instance without retrieval stores its KV, a decode instance with retrieval loads it:
vLLM's example of disaggregation, in which a directory is the way from one to the other.
"""

import shutil
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.support.engine import (
    ROUNDING,
    Answer,
    Request,
    assert_same,
    drive,
    engine,
    model_of,
    prompt,
    random_llama,
)

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 2048,  # the example stores what a prompt's first chunk has computed
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}
RETRIEVAL: dict[str, Any] = {"budget": 128, "sink": 32, "window": 32}
RETRIEVAL |= {"also": {"kvretrieval": {}, "quest": {}}}
LOADED = 1184 // 32
"""Pages of the document that its connector loads."""
EVERY_STEP = ({"correction_threshold": 1.0}, {"method": "kvretrieval"}, {"method": "quest"})


def document(options, cache=True):
    return Request(prompt(1200, 0), 16, options, cache=cache)


def question(options, cache=True):
    return Request(prompt(1200, 0) + prompt(80, 1), 16, options, cache=cache)


model = model_of(random_llama, 4, 4)


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


def transfer(name, **extra):
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)


@pytest.fixture(scope="module")
def stock(model, storage):
    """The answers of vLLM without retrieval, which stores its cache. Its engine ends before ours
    starts."""
    transfers = transfer("ExampleConnector", shared_storage_path=str(storage))
    with engine(model, block_size=32, kv_transfer_config=transfers, **OPTIONS) as llm:
        return drive(llm, [document(None)])[0]


def freekv(model, transfers, **also):
    options = RETRIEVAL | {"also": RETRIEVAL["also"] | also}
    return engine(
        model,
        attention_backend="freekv",
        additional_config={"kv_retrieval": options},
        kv_transfer_config=transfers,
        worker_extension_cls="tests.support.home_worker.HomeWorker",
        **OPTIONS,
    )


@pytest.fixture(scope="module")
def llm(model, storage, stock):
    late = transfer("LateConnector", shared_storage_path=str(storage))
    late.kv_connector_module_path = "tests.support.late_connector"
    with freekv(model, late) as llm:
        yield llm


def one(llm, request) -> Answer:
    (answer,) = drive(llm, [request])
    return answer


def indexed(llm):
    """Pages that a layer has indexed anew since this was asked last."""
    (pages,) = llm.collective_rpc("loaded_pages")
    return pages


def forget(llm):
    """Let others' texts fill the cache and its index."""
    drive(llm, [Request(prompt(1900, seed), 2, {}) for seed in (90, 91, 92, 93)])
    llm.reset_prefix_cache()


def test_loaded_kv_is_retrieved_from(llm, storage, stock):
    """Requests load the cache, share it by prefix hits, run many at once, and compute it for
    comparison."""
    exact = one(llm, document({"exact": True}))
    assert exact.cached >= 1152, "loaded"
    assert_same(exact, stock, tolerance=1e-4)

    forget(llm)
    llm.collective_rpc("record_loads")
    loaded = drive(llm, [document(options) for options in EVERY_STEP])
    assert [answer.cached >= 1152 for answer in loaded] == [True, True, True]
    assert indexed(llm) == LOADED, "once, in blocks that had held other texts"
    hits = [one(llm, question(options)) for options in EVERY_STEP]
    assert [hit.cached >= 1152 for hit in hits] == [True, True, True], "on blocks that were loaded"
    asked = [ask(options) for options in EVERY_STEP for ask in (question, document)]
    crowd = drive(llm, asked)
    assert indexed(llm) == 0

    forget(llm)
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    connector.late = True
    late = drive(llm, [document(options) for options in EVERY_STEP])
    connector.late = False
    assert [answer.cached >= 1152 for answer in late] == [True, True, True]
    assert indexed(llm) == 3 * LOADED, "each in blocks of its own"

    shutil.rmtree(storage)
    storage.mkdir()
    forget(llm)
    documents = [one(llm, document(options, cache=False)) for options in EVERY_STEP]
    questions = [one(llm, question(options, cache=False)) for options in EVERY_STEP]
    assert documents[0].cached == 0
    assert len({answer.logprobs[-1] for answer in documents}) == len(EVERY_STEP)
    for answers, expected in (
        (loaded, documents),
        (late, documents),
        (hits, questions),
        (crowd[::2], questions),
        (crowd[1::2], documents),
    ):
        for answer, right in zip(answers, expected, strict=True):
            assert_same(answer, right, ROUNDING)


def test_a_cache_filled_without_prefill(model):
    """vLLM's connector for benchmarks of decoding: the indexes are those of the random keys.

    Read token by token, since one of the methods selects tokens.
    """
    transfers = transfer("DecodeBenchConnector", fill_mean=0.0, fill_std=0.5)
    with freekv(model, transfers, fier={}) as llm:
        llm.collective_rpc("record_loads")
        crowd = [Request(prompt(n, n), 8, {"method": "fier"}, cache=True) for n in (1500, 333)]
        drive(llm, crowd)
        differing, compared = llm.collective_rpc("compare_index")[0]
        assert differing == 0
        bounds, bits = 2 * 64 * 4, 64 * 32 // 8
        assert compared == 3 * 4 * (1499 // 32 + 332 // 32) * (bounds + bounds + bits)
