"""vLLM's KV cache where its layers lie in several memories.

To vLLM a block is a block: it allots, shares, hashes and frees them by number, and writes to them
through the tensors made here. But it has no say in where a cache lies. So it allocates a cache of a
single block (``compat.one_block``), which is then released for the one that is meant.

Where a model has layers of several kinds, vLLM keeps them in groups with block tables of their own.
The blocks of home's groups come first by number; those of the other groups come behind them, and
have addresses for all numbers, of which only theirs take memory (``engine/block_pools.py``).
"""

import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.worker.utils import bind_kv_cache_to_layers, map_kv_caches_to_kernel_blocks

from vllm_kvretrieval.compat import kernel_block_sizes

MAP_NORESERVE = 0x4000  # not named by Python 3.11


def addresses(size: int) -> tuple[mmap.mmap, torch.Tensor]:
    """A mapping that takes memory only where it is written to, and the same as int8 [size]."""
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return mapping, torch.frombuffer(mapping, dtype=torch.int8)


def home_groups(kv_cache_config: KVCacheConfig, at_home: Collection[str]) -> tuple[int, ...]:
    """Numbers of the groups of layers that lie in home.

    Args:
        kv_cache_config: vLLM's.
        at_home: Names of layers that lie in home; all layers of their groups do.
    """
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return tuple(n for n, group in groups if not {*at_home}.isdisjoint(group.layer_names))


def layers_at_home(kv_cache_config: KVCacheConfig, homes: Collection[int]) -> tuple[list[str], int]:
    """Names of the layers of some groups, in the order of the model, and bytes of each one's block.

    Args:
        kv_cache_config: vLLM's.
        homes: Numbers of the groups.
    """
    groups = [kv_cache_config.kv_cache_groups[home] for home in homes]
    names = [name for group in groups for name in group.layer_names]
    return sorted(names, key=extract_layer_index), groups[0].kv_cache_spec.page_size_bytes


def move_kv_cache(
    runner: Any,
    kv_cache_config: KVCacheConfig,
    homes: Collection[int],
    blocks: int,
    memories: Iterable[tuple[Sequence[str], torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Give a model runner a KV cache in place of its own.

    Args:
        runner: vLLM's model runner, V1 or V2, with a cache of one block.
        kv_cache_config: The cache that it gets.
        homes: Numbers of the groups whose layers lie in ``memories``; all these are alike.
        blocks: Blocks of these groups.
        memories: Names of layers, and int8 memory for them, one after another.

    Returns:
        The layers' caches by name.
    """
    layout = runner.cache_config.get_resolved_kv_cache_layout()
    page_sizes = kernel_block_sizes(runner)
    # Layers that read the cache of others are in the runner's groups alone.
    groups = runner.kv_cache_config.kv_cache_groups
    runner.kv_cache_config = kv_cache_config = deepcopy(kv_cache_config)
    kv_cache_config.kv_cache_groups = groups
    first, others = min(homes), dict[str, torch.Tensor]()
    spec, kv_caches = groups[first].kv_cache_spec, dict[str, torch.Tensor]()
    for names, raw in memories:  # as vLLM would make them from one memory
        size = spec.page_size_bytes
        placed = KVCacheTensor(raw.numel(), list(names), blocks * size, size)
        views = create_kv_cache_views(raw, spec, blocks, layout, placed, page_sizes[first])
        kv_caches.update(zip(names, views, strict=True))
    tensors = [t for t in kv_cache_config.kv_cache_tensors if t.layers[0] not in kv_caches]
    if tensors:
        others = _others(kv_cache_config, tensors, layout, page_sizes)
    kv_caches.update(others)
    layers = runner.compilation_config.static_forward_context
    for name in (name for group in groups for name in group.layer_names):
        if name not in kv_caches:
            kv_caches[name] = kv_caches[layers[name].kv_sharing_target_layer_name]
    attn_groups = [group for groups in runner.attn_groups for group in groups]
    bind_kv_cache_to_layers(
        map_kv_caches_to_kernel_blocks(kv_caches, attn_groups),
        layers,
        kv_cache_groups=kv_cache_config.kv_cache_groups,
    )
    # Those whose blocks vLLM copies, by numbers that not all layers have.
    runner.kv_caches = list((others or kv_caches).values())
    return kv_caches


def _others(
    kv_cache_config: KVCacheConfig,
    tensors: Sequence[KVCacheTensor],
    layout: Any,
    page_sizes: Sequence[int],
) -> dict[str, torch.Tensor]:
    """The caches of layers that do not lie in home, in addresses that their groups share."""
    _, raw = addresses(tensors[0].size)
    kv_caches: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        (number,) = home_groups(kv_cache_config, tensor.layers)
        spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[tensor.layers[0]]
        blocks = kv_cache_config.num_blocks
        views = create_kv_cache_views(raw, spec, blocks, layout, tensor, page_sizes[number])
        kv_caches.update(zip(tensor.layers, views, strict=True))
    return kv_caches


def shared_memory(
    kv_cache_config: KVCacheConfig, layers: Mapping[str, Any], but: Collection[str] = ()
) -> Iterator[torch.Tensor]:
    """The memory of a KV cache whose groups of layers share it: a block is of one of them.

    Args:
        kv_cache_config: vLLM's.
        layers: vLLM's layers by name.
        but: Names of layers that lie elsewhere.

    Returns:
        uint8 [blocks, n] each; together they have all bytes of a block, whichever group has it.
    """
    tensors = [t for t in kv_cache_config.kv_cache_tensors if {*but}.isdisjoint(t.layers)]
    first = tensors[0]
    cache = layers[first.layers[0]].kv_cache
    cache = cache if isinstance(cache, torch.Tensor) else cache[0]
    memory = torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage())
    assert memory.numel() == first.size, "all groups lie in one allocation"
    blocks, end = kv_cache_config.num_blocks, 0
    places = {
        (tensor.offset + layer * tensor.layer_stride, tensor.block_stride)
        for tensor in tensors
        for layer in range(len(tensor.layers))
    }
    for begin, stride in sorted(places):
        if begin >= end:  # otherwise it lies beside other layers, in the same blocks
            end = begin + blocks * stride
            yield memory[begin:end].view(blocks, stride)
