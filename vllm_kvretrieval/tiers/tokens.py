"""Single tokens of one layer in fast memory, its KV cache being in a slow home."""

from typing import Any

import torch

from vllm_kvretrieval.kernels import DecodeRows, TokenRecall


class TokenSlots:
    """What a layer attends to, in place of its KV cache; see :class:`TokenRecall`.

    Args:
        slots: [S, kv_heads, capacity, 2 * head_size].
        own: By which its KV heads have what they attend to by themselves.
    """

    def __init__(self, slots: torch.Tensor, own: TokenRecall) -> None:
        self.slots = slots
        self._own = own
        self._shared: tuple[TokenRecall, int] | None = None

    def share(self, recall: TokenRecall, number: int) -> None:
        """Say with which layers it attends to the same tokens, where a filter selects them.

        Args:
            recall: Of all these.
            number: The layer's place among them.
        """
        self._shared = recall, number

    def write(self, slot_mapping: torch.Tensor) -> None:
        """Nothing: the tokens of a request in slots stay what they are, and new ones are read."""

    def resolve(self, rows: DecodeRows) -> None:
        """Bring all that the rows attend to into slots; their lists get the places."""
        self._own.recall(rows)
        self._own.wait(0)

    def prefetch(self, rows: DecodeRows, chooser: Any) -> None:
        """Nothing is read ahead of the step that attends to it."""

    def wait(self) -> None:
        """Wait for the layer's part of what its filter has recalled."""
        assert self._shared is not None, "it follows a filter"
        recall, number = self._shared
        recall.wait(number)
