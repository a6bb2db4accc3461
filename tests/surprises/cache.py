"""vLLM's prefix cache by itself: requests that are read, answered and freed, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

BLOCK = 16
CHUNK = 256
"""Tokens that a step reads."""
SHAPE: dict[str, Any] = {
    "block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32
}  # fmt: skip
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)

hasher = get_request_block_hasher(BLOCK, sha256)


def tokens(count: int, first: int) -> list[int]:
    """A text that begins with a number."""
    return list(range(first, first + count))


def request(prompt: Sequence[int], name: str = "a", lora: Any = None, **sampling: Any) -> Request:
    """A request of vLLM's scheduler.

    The hash of no block is a global of vLLM's, which other tests of this process set as well.
    """
    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(**{"max_tokens": 1} | sampling),
        pooling_params=None,
        block_hasher=hasher,
        lora_request=lora,
    )


class Cache:
    """The prefix cache of an engine.

    Args:
        specs: Of groups of layers.
        interval: ``prefix_cache_retention_interval``.
        options: Further ones of vLLM's manager.
    """

    def __init__(self, *specs: KVCacheSpec, interval: int | None = 0, **options: Any) -> None:
        groups = [KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(specs)]
        self.manager = KVCacheManager(
            KVCacheConfig(2000, [], groups, prefix_cache_retention_interval=interval),
            max_model_len=8192,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            max_in_flight_tokens=CHUNK,
            **options,
        )
        self._asked = 0

    def ask(self, prompt: Sequence[int], answer: Sequence[int] = (), **sampling: Any) -> int:
        """Serve a request; how many tokens of its prompt were there."""
        self._asked += 1
        asked = request(prompt, str(self._asked), max_tokens=len(answer) + 1, **sampling)
        blocks, found, boundary = self.manager.get_computed_blocks(asked)
        self.manager.record_prefix_cache_stats(asked, found)
        asked.shared_prefix_boundary = boundary  # as the scheduler notes it
        done = found
        while done < len(prompt):
            count = min(CHUNK, len(prompt) - done)
            first = (found, blocks) if done == found else ()
            assert self.manager.allocate_slots(asked, count, *first) is not None
            done += count
            asked.num_computed_tokens = done
        for token in answer:
            asked.append_output_token_ids(token)
            assert self.manager.allocate_slots(asked, 1) is not None
            asked.num_computed_tokens += 1
        self.manager.free(asked)
        return found
