"""How much memory a worker of vLLM's CPU platform has for what."""

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info
from vllm.utils.mem_utils import format_gib
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.engine.memory import (
    bytes_per_block,
    cache_with_slow_home,
    check_retrieving,
)
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.heads import EVERYTHING
from vllm_kvretrieval.retrieval.roles import Follows, Role
from vllm_kvretrieval.retrieval.shares import Allotment, allot, own_heads
from vllm_kvretrieval.tiers.place import check_room, directory_for
from vllm_kvretrieval.tiers.sizes import Tiers


class PlanningWorker(CPUWorker):
    """vLLM's CPU worker; divides its memory among KV cache, page index, staging, recall caches.

    Attributes:
        retrieval_config: Options of the engine.
        tiers: Sizes with a slow home; None without one, or as long as nothing is planned.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = RetrievalConfig.from_vllm(self.vllm_config)
        assert config is not None, "this worker is chosen for retrieval backends only"
        self.retrieval_config = config
        self.tiers: Tiers | None = None

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache, less what the page index and staging take of them.

        Without a slow home, a KV cache size that the user fixed is left as it is, and the others
        come on top. With one, all of them share that size, and these are the bytes of all blocks
        that home holds, wherever their layers are kept and however they are encoded.

        Raises:
            RetrievalConfigError: Nothing would be retrieved, or memory does not suffice.
        """
        available = super().determine_available_memory()
        specs = self.get_kv_cache_spec()
        check_retrieving(self.vllm_config, specs, self.retrieval_config, self.retrieving)
        staging = self._staging_bytes()
        self.tiers = self._plan_tiers(available, staging)
        if self.tiers is not None:
            return self.tiers.blocks * sum(spec.page_size_bytes for spec in specs.values())
        if not specs:
            return available  # a stage of a pipeline without attention
        block, index = bytes_per_block(
            self.vllm_config, specs, self.retrieval_config, self.retrieving
        )
        if self.cache_config.kv_cache_memory_bytes is None:
            return (available - staging) * block // (block + index)
        self._check_memory(available, available * index // block, staging)
        return available

    def _check_memory(self, cache: int, index: int, staging: int) -> None:
        """Find out at once, not under load, that memory does not suffice."""
        node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
        if cache + index + staging > node.available_memory:
            raise RetrievalConfigError(
                f"{self.retrieval_config.method} needs a page index of {format_gib(index)} GiB and "
                f"{format_gib(staging)} GiB for prefill beside a KV cache of {format_gib(cache)} "
                f"GiB, but {format_gib(node.available_memory)} GiB of memory are available. Lower "
                "--kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE) or --max-model-len, or use "
                "kv_retrieval.home=disk."
            )

    def _plan_tiers(self, fast: int, staging: int) -> Tiers | None:
        """Sizes with a slow home, given so many bytes of fast memory; None without one."""
        config = self.retrieval_config
        if config.home == "device":
            return None
        specs = self.get_kv_cache_spec()
        cache = cache_with_slow_home(self.vllm_config, specs, config, self.retrieving)
        if cache is None:
            return None
        if self.allotments:
            cache = replace(cache, attended=self._attended(cache.kv_heads))
        if config.home == "auto" and cache.fits_in(fast - staging, config):
            return None
        blocks = self.cache_config.num_gpu_blocks_override
        tiers = Tiers.plan(config, cache, fast, staging, blocks)
        # All workers come by here before any makes its file.
        workers = self.parallel_config.local_world_size
        check_room(directory_for(config.home_path), tiers.home, workers)
        return tiers

    @functools.cached_property
    def retrieval_heads(self) -> dict[str, slice]:
        """Which of all KV heads of retrieval layers, counted layer after layer, are a layer's."""
        specs = self.get_kv_cache_spec()
        plain = [name for name, spec in specs.items() if type(spec) is FullAttentionSpec]
        names = sorted(self.retrieving(plain), key=extract_layer_index)
        heads, first = dict[str, slice](), 0
        for name in names:
            heads[name] = slice(first, first + specs[name].num_kv_heads)
            first = heads[name].stop
        return heads

    @functools.cached_property
    def allotments(self) -> dict[str, Allotment]:
        """Of methods whose layers or KV heads do not all select as much, by name."""
        config = self.retrieval_config
        uneven = {n: m for n, m in config.methods.items() if not m.budget_shares.uniform}
        if not uneven:
            return {}
        heads, part = self._all_heads
        longest = self.model_config.max_model_len
        return {
            name: allot(
                method.budget_shares,
                heads,
                longest if method.per_token else -(-longest // config.page_size),
                part,
            )
            for name, method in uneven.items()
        }

    @functools.cached_property
    def whole_contexts(self) -> dict[str, torch.Tensor]:
        """Of methods by which some KV heads attend to everything; see ``RequestTable.fixed``."""
        heads, part = self._all_heads
        layers = [extract_layer_index(name) for name in self.retrieval_heads]
        fixed = {}
        for name, method in self.retrieval_config.methods.items():
            if method.heads is not None:
                flags = torch.from_numpy(method.heads.of(self.model_config, layers)).flatten()
                fixed[name] = flags[own_heads(heads, part)].int() * EVERYTHING
        return fixed

    @property
    def _all_heads(self) -> tuple[list[int], tuple[int, int]]:
        """KV heads of each retrieval layer, and which part of how many this worker has of them."""
        size = self.parallel_config.tensor_parallel_size
        copies = max(1, size // self.model_config.get_total_num_kv_heads())  # of each KV head
        part = self.rank % size // copies, size // copies
        own = [heads.stop - heads.start for heads in self.retrieval_heads.values()]
        return [count * part[1] for count in own], part

    def _attended(self, kv_heads: int) -> tuple[int, ...]:
        """Of each retrieval layer, the (page, KV head) units that a request attends to at most."""
        config = self.retrieval_config
        budget = config.budget_limit // config.page_size
        beyond = [
            self.allotments[name].most(most) - most
            for name, most in config.most_selected.items()
            if name in self.allotments
        ]
        most = budget + np.max(beyond, axis=0).clip(min=0)
        longest = -(-self.model_config.max_model_len // config.page_size)
        most = np.minimum(most, max(longest, budget))
        return tuple(most.reshape(-1, kv_heads).sum(1).tolist())

    @functools.cached_property
    def roles(self) -> dict[int, Role]:
        """Of the layers with plain full attention; empty where each selects for itself."""
        specs = self.get_kv_cache_spec()
        full = {extract_layer_index(n) for n, s in specs.items() if type(s) is FullAttentionSpec}
        return self.retrieval_config.roles(self.model_config, full)

    def retrieving(self, names: Iterable[str]) -> list[str]:
        """Those of the layers that attend to parts of long contexts."""
        if self.roles:
            return [n for n in names if isinstance(self.roles.get(extract_layer_index(n)), Follows)]
        return [n for n in names if extract_layer_index(n) >= self.retrieval_config.dense_layers]

    @property
    def stages(self) -> bool:
        """Whether something has to be laid out for prompts, see PrefillStaging.

        Our own kernels read every layout, but nothing that is encoded, nor tokens that a filter has
        selected for a chunk.
        """
        config = self.retrieval_config
        copied = config.encoding is not None or config.prefill_budget is not None
        return copied or not config.attends_itself

    def _staging_bytes(self) -> int:
        """One layer's keys and values of the longest context; see PrefillStaging."""
        if not self.stages:
            return 0
        model = self.model_config
        width = 2 * model.get_head_size() * model.dtype.itemsize
        return model.max_model_len * model.get_num_kv_heads(self.parallel_config) * width
