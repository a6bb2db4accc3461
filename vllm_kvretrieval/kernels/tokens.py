"""Single tokens in fast memory for layers whose KV cache, their home, lies in a slow tier."""

from typing import Protocol

from vllm_kvretrieval.kernels.rows import DecodeRows


class TokenRecall(Protocol):
    """Which tokens of each request are in fast memory, and the reading of what misses.

    A *place* holds the key and value of a token and KV head. Every request (by its seat) has
    ``capacity`` of them per KV head, of its own, in every layer alike: ``memory`` of a layer is
    ``[S, kv_heads, capacity, 2 * head_size]``. What a step attends to is there afterwards; what
    earlier steps attended to stays as long as there is room, the most recent first.

    One of these serves a layer whose KV heads select for themselves, with a list of what is where
    for each head; or all layers that attend to the same tokens, with one list for all heads: these
    are then recalled at once, and waited for layer by layer. Both may share the memory of a layer,
    as long as a request keeps to one of them until it is ``fresh``.
    """

    bytes_per_read: int
    """Of a place."""

    @property
    def used(self) -> int:
        """Places that hold a token, of all layers and heads."""
        ...

    def recall(self, rows: DecodeRows) -> None:
        """Begin a step: find out which of the tokens that rows attend to are there already.

        Where there are several layers, the others are read from now on, in the order of layers.
        Those of requests that are ``fresh`` all are. Bytes moved, by the end of the step: a key and
        value per KV head and layer for each miss, and for the last token of the context.

        Args:
            rows: ``lists`` names tokens or pages (``per_token``), as many as ``lengths`` says, as
                ``plan_decode`` or ``list_context`` wrote both, in the order of the context; it gets
                the places of their tokens, one by one: ``(seat * kv_heads + kv_head) * capacity +
                place``. Where one list is for all heads, that of the first counts.

        Raises:
            ValueError: A row does not fit, as in ``plan_decode``; or attends to its whole context,
                to more tokens than there is room for, or to what is not in its context; or two have
                a seat in common. Nothing has happened then.
        """
        ...

    def wait(self, layer: int) -> None:
        """Wait until one of the layers (by its place among them) has all that the rows attend to.

        The last token of each context is in home by then.
        """
        ...

    def release(self, seat: int) -> None:
        """Forget what the request with this seat had."""
        ...

    def check(self) -> str:
        """What is wrong: with the books (in order, each place taken once, free ones at the end), or
        with a place that differs from home. Empty if nothing is.
        """
        ...
