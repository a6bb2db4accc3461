"""Views of vLLM's KV cache if its layers lie in several places."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, create_kv_cache_views


def layer_views(
    kv_cache_config: KVCacheConfig,
    layout: Any,
    kernel_block_size: int,
    places: Iterable[tuple[Sequence[str], torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """The layers' caches by name, as vLLM would make them from one memory.

    Args:
        kv_cache_config: A single group of layers that are all alike.
        layout: vLLM's, resolved.
        kernel_block_size: Tokens per page.
        places: Names of layers, and int8 memory for them, one after another.
    """
    (tensor,), (group,) = kv_cache_config.kv_cache_tensors, kv_cache_config.kv_cache_groups
    kv_caches: dict[str, torch.Tensor] = {}
    for names, raw in places:
        views = create_kv_cache_views(
            raw,
            group.kv_cache_spec,
            kv_cache_config.num_blocks,
            layout,
            replace(tensor, layers=list(names)),
            kernel_block_size,
        )
        kv_caches.update(zip(names, views, strict=True))
    return kv_caches
