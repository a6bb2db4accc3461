"""What goes where when the KV cache's home is host memory."""

import dataclasses

import pytest
import torch

from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.engine.cuda.tiers import BOOKS_PER_SLOT, HostTiers
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.tiers.sizes import Cache

GIB = 2**30
LLAMA = Cache(
    retrieval_layers=31,
    dense_layers=1,
    kv_heads=8,
    block_size=32,
    block_bytes=32 * 8 * 256 * 2,
    head_size=128,
    dtype=torch.bfloat16,
    max_num_seqs=8,
    max_model_len=131072,
    step_tokens=8192,
)


def config(**options):
    return RetrievalConfig(**{"method": "freekv", "budget": 2048, **options})


def plan(cache=LLAMA, device=60 * GIB, host=512 * GIB, blocks=None, **options):
    return HostTiers.plan(config(**options), cache, device=device, host=host, blocks=blocks)


def test_a_gpu_serves_eight_long_contexts():
    """Each takes a tenth of the device memory of its whole KV cache, and the rest is at home."""
    tiers = plan()
    assert tiers.blocks == 8 * 4096 + 1
    assert tiers.capacity == 2 * 2048 // 32
    assert tiers.home == tiers.blocks * 31 * LLAMA.block_bytes
    assert tiers.slots == 8 * 8 * 31 * 128 * (32 * 512 + BOOKS_PER_SLOT)
    assert tiers.staging == 2 * 4096 * LLAMA.block_bytes
    assert tiers.device < (tiers.home + tiers.dense) / 9


def test_fewer_slots_before_fewer_blocks():
    whole = plan()
    tight = plan(device=whole.device - whole.slots // 4)
    assert (tight.blocks, tight.capacity) == (whole.blocks, 96)
    tighter = plan(device=whole.device - whole.slots)
    assert tighter.blocks < whole.blocks
    assert tighter.capacity == 64
    assert tighter.device <= whole.device - whole.slots


def test_host_memory_bounds_the_blocks():
    tiers = plan(host=20 * GIB)
    assert tiers.home <= 20 * GIB < tiers.home + 31 * LLAMA.block_bytes


def test_sizes_that_the_user_sets():
    tiers = plan(home="auto", home_bytes=30 * GIB, recall_cache_bytes=2 * GIB)
    assert tiers.blocks == 30 * GIB // (31 * LLAMA.block_bytes)
    assert tiers.slots <= 2 * GIB
    assert plan(blocks=5000).blocks == 5000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": 2 * GIB}, "(?s)4097 blocks .*of 2.0 GiB of the device"),
        ({"host": 10 * GIB}, "(?s)15.5 GiB of host memory.* There are 10.0 GiB"),
        ({"blocks": 4096}, "override 4096: 4097 blocks"),
        ({"blocks": 10**6}, "override 1000000: 1000000 blocks"),
        ({"home": "auto", "home_bytes": 600 * GIB}, "home_bytes=.*There are 512.0 GiB"),
        ({"home": "auto", "recall_cache_bytes": GIB}, "recall_cache_bytes=1073741824 is too small"),
    ],
)
def test_what_does_not_fit_is_refused(given, words):
    with pytest.raises(RetrievalConfigError, match=words):
        plan(**given)


def test_a_model_of_short_contexts():
    """Staging takes a step's tokens, were they one request's."""
    small = dataclasses.replace(LLAMA, max_model_len=4096, dense_layers=0)
    assert plan(small).staging == 2 * 8192 // 32 * LLAMA.block_bytes


def test_fewer_blocks_where_another_worker_has_less_room():
    """What grows with them shrinks; all else is as planned."""
    whole = plan()
    assert whole.of(whole.blocks) == whole
    fewer = whole.of(3 * 4096)
    given = plan(blocks=3 * 4096)
    assert fewer == dataclasses.replace(given, capacity=whole.capacity, slots=whole.slots)
