"""One layer in a slow home."""

import numpy as np
import torch

from vllm_kvretrieval.kernels import RecallCache
from vllm_kvretrieval.tiers.home import DiskHome


class SlowLayer:
    """What a layer's attention needs to know about its slow home.

    Decode reads pages through the recall cache. What has to see whole contexts (dense layers,
    prompts, requests that asked for exact attention) reads home in place.

    Args:
        home: Home of all layers that are in it.
        number: The layer's place in it.
        cache: The layer's own; None for a dense layer.
        dense_follows: Whether the next layer in home is a dense one.

    Attributes:
        slots: [slots, 1, 2 * page_size, head_size]; the recall cache's, if there is one.
    """

    def __init__(
        self, home: DiskHome, number: int, cache: RecallCache | None, dense_follows: bool
    ) -> None:
        self.cache = cache
        self.slots = torch.empty(0) if cache is None else cache.slots
        self.number = number
        self._home, self._dense_follows = home, dense_follows

    def stage(self, in_place: tuple[np.ndarray | None, np.ndarray | None]) -> bool:
        """Make pages ready to be read in place, see :meth:`DiskHome.stage`.

        Args:
            in_place: :func:`page_runs` for dense layers and for retrieval layers.

        Returns:
            Whether there are any; then :meth:`unmap` is due.
        """
        dense, sparse = in_place
        runs = dense if self.cache is None else sparse
        if runs is not None:
            self._home.stage(self.number, runs, dense if self._dense_follows else sparse)
        return runs is not None

    def unmap(self) -> None:
        """The layer has been read in place: let go of its mapped memory."""
        self._home.unmap(self.number)
