"""One layer in a slow home."""

import numpy as np

from vllm_kvretrieval.kernels import RecallCache
from vllm_kvretrieval.tiers.home import DiskHome


class SlowLayer:
    """What a layer's attention needs to know about its slow home.

    Decode reads pages through the recall cache. What has to see whole contexts (prompts, requests
    that asked for exact attention) reads home in place.

    Args:
        home: Home of all retrieval layers.
        number: The layer's place in it.
        cache: The layer's own.

    Attributes:
        keys, values: [slots, 1, page_size, head_size]; the recall cache's slots.
        offset: First byte of the layer in the home's file.
    """

    def __init__(self, home: DiskHome, number: int, cache: RecallCache) -> None:
        self.cache = cache
        self.keys, self.values = cache.slots.chunk(2, dim=2)
        self.offset = number * home.layer_bytes
        self._home, self._number = home, number

    def stage(self, runs: np.ndarray) -> None:
        """Make pages ready to be read in place, see :meth:`DiskHome.stage`."""
        self._home.stage(self._number, runs)

    def unmap(self) -> None:
        """The layer has been read in place: let go of its mapped memory."""
        self._home.unmap(self._number)
