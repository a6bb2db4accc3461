"""vLLM's KV cache where its layers lie in several memories.

To vLLM a block is a block: it allots, shares, hashes and frees them by number, and writes to them
through the tensors made here. But it has no say in where a cache lies. So it allocates a cache of a
single block (``compat.one_block``), which is then released for the one that is meant.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, create_kv_cache_views
from vllm.v1.worker.utils import bind_kv_cache_to_layers, map_kv_caches_to_kernel_blocks


def move_kv_cache(
    runner: Any,
    kv_cache_config: KVCacheConfig,
    page_size: int,
    memories: Iterable[tuple[Sequence[str], torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Give a model runner a KV cache in place of its own.

    Args:
        runner: vLLM's model runner, V1 or V2.
        kv_cache_config: The cache that it gets; a single group of layers that are all alike.
        page_size: Tokens per page.
        memories: Names of layers, and int8 memory for them, one after another.

    Returns:
        The layers' caches by name.
    """
    runner.kv_cache_config = kv_cache_config = deepcopy(kv_cache_config)
    layout = runner.cache_config.get_resolved_kv_cache_layout()
    (tensor,), (group,) = kv_cache_config.kv_cache_tensors, kv_cache_config.kv_cache_groups
    kv_caches: dict[str, torch.Tensor] = {}
    for names, raw in memories:  # as vLLM would make them from one memory
        views = create_kv_cache_views(
            raw,
            group.kv_cache_spec,
            kv_cache_config.num_blocks,
            layout,
            replace(tensor, layers=list(names)),
            page_size,
        )
        kv_caches.update(zip(names, views, strict=True))
    attn_groups = [group for groups in runner.attn_groups for group in groups]
    bind_kv_cache_to_layers(
        map_kv_caches_to_kernel_blocks(kv_caches, attn_groups),
        runner.compilation_config.static_forward_context,
        kv_cache_groups=kv_cache_config.kv_cache_groups,
    )
    runner.kv_caches = list(kv_caches.values())
    return kv_caches
