"""A GPU's worker starts by vLLM's own methods; its platform chooses. See device_start.py."""

import math

import pytest
import torch

from tests.support import device_engine, device_start
from tests.support.engine import Request, prompt, random_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAGE = 16
UTILIZATION = 0.9
ENGINE = {
    "attention_backend": "freekv",
    "dtype": "float16",
    "max_num_seqs": 4,
    "hf_overrides": {"max_position_embeddings": 8192},
    "max_model_len": 8192,  # scores then take more than a block
    "max_num_batched_tokens": 64,
    "block_size": 2 * PAGE,
    "gpu_memory_utilization": UTILIZATION,
    "skip_tokenizer_init": True,
    # Some batches have graphs, others have not.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1],
    },
    "additional_config": {
        "kv_retrieval": {"page_size": PAGE, "sink": PAGE, "window": PAGE, "budget": 4 * PAGE}
    },
}
OURS = "vllm_kvretrieval.attention.cuda.backend.FREEKV over "


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Calls functions of tests/support/device_start.py in the engine's process."""
    model = random_llama(tmp_path_factory.mktemp("toy"), layers=3, kv_heads=2)
    with device_engine.start() as pool:

        def call(function, *args):
            return pool.submit(function, *args).result()

        call(device_start.open_engine, model, ENGINE)
        yield call


def test_memory(started):
    """The KV cache and the state beside it use all memory that vLLM leaves for the cache, and no
    more."""
    sizes = started(device_start.describe)
    requested = math.ceil(device_start.TOTAL * UTILIZATION)
    held = device_start.USED[1] - device_start.USED[0]
    assert sizes["available"] == requested - held - device_start.PEAK - sizes["graphs"]
    taken = sizes["caches"] + sizes["workspaces"]
    assert 0.99 * sizes["available"] < taken <= sizes["available"]


def test_nothing_is_compiled_while_serving(started):
    """Beyond what the start has compiled: prompts in chunks, contexts within budgets and not."""
    requests = [
        Request(prompt(150, 1), 6, {}),
        Request(prompt(90, 2), 5, {}, arrives=2),
        Request(prompt(30, 3), 4, {}, arrives=3),
    ]
    answers = started(device_engine.drive, requests)
    assert [len(answer.tokens) for answer in answers] == [6, 5, 4]
    late, before = started(device_engine.launched_late)
    assert late == []
    assert before > 5


BACKENDS = {
    "A100": ((8, 0), True, {}, f"{OURS}FLASH_ATTN"),
    "H100, with a connector": ((9, 0), True, {"use_kv_connector": True}, f"{OURS}FLASH_ATTN"),
    "without FlashAttention": ((10, 0), False, {"head_size": 256}, f"{OURS}TRITON_ATTN"),
    "consumer's": ((12, 0), False, {}, f"{OURS}TRITON_ATTN"),
    "too old": ((7, 5), True, {}, "compute capability not supported"),
    "a window": ((9, 0), True, {"has_sliding_window": True}, "vllm.v1.attention.backends."),
    "a dtype": ((9, 0), True, {"dtype": torch.float32}, "does not support dtype torch.float32"),
    "a cache of 8 bits": ((9, 0), True, {"kv_cache_dtype": "fp8"}, "fp8"),
}


def test_backends(started):
    """Those that the CUDA platform chooses on GPUs that are not there, or why it chooses none."""
    cases = [(capability, flash, changed) for capability, flash, changed, _ in BACKENDS.values()]
    answers = started(device_start.choose_backends, cases)
    for (name, (*_, expected)), answer in zip(BACKENDS.items(), answers, strict=True):
        assert expected in answer, f"{name}: {answer}"
