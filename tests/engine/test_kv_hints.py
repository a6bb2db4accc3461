"""vLLM's own KV hints (0.33): its front end refuses wrong ones, its scheduler follows the others.

``test_session_options`` has what they may say.
"""

import collections

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from benchmarks.stepper import BLOCK, Stepper
from tests.support.engine import Request, checkpoint, engine, model_of, prompt, shortened
from vllm_kvretrieval.store.listing import listed

vllm_hints = pytest.importorskip("vllm.v1.kv_hints", reason="vLLM 0.32 has no KV hints")

pytestmark = pytest.mark.model
BLOCKS = 90
ON_CPUS = 128
"""Tokens of a block of vLLM's engines on CPUs."""


def envelope(name, payload, version="1"):
    action = vllm_hints.KvHintAction("1", name, version, payload)
    return vllm_hints.KvHintsEnvelope("0.1", "1", [action])


@pytest.fixture(scope="module")
def processor():
    config = EngineArgs(
        checkpoint("SmolLM2-135M-Instruct"),
        enforce_eager=True,
        attention_backend="kvretrieval",
        additional_config={"kv_retrieval": {"sessions": True}},
    ).create_engine_config()
    return InputProcessor(config)


def process(processor, hints, **options):
    params = SamplingParams(extra_args={"kv_retrieval": options})
    inputs = tokens_input([1, 2])
    return processor.process_inputs("id", inputs, params, ("generate",), kv_hints=hints)


def test_the_front_end_lets_right_ones_through(processor):
    for hints in (
        envelope("kvretrieval.retain", {"seconds": 60}),
        envelope("router.placed", {"anything": [1]}, "7"),
        None,
    ):
        made = process(processor, hints, budget=512)
        assert made.kv_hints == hints
        assert made.sampling_params.extra_args == {"kv_retrieval": {"budget": 512}}


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        (envelope("kvretrieval.erase", {}), "there is no action 'kvretrieval.erase'"),
        (envelope("kvretrieval.retain", {"seconds": -1}), "retain=-1 must be a number of seconds"),
        (envelope("kvretrieval.retain", {"seconds": 1}, "2"), "has version '2'"),
        (envelope("kvretrieval.pin", {"session": "../x"}), "cannot be a session's name"),
        (envelope("kvretrieval.pin", {"session": "a"}), "pin=True needs a store"),
    ],
    ids=str,
)
def test_the_front_end_refuses_wrong_ones(processor, hints, message):
    with pytest.raises(VLLMClientError, match=message):
        process(processor, hints)


def test_the_scheduler_follows_them():
    """Wrong ones of a front end that does not look are left out; the request's options stay."""
    steps = Stepper(
        {"budget": 256, "sessions": True},
        blocks=BLOCKS,
        max_model_len=1024,
        enable_prefix_caching=True,
    )
    pool = steps.scheduler.kv_cache_manager.block_pool
    for hints, held in (
        (envelope("kvretrieval.erase", {}), 0),
        (envelope("kvretrieval.retain", {"seconds": "long"}), 0),
        (envelope("kvretrieval.retain", {"seconds": 600}), 4),
    ):
        name = steps.add(range(4 * BLOCK + 5), 2, {"exact": True}, kv_hints=hints)
        request = steps.scheduler.requests[name]
        assert steps.scheduler._options(request).exact
        steps.run()
        assert pool.get_num_free_blocks() == BLOCKS - 1 - held


model = model_of(shortened, "SmolLM2-135M-Instruct", 4)


def ask(llm, tokens, hints=None, count=2):
    """Tokens of a prompt that an engine finds in its prefix cache."""
    asked, cached = Request(tokens, count, cache=True), 0
    llm.llm_engine.add_request("name", asked.handed_in(), asked.params(), kv_hints=hints)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            cached = output.num_cached_tokens or 0
    return cached


@pytest.mark.engine
def test_an_engine_follows_them(model, tmp_path):
    """It pins a session over a restart, retains one, reads the first ahead, and lets go of it."""
    directory = tmp_path / "store"
    retrieval: dict[str, object] = {"home": "disk", "home_bytes": "32MiB", "store": str(directory)}
    retrieval |= {"budget": 256, "sessions": True}
    options = {"attention_backend": "kvretrieval", "enforce_eager": True, "max_model_len": 1024}
    memory = {"max_num_seqs": 2, "kv_cache_memory_bytes": 64 << 20}
    whole, counts = 7 * ON_CPUS, collections.Counter[str]()
    first, second = (prompt(whole + 5, seed) for seed in (1, 2))

    def start():
        return engine(model, **options, **memory, additional_config={"kv_retrieval": retrieval})

    def names():
        ((store,), _) = listed(str(directory), 10)
        return [name for context in store.contexts for name in context.names]

    with start() as llm:
        assert ask(llm, first, envelope("kvretrieval.pin", {"session": "a"})) == 0
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        assert ask(llm, second, envelope("kvretrieval.retain", {"seconds": 600})) == 0
        assert pool.get_num_free_blocks() == free - 7
    assert names() == ["session.a"]
    with start() as llm:
        half = llm.llm_engine.engine_core.engine_core.scheduler._store
        take = half.take_counts
        half.take_counts = lambda: (counts.update(taken := take()), taken)[1]
        ask(llm, second[:9], envelope("kvretrieval.prefetch", {"session": "a"}), count=200)
        assert counts["store_blocks_read_ahead"] == 7
        assert ask(llm, first) == whole
        ask(llm, second[:9], envelope("kvretrieval.unpin", {"session": "a"}))
    assert names() == []
