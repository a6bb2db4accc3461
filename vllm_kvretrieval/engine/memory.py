"""Memory beside vLLM's KV cache, and the seats of requests; the same on every device."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_kvretrieval.attention.refusals import has_foreign_connector, nothing_retrieves
from vllm_kvretrieval.compat import kv_cache_groups
from vllm_kvretrieval.engine.connector import ENGINES
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.tier_sizes import Cache

Retrieving = Callable[[Iterable[str]], list[str]]
"""Selects, by their names, the layers that attend to parts of long contexts."""

BESIDE_HOME = SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec
"""vLLM's specs of the layers that may stay in fast memory beside a slow home."""


def check_retrieving(
    vllm_config: Any, specs: dict[str, Any], config: RetrievalConfig, retrieving: Retrieving
) -> None:
    """Refuse a model that would be served as if there were no retrieval.

    Args:
        vllm_config: vLLM's configuration.
        specs: vLLM's KV cache specs of this worker's layers.
        config: Options of the engine.
        retrieving: Says which layers retrieve.

    Raises:
        RetrievalConfigError: No layer retrieves.
    """
    in_pages = [name for name, spec in specs.items() if type(spec) is FullAttentionSpec]
    if not retrieving(in_pages) and vllm_config.parallel_config.pipeline_parallel_size == 1:
        raise nothing_retrieves(vllm_config.model_config, config)


def bytes_per_block(
    vllm_config: Any,
    specs: dict[str, Any],
    config: RetrievalConfig,
    retrieving: Retrieving,
    alignment: int = 1,
) -> tuple[int, int]:
    """Bytes of one of vLLM's blocks in its KV cache, and in the page indexes beside it.

    Args:
        vllm_config: vLLM's configuration.
        specs: vLLM's KV cache specs of this worker's layers; not empty.
        config: Options of the engine.
        retrieving: Says which layers retrieve.
        alignment: The alignment of the fields of page indexes' records, in bytes.
    """
    blocks, index = [], 0
    for group in kv_cache_groups(vllm_config, specs):
        sizes = _layer_bytes(group)
        blocks.append(sum(sizes.values()))  # groups share their memory
        # Without the hybrid manager, layers of all kinds are in one group.
        plain = [name for name in sizes if type(specs[name]) is FullAttentionSpec]
        index += sum(
            config.index_bytes(sizes[name], specs[name].head_size, specs[name].dtype, alignment)
            for name in retrieving(plain)
        )
    return max(blocks), index


def _layer_bytes(group: Any) -> dict[str, int]:
    """Bytes of a block in each layer of one of vLLM's groups, by name."""
    common = group.kv_cache_spec
    uniform = isinstance(common, UniformTypeKVCacheSpecs)
    return {
        name: (common.kv_cache_specs[name] if uniform else common).page_size_bytes
        for name in group.layer_names
    }


