"""One layer in a slow home."""

import numpy as np
import torch

from vllm_kvretrieval.kernels import RecallCache
from vllm_kvretrieval.tiers.encoded import EncodedHome
from vllm_kvretrieval.tiers.home import DiskHome
from vllm_kvretrieval.tiers.tokens import TokenSlots


class SlowLayer:
    """A layer's access to its slow home.

    Decode reads pages, or single tokens, from the slots of a recall cache. Attention over whole
    contexts (dense layers, prompts, requests that asked for exact attention) reads home in place.

    Args:
        home: The home of all its layers.
        number: The layer's place in it.
        cache: The layer's recall cache, which decode reads; None for a dense layer.
        dense_follows: Whether the next layer in home is a dense one.

    Attributes:
        encoded: Whether home is encoded. Then only slots and the staging buffer are read, and
            ``stage`` starts to read ahead for the latter.
        slots: The slots of the cache, if there is one: of pages, [slots, 1, 2 * page_size,
            head_size]; of tokens, [S, kv_heads, capacity, 2 * head_size].
    """

    def __init__(
        self,
        home: DiskHome | EncodedHome,
        number: int,
        cache: RecallCache | TokenSlots | None,
        dense_follows: bool,
    ) -> None:
        self.cache = cache
        self.slots = torch.empty(0) if cache is None else cache.slots
        self.encoded = isinstance(home, EncodedHome)
        self.number = number
        self._home, self._dense_follows = home, dense_follows

    def stage(self, in_place: tuple[np.ndarray | None, np.ndarray | None]) -> bool:
        """Make pages ready to be read in place, see :meth:`DiskHome.stage`.

        Args:
            in_place: :func:`page_runs` for dense layers and for retrieval layers.

        Returns:
            Whether there are such pages; then :meth:`unmap` has to be called.
        """
        dense, sparse = in_place
        runs = dense if self.cache is None else sparse
        if runs is not None:
            self._home.stage(self.number, runs, dense if self._dense_follows else sparse)
        return runs is not None

    def lay_out(self, pages: torch.Tensor, target: torch.Tensor) -> None:
        """Lay out the context from an encoded home; see :meth:`RecallCache.stage`."""
        self._pages.stage(pages, target)

    def close(self, pages: torch.Tensor) -> None:
        """Encode the pages that are due, after the layer has read an encoded home."""
        if len(pages):
            self._pages.close(pages)

    @property
    def _pages(self) -> RecallCache:
        assert self.cache is not None, "dense layers are not encoded"
        assert not isinstance(self.cache, TokenSlots), "nor are pages of rows"
        return self.cache

    def unmap(self) -> None:
        """Release the layer's mapped memory, after it has been read in place."""
        self._home.unmap(self.number)
