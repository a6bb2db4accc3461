"""Memory for vLLM's KV cache where some of its layers live in a slow home."""

import io
import itertools
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.utils import bind_kv_cache, map_kv_caches_to_kernel_blocks

from vllm_kvretrieval.engine.views import layer_views
from vllm_kvretrieval.kernels.cpu import MappingGuard
from vllm_kvretrieval.tiers.encoded import EncodedHome
from vllm_kvretrieval.tiers.home import DiskHome


def allocate_kv_cache(
    runner: Any,
    kv_cache_config: KVCacheConfig,
    kernel_block_sizes: list[int],
    in_home: list[str],
    directory: str,
    encoded_bytes: int | None = None,
    stored: io.FileIO | None = None,
) -> tuple[dict[str, torch.Tensor], DiskHome | EncodedHome]:
    """Allocate the KV cache and bind it to the layers, as the model runner does with one medium.

    To vLLM a block is a block: it allots, shares, hashes and frees them by number, and writes to
    them through the tensors made here.

    Args:
        runner: vLLM's V1 model runner.
        kv_cache_config: A single group of layers that are all alike.
        kernel_block_sizes: Tokens per page, per group.
        in_home: Names of the layers in the slow home, in the order of the model.
        directory: Where the home's file is to lie.
        encoded_bytes: Bytes of a layer there, where its pages are encoded.
        stored: The home's file, where it is one of a store.

    Returns:
        The layers' caches by name, and the home, whose layers are numbered as in ``in_home``.
    """
    (tensor,) = kv_cache_config.kv_cache_tensors
    dense = [name for name in tensor.layers if name not in in_home]
    memory = torch.zeros(len(dense) * tensor.layer_stride, dtype=torch.int8)
    home: DiskHome | EncodedHome
    if encoded_bytes is None:
        home = DiskHome(directory, len(in_home), tensor.layer_stride, MappingGuard, stored)
    else:
        home = EncodedHome(directory, len(in_home), tensor.layer_stride, encoded_bytes, stored)
    kv_caches = layer_views(
        kv_cache_config,
        runner.cache_config.get_resolved_kv_cache_layout(),
        kernel_block_sizes[0],
        ((dense, memory), (in_home, home.memory)),
    )
    attn_groups = itertools.chain.from_iterable(runner.attn_groups)
    bind_kv_cache(
        kv_caches,
        runner.compilation_config.static_forward_context,
        runner.kv_caches,
        kv_cache_groups=kv_cache_config.kv_cache_groups,
        layer_kv_caches=map_kv_caches_to_kernel_blocks(kv_caches, attn_groups),
    )
    return kv_caches, home