def cache_with_slow_home(
    vllm_config: Any,
    specs: Mapping[str, Any],
    config: RetrievalConfig,
    retrieving: Retrieving,
    alignment: int = 1,
) -> Cache | None:
    """The KV cache that a slow home would hold.

    Those of vLLM's groups of layers lie there that have layers which retrieve. Layers of other
    groups, such as those with sliding windows and recurrent states, stay in fast memory.

    Args:
        vllm_config: vLLM's configuration.
        specs: vLLM's KV cache specs of this worker's layers; not empty.
        config: Options of the engine.
        retrieving: Says which layers retrieve.
        alignment: The alignment of the fields of page indexes' records, in bytes.

    Returns:
        The cache; None if it cannot be divided so, and the home is ``auto``.

    Raises:
        RetrievalConfigError: It cannot be divided so, and the home is not ``auto``.
    """
    groups = kv_cache_groups(vllm_config, specs)
    at_home = retrieving(specs)
    homes = [group for group in groups if not {*at_home}.isdisjoint(group.layer_names)]
    kinds = {type(specs[name]) for group in homes for name in group.layer_names}
    alike = all(group.kv_cache_spec == homes[0].kv_cache_spec for group in homes)
    alike &= len(homes) == 1 or config.encoding is None
    # vLLM makes the groups of a pipeline by the layers of all its stages.
    alike &= len(groups) == 1 or vllm_config.parallel_config.pipeline_parallel_size == 1
    alike &= {type(spec) for spec in specs.values()} <= {FullAttentionSpec, *BESIDE_HOME}
    if kinds != {FullAttentionSpec} or not alike or _varies(homes[0]):
        if config.home == "auto":
            return None
        raise RetrievalConfigError(
            f"kv_retrieval.home={config.home} serves models whose layers with full attention are "
            f"alike, and some of them behind dense_layers={config.dense_layers}, where vLLM keeps "
            f"them in a group of their own; {vllm_config.model_config.model} is none here. Leave "
            "--disable-hybrid-kv-cache-manager, --pipeline-parallel-size and codec out, or use "
            "home=device."
        )
    spec, others = homes[0].kv_cache_spec, [group for group in groups if group not in homes]
    return Cache(
        retrieval_layers=len(at_home),
        dense_layers=sum(len(group.layer_names) for group in homes) - len(at_home),
        kv_heads=spec.num_kv_heads,
        block_size=spec.block_size,
        block_bytes=spec.page_size_bytes,
        head_size=spec.head_size,
        dtype=spec.dtype,
        max_num_seqs=requests_at_once(vllm_config),
        max_model_len=vllm_config.model_config.max_model_len,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        alignment=alignment,
        groups=len(homes),
        other_blocks=sum(_most_blocks(group.kv_cache_spec, vllm_config) for group in others),
        other_bytes=max((sum(_layer_bytes(group).values()) for group in others), default=0),
    )


def _varies(group: Any) -> bool:
    """Whether layers of a group have blocks of different sizes, or such with a rest."""
    spec = group.kv_cache_spec
    return isinstance(spec, UniformTypeKVCacheSpecs) or spec.page_size_padded is not None


def _most_blocks(spec: Any, vllm_config: Any) -> int:
    """Blocks that a request has of a group at most."""
    return -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)


def requests_at_once(vllm_config: Any) -> int:
    """Number of requests that vLLM's scheduler runs at once, unless it is told another one."""
    scheduler = vllm_config.scheduler_config
    return int(scheduler.max_num_active_seqs or scheduler.max_num_seqs)


def check_scheduler_knows(vllm_config: Any, seats: int) -> None:
    """Refuse to serve fewer requests at once than the scheduler would run if it cannot be told.

    Args:
        vllm_config: vLLM's configuration.
        seats: Number of requests that there is room for.

    Raises:
        RetrievalConfigError: Another connector takes the place of ours, which would tell it.
    """
    wanted = requests_at_once(vllm_config)
    if seats < wanted and has_foreign_connector(vllm_config):
        raise RetrievalConfigError(
            f"kv_retrieval.home: memory has slots for {seats} requests at once, and vLLM's "
            f"scheduler, which runs up to {wanted}, cannot be told beside another KV connector. "
            f"Set --max-num-seqs to {seats} at most, or leave --kv-transfer-config out."
        )


def least_of_workers(count: int) -> int:
    """The least of a number over all workers of an engine, each of which has to ask for it.

    Workers warm up and capture graphs together, so they have to do that for as many requests.
    """
    least = torch.tensor(count)
    for group in (get_tp_group(), get_pp_group()):
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group.cpu_group)
    return int(least)


def workers_here(vllm_config: Any) -> int:
    """Number of workers that share this machine's memory and disk, of all engines of a server.

    Engines behind a load balancer of another program do not know of each other.
    """
    parallel, engines = vllm_config.parallel_config, 1
    if (connector := vllm_config.kv_transfer_config) is not None:
        engines = connector.kv_connector_extra_config.get(ENGINES, 1)
    return int(parallel.local_world_size * engines)
