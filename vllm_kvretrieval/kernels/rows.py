"""The rows of a decode step, and what rows and prompts attend to."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch


class Mode(IntEnum):
    """How a row comes to what lies between its sink and its window (Mode in csrc/cpu/kernels.h)."""

    SELECT = 0
    """A layer's scores select it, in every step."""
    GIVEN = 1
    """A layer's :attr:`Selection.chosen` holds it already, and stays as it is."""
    WHOLE = 2
    """It is all there is: the row attends to the whole context."""


class Contexts(NamedTuple):
    """The contexts of rows; see :class:`DecodeRows`."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    seats: torch.Tensor


@dataclass
class DecodeRows:
    """The requests of a step that decode one token each, in batch order; the same for all layers.

    ``R`` rows, ``S`` seats (entries of the per-request state). All tensors are contiguous in
    their last dimension. Rows are made by :meth:`selecting`, :meth:`given` and :meth:`whole`.

    Attributes:
        block_table: int32 [R, >= pages]; page ids in context order.
        seq_lens: int32 [R]; tokens in the context, the new one included.
        seats: int32 [R]; each request's entry in the per-request state.
        sink, window: int32 [R]; units of selection always attended to: pages, or tokens. Of pages,
            the window's last one is the tail page, which may be partly filled.
        mode: uint8 [R]; a :class:`Mode`.
        select: int32 [R]; units that rows of mode ``SELECT`` choose by score, per KV head on
            average: where a layer's :attr:`Selection.counts` say how many of them each head
            chooses, these count. 0: none, sink and window only. The context has at least as many
            units as sink, window and selection together. In other modes it is 0.
        threshold: float32 [R]; correction threshold tau.
        fresh: uint8 [R]; 1 where the previous step was no sparse decode step of this request.
        corrected: int64 [S]; incremented for every KV head corrected. Only rows that select need
            their entry.
        lists: int32 [R * kv_heads, width], written: per (row, KV head) what to attend to in context
            order, as :class:`TokenLists` numbers it: pages as ``page_id * kv_heads + kv_head``,
            tokens as that times ``page_size``, plus their place in the page.
        lengths: int32 [R * kv_heads], written: how many tokens these are.
        per_token: Whether units of selection are single tokens; else they are pages.
        handle: The implementation's own view of these tensors, made on first use.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    seats: torch.Tensor
    sink: torch.Tensor
    window: torch.Tensor
    mode: torch.Tensor
    select: torch.Tensor
    threshold: torch.Tensor
    fresh: torch.Tensor
    corrected: torch.Tensor
    lists: torch.Tensor
    lengths: torch.Tensor
    per_token: bool = False
    handle: Any = None

    def __len__(self) -> int:
        return self.seq_lens.shape[0]

    @classmethod
    def selecting(
        cls,
        context: Contexts,
        lists: torch.Tensor,
        *,
        sink: torch.Tensor | int,
        window: torch.Tensor | int,
        select: torch.Tensor | int,
        corrected: torch.Tensor,
        threshold: torch.Tensor | float = 1.0,
        fresh: torch.Tensor | bool = True,
        per_token: bool = False,
        lengths: torch.Tensor | None = None,
    ) -> "DecodeRows":
        """Rows that select by score; see the attributes. A number is that of every row.

        ``lengths`` is made where it is not given.
        """
        return cls._made(
            context, lists, lengths, Mode.SELECT, per_token, corrected,
            sink=sink, window=window, select=select, threshold=threshold, fresh=fresh,
        )  # fmt: skip

    @classmethod
    def given(
        cls,
        context: Contexts,
        lists: torch.Tensor,
        *,
        sink: torch.Tensor | int,
        window: torch.Tensor | int,
        fresh: torch.Tensor | bool,
        per_token: bool = False,
        lengths: torch.Tensor | None = None,
    ) -> "DecodeRows":
        """Rows of which :class:`Selection` says what each KV head attends to, and how much.

        A head whose count reaches from sink to window attends to the whole context, and needs no
        room in the selection.
        """
        nothing = torch.empty(0, dtype=torch.int64)
        return cls._made(
            context, lists, lengths, Mode.GIVEN, per_token, nothing,
            sink=sink, window=window, fresh=fresh,
        )  # fmt: skip

    @classmethod
    def whole(
        cls, context: Contexts, lists: torch.Tensor, *, lengths: torch.Tensor | None = None
    ) -> "DecodeRows":
        """Rows that attend to all pages of their contexts."""
        nothing = torch.empty(0, dtype=torch.int64)
        return cls._made(context, lists, lengths, Mode.WHOLE, False, nothing)

    @classmethod
    def _made(
        cls,
        context: Contexts,
        lists: torch.Tensor,
        lengths: torch.Tensor | None,
        mode: Mode,
        per_token: bool,
        corrected: torch.Tensor,
        **numbers: torch.Tensor | float,
    ) -> "DecodeRows":
        rows = len(context.seq_lens)

        def each(name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            given = numbers.get(name, 0)
            if isinstance(given, torch.Tensor):
                return given
            return torch.full((rows,), given, dtype=dtype)

        return cls(
            *context,
            sink=each("sink"),
            window=each("window"),
            mode=torch.full((rows,), mode, dtype=torch.uint8),
            select=each("select"),
            threshold=each("threshold", torch.float32),
            fresh=each("fresh", torch.uint8),
            corrected=corrected,
            lists=lists,
            lengths=torch.empty(len(lists), dtype=torch.int32) if lengths is None else lengths,
            per_token=per_token,
        )


@dataclass
class TokenLists:
    """What rows of one token each attend to.

    A *unit* is the part of a page that belongs to a KV head. Its tokens are numbered ``unit *
    page_size + offset``.

    Attributes:
        entries: int32 [>= R * kv_heads, W]; per (row, KV head) the numbers of tokens, or of
            stretches of ``run`` of them: with ``run = page_size`` units. Not ``per_head``:
            [>= R, W], pages.
        lengths: int32 [R * kv_heads]; tokens to attend to, one at least. The last stretch may have
            fewer than ``run``.
        run: Tokens per entry, a power of two.
        kv_heads: KV heads of the layer.
        per_head: Whether every KV head has a list of its own. Otherwise the KV heads of a row share
            a list of pages, and ``run`` is ``page_size``.
    """

    entries: torch.Tensor
    lengths: torch.Tensor
    run: int
    kv_heads: int
    per_head: bool = True


@dataclass
class PromptLists:
    """What the queries of prompts attend to.

    A query sees the first tokens of its sequence's list, and the next query one token more.

    Attributes:
        entries: int32; the pages of each list, in order: [>= S, W] where all KV heads of a sequence
            share a list, which is a block table; or, ``per_head``, *units* (``page * kv_heads +
            head``), [>= S * kv_heads, W].
        starts: int32 [S + 1]; the first query of each sequence, and the end of the last.
        seen: int32 [S]; tokens of the list that the sequence's first query sees, one at least.
        kv_heads: KV heads of the layer.
        per_head: Whether every KV head has a list of its own.
    """

    entries: torch.Tensor
    starts: torch.Tensor
    seen: torch.Tensor
    kv_heads: int
    per_head: bool = False
