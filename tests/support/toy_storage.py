"""A storage of KV from outside of the package, and a worker extension that serves through it.

Every retrieval layer has a mirror of its KV cache, whose units lie in the opposite order, and whose
pages are not numbers until they are written. Lists are attended to in the mirror alone.
"""

from dataclasses import replace

import torch

from vllm_kvretrieval.storage.base import Part
from vllm_kvretrieval.storage.memory import Memory, MemoryLayer
from vllm_kvretrieval.storage.registry import STORAGES, Kind


class MirroredLayer(MemoryLayer):
    """A layer with a mirror."""

    def __init__(self, cache):
        super().__init__(cache)
        self.mirror = torch.full_like(self._units, torch.nan)
        self.reached = 0

    def mirrored(self, pages):
        """Units of pages in the mirror."""
        heads = self._cache.shape[1]
        units = (pages[:, None] * heads + torch.arange(heads)).flatten()
        return len(self.mirror) - 1 - units

    def written(self, slot_mapping):
        pages = (slot_mapping[slot_mapping >= 0] // self._cache.shape[2]).unique()
        units = self.mirrored(pages)
        self.mirror[units] = self._units[len(self.mirror) - 1 - units]

    def reach(self, rows, lists):
        self.reached += 1
        per_unit = self._cache.shape[2] // lists.run
        unit, within = lists.entries // per_unit, lists.entries % per_unit
        entries = (len(self.mirror) - 1 - unit) * per_unit + within
        return (Part(replace(lists, entries=entries.int()), self.mirror),)


class Mirrored(Memory):
    """An engine's KV, mirrored."""

    def __init__(self, token_major):
        super().__init__(token_major)
        self.layers = []

    def layer(self, cache):
        self.layers.append(MirroredLayer(cache))
        return self.layers[-1]

    def begin_step(self, scheduler_output):
        for source, target in scheduler_output.kv_cache_block_copies or ():
            for layer in self.layers:
                units = [layer.mirrored(torch.tensor([block])) for block in (target, source)]
                layer.mirror[units[0]] = layer.mirror[units[1]]


STORAGES["device"] = Kind(lambda config, _: Mirrored(config.token_major))


class ToyWorker:
    """Mixed into the worker by vLLM (``worker_extension_cls``)."""

    storage: Mirrored

    def reached(self):
        """How often each retrieval layer has reached for what rows attend to."""
        return [layer.reached for layer in self.storage.layers]
