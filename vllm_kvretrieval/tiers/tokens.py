"""Single tokens of one layer in fast memory, while its KV cache is in a slow home."""

from typing import Any

import torch

from vllm_kvretrieval.kernels import DecodeRows, TokenRecall


class TokenSlots:
    """The tokens that a layer attends to, in place of its KV cache; see :class:`TokenRecall`.

    Args:
        slots: [S, kv_heads, capacity, 2 * head_size].
        own: The recall of this layer alone, whose KV heads each have their own tokens.
    """

    def __init__(self, slots: torch.Tensor, own: TokenRecall) -> None:
        self.slots = slots
        self._own = own
        self._shared: tuple[TokenRecall, int] | None = None

    def share(self, recall: TokenRecall, number: int) -> None:
        """Join the layers that attend to the same tokens, which a filter selects.

        Args:
            recall: The recall of all these layers.
            number: The layer's place among them.
        """
        self._shared = recall, number

    def write(self, slot_mapping: torch.Tensor) -> None:
        """Do nothing: tokens in slots do not change, and new tokens are read from home."""

    def resolve(self, rows: DecodeRows) -> None:
        """Bring all attended tokens of the rows into slots; their lists get the places."""
        self._own.recall(rows)
        self._own.wait(0)

    def prefetch(self, rows: DecodeRows, chooser: Any) -> None:
        """Do nothing: single tokens are not read ahead of the step that attends to them."""

    def wait(self) -> None:
        """Wait for the layer's part of the tokens that its filter recalls."""
        assert self._shared is not None, "it follows a filter"
        recall, number = self._shared
        recall.wait(number)
