"""Single tokens in fast memory, for layers whose KV cache (their home) is slow to read."""

from typing import Protocol

from vllm_kvretrieval.kernels.rows import DecodeRows, TokenLists


class TokenRecall(Protocol):
    """Keeps track of the tokens of each request that are in fast memory, and reads missing tokens.

    A *place* holds the key and value of a token of a KV head. Every seat has ``capacity`` places of
    its own per KV head in every layer: ``memory`` of a layer is ``[S, kv_heads, capacity, 2 *
    head_size]``. After a step, all tokens that it attends to are in places. Tokens of earlier steps
    stay while there is room; the most recently used stay longest.

    An instance serves either one layer whose KV heads select for themselves, with a list of places
    per head, or all layers that attend to the same tokens, with one list for all heads. In the
    second case all layers are recalled at once, and waited for layer by layer. Two instances may
    share the memory of a layer if a request changes between them only when it is ``fresh``.
    """

    bytes_per_read: int
    """Bytes of a place."""

    @property
    def used(self) -> int:
        """The number of places of all layers and heads that hold a token."""
        ...

    def recall(self, rows: DecodeRows, found: TokenLists) -> None:
        """Begin a step: find out which of the attended tokens are in places, and read the others.

        With several layers, they are read in the order of layers while the step goes on. All tokens
        of a ``fresh`` request count as missing. Bytes moved by the end of the step: a key and value
        per KV head and layer, for each miss and for the last token of the context.

        Args:
            rows: ``lists`` and ``lengths``, as ``plan_decode`` or ``list_context`` has written
                them, name tokens, or pages unless ``per_token``, in the order of the context. If
                all heads have one list, the list of the first head is read.
            found: ``lengths`` and ``entries`` are written, for all heads: the places of these
                tokens, ``(seat * kv_heads + kv_head) * capacity + place``.

        Raises:
            ValueError: A row does not fit, as in ``plan_decode``; or attends to its whole context,
                to more tokens than there are places, or than ``found`` has room for, or to tokens
                that are not in its context; or two rows have the same seat. Nothing has changed
                then.
        """
        ...

    def wait(self, layer: int) -> None:
        """Wait until all attended tokens of a layer are in places.

        Args:
            layer: The place of the layer among those of this instance. The last token of each
                context has to be in its home by now.
        """
        ...

    def release(self, seat: int) -> None:
        """Forget the tokens of the request with this seat."""
        ...

    def check(self) -> str:
        """Check that lists are in order, that each place is taken once and free places come last,
        and that places equal their home.

        Returns:
            The first error in words; empty if there is none.
        """
        ...
