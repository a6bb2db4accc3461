"""The KV heads of a worker's layers that retrieve, and what requests get of each."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tp_group

from vllm_kvretrieval.engine.layers import number_layers
from vllm_kvretrieval.methods.kept_prompts import LocalHeads
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.capacity import Capacity
from vllm_kvretrieval.retrieval.shares import own_heads


class RetrievalHeads:
    """The heads, layer after layer.

    Args:
        vllm_config: vLLM's configuration.
        config: Options of the engine.
        specs: vLLM's KV cache specs of the worker's layers.
        names: Those that retrieve.
        rank: The worker's number.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: RetrievalConfig,
        specs: Mapping[str, Any],
        names: list[str],
        rank: int,
    ) -> None:
        self._vllm_config, self._config, self._rank = vllm_config, config, rank
        full = self._numbers = number_layers(vllm_config, specs, config)
        self._heads = {name: specs[name].num_kv_heads for name in full if name in names}
        self.dense_share = 1 - len(self._heads) / len(full) if full else 0.0
        """The share of dense layers among those with full attention."""

    @functools.cached_property
    def places(self) -> dict[str, slice]:
        """The places of each layer's heads among all."""
        places, first = dict[str, slice](), 0
        for name, count in self._heads.items():
            places[name] = slice(first, first + count)
            first += count
        return places

    @functools.cached_property
    def local(self) -> LocalHeads:
        """The same, for methods that keep tokens; sums over workers are made on their devices."""
        workers = get_tp_group()

        def add_up(numbers: torch.Tensor) -> None:
            torch.distributed.all_reduce(numbers, group=workers.device_group)

        slices = [*self.places.values()]
        return LocalHeads(slices, add_up if workers.world_size > 1 else None)

    @functools.cached_property
    def room(self) -> Capacity:
        """How many units requests get of the heads."""
        of_layers, part = self._all
        longest = self._vllm_config.model_config.max_model_len
        return Capacity(self._config, of_layers, longest, part)

    @functools.cached_property
    def fixed(self) -> dict[str, np.ndarray]:
        """How many pages the heads attend to by methods that fix it, int32 [heads], by name."""
        model = self._vllm_config.model_config
        layers = [self._numbers[name] for name in self._heads]
        every = {
            name: method.fixed_counts(model, layers)
            for name, method in self._config.methods.items()
        }
        own = own_heads(*self._all)
        return {name: counts[own] for name, counts in every.items() if counts is not None}

    @property
    def _all(self) -> tuple[list[int], tuple[int, int]]:
        """KV heads of each layer, and which part of how many this worker has of them."""
        size = self._vllm_config.parallel_config.tensor_parallel_size
        copies = max(1, size // self._vllm_config.model_config.get_total_num_kv_heads())
        part = self._rank % size // copies, size // copies
        return [count * part[1] for count in self._heads.values()], part
