"""vLLM's KV cache where its layers lie in several memories.

To vLLM a block is a block: it allots, shares, hashes and frees them by number, and writes to them
through the tensors made here. But it has no say in where a cache lies. So it allocates a cache of a
single block (``compat.one_block``), which is then released for the one that is meant.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def shared_memory(
    kv_cache_config: KVCacheConfig, layers: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """The memory of a KV cache whose groups of layers share it: a block is of one of them.

    Args:
        kv_cache_config: vLLM's, of the cache that it has allocated.
        layers: vLLM's layers by name.

    Returns:
        uint8 [blocks, n] each; together they have all bytes of a block, whichever group has it.
    """
    first = kv_cache_config.kv_cache_tensors[0]
    cache = layers[first.layers[0]].kv_cache
    cache = cache if isinstance(cache, torch.Tensor) else cache[0]
    memory = torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage())
    assert memory.numel() == first.size, "all groups lie in one allocation"
    blocks, end = kv_cache_config.num_blocks, 0
    places = {
        (tensor.offset + layer * tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for layer in range(len(tensor.layers))
    }
    for begin, stride in sorted(places):
        if begin >= end:  # otherwise it lies beside other layers, in the same blocks
            end = begin + blocks * stride
            yield memory[begin:end].view(blocks, stride)
