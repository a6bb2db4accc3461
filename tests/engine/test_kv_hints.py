"""vLLM's own KV hints (0.33): its front end refuses wrong ones, its scheduler follows the others.

``test_session_options`` has what they may say.
"""

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from benchmarks.stepper import BLOCK, Stepper
from tests.support.engine import checkpoint

vllm_hints = pytest.importorskip("vllm.v1.kv_hints", reason="vLLM 0.32 has no KV hints")

pytestmark = pytest.mark.model
BLOCKS = 90


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
