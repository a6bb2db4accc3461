"""The rows of a decode step, and the lists of tokens that rows and prompts attend to."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from vllm_kvretrieval.retrieval.seats import SEAT_FIELDS


class Mode(IntEnum):
    """How the units between sink and window of a row are found (Mode in csrc/cpu/kernels.h)."""

    SELECT = 0
    """Every layer selects them by scores, in every step."""
    GIVEN = 1
    """They are in :attr:`Selection.chosen` of a layer, which stays as it is."""
    WHOLE = 2
    """The row attends to the whole context."""


class Contexts(NamedTuple):
    """The contexts of rows; see :class:`DecodeRows`."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    seats: torch.Tensor
    starts: torch.Tensor | None = None


@dataclass
class DecodeRows:
    """The requests of a step that decode, in batch order; the same for all layers.

    A request may have draft tokens behind its new one, which the step verifies. It selects once, by
    the query of its new token, as if there were no drafts; its window also has these.
    There are ``R`` rows, and ``S`` seats, the entries of the per-request state. All tensors are
    contiguous in their last dimension. Make rows by :meth:`selecting`, :meth:`given` and
    :meth:`whole`.

    Attributes:
        block_table: int32 [R, >= pages]; page ids in context order.
        seq_lens: int32 [R]; tokens in the context, including the new one and its drafts.
        starts: int32 [R + 1]; the first of each row's queries, those of its new token and its
            drafts, and the end of the last one; None: there are no drafts.
        seats: int32 [R]; the entry of each request in the per-request state.
        sink, window: int32 [R]; units (pages, or tokens) that are always attended to. With pages,
            the last page of the window is the tail page, which need not be full.
        mode: uint8 [R]; a :class:`Mode`.
        select: int32 [R]; units that rows of mode ``SELECT`` choose by score, per KV head on
            average. If a layer has :attr:`Selection.counts`, these say how many each head chooses.
            0: sink and window only. The context has at least as many units as sink, window and
            selection together. In other modes it is 0.
        fresh: uint8 [R]; 1 if the previous step was not a sparse decode step of this request.
        numbers: float32 [R] each; the :data:`SEAT_FIELDS` by column, which say what they do.
        corrected: int64 [S]; incremented for every corrected KV head. Only rows that select need
            an entry.
        spared: int64 [S]; increased by the selected units that KV heads did not need. Only rows
            with an ``uneven`` number need an entry.
        lists: int32 [R * kv_heads, width], written: the units that each (row, KV head) attends to,
            in context order, with the numbers of :class:`TokenLists`: for a page ``page_id *
            kv_heads + kv_head``, for a token this times ``page_size``, plus its place in the page.
        lengths: int32 [R * kv_heads], written: the number of tokens of each list.
        per_token: Whether units are single tokens. Otherwise they are pages.
        handle: The view of an implementation of these tensors, made on first use.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    seats: torch.Tensor
    starts: torch.Tensor | None
    sink: torch.Tensor
    window: torch.Tensor
    mode: torch.Tensor
    select: torch.Tensor
    fresh: torch.Tensor
    numbers: Mapping[str, torch.Tensor]
    corrected: torch.Tensor
    spared: torch.Tensor
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
        fresh: torch.Tensor | bool = True,
        numbers: Mapping[str, torch.Tensor | float] = MappingProxyType({}),
        spared: torch.Tensor | None = None,
        per_token: bool = False,
        lengths: torch.Tensor | None = None,
    ) -> "DecodeRows":
        """Rows that select by score; see the attributes. A plain number holds for every row.

        ``lengths`` is made if it is not given; numbers that are not given are plain.
        """
        made = cls._made(
            context, lists, lengths, Mode.SELECT, per_token, corrected, numbers,
            sink=sink, window=window, select=select, fresh=fresh,
        )  # fmt: skip
        return made if spared is None else replace(made, spared=spared)

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
        """Rows whose units, and their counts per KV head, are given by a :class:`Selection`.

        A head whose count is as large as what lies between sink and window attends to the whole
        context, and needs no room in the selection.
        """
        nothing = torch.empty(0, dtype=torch.int64)
        return cls._made(
            context, lists, lengths, Mode.GIVEN, per_token, nothing, {},
            sink=sink, window=window, fresh=fresh,
        )  # fmt: skip

    @classmethod
    def whole(
        cls, context: Contexts, lists: torch.Tensor, *, lengths: torch.Tensor | None = None
    ) -> "DecodeRows":
        """Rows that attend to all pages of their contexts."""
        nothing = torch.empty(0, dtype=torch.int64)
        return cls._made(context, lists, lengths, Mode.WHOLE, False, nothing, {})

    @classmethod
    def _made(
        cls,
        context: Contexts,
        lists: torch.Tensor,
        lengths: torch.Tensor | None,
        mode: Mode,
        per_token: bool,
        corrected: torch.Tensor,
        numbers: Mapping[str, torch.Tensor | float],
        *,
        sink: torch.Tensor | int = 0,
        window: torch.Tensor | int = 0,
        select: torch.Tensor | int = 0,
        fresh: torch.Tensor | bool = False,
    ) -> "DecodeRows":
        rows = len(context.seq_lens)

        def each(given: torch.Tensor | float, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            if isinstance(given, torch.Tensor):
                return given
            return torch.full((rows,), given, dtype=dtype)

        return cls(
            *context,
            sink=each(sink),
            window=each(window),
            mode=torch.full((rows,), mode, dtype=torch.uint8),
            select=each(select),
            fresh=each(fresh, torch.uint8),
            numbers={
                known.column: each(numbers.get(known.column, known.plain), torch.float32)
                for known in SEAT_FIELDS
            },
            corrected=corrected,
            spared=torch.empty(0, dtype=torch.int64),
            lists=lists,
            lengths=torch.empty(len(lists), dtype=torch.int32) if lengths is None else lengths,
            per_token=per_token,
        )


class Remainder(NamedTuple):
    """What rows do not attend to token by token: a further part of their softmax.

    Attributes:
        values: float32 [Q, kv_heads * group, head_size]; the mean of the values, by attention. A
            row of single queries has one.
        lse: float32 [Q, kv_heads * group]; the logarithm of the sum of exponentials of the logits;
            minus infinity: there is nothing.
    """

    values: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def empty(cls, query: torch.Tensor) -> "Remainder":
        """Room for the remainder of the rows of a query, [R, kv_heads * group, head_size]."""
        return cls(
            torch.empty(query.shape, dtype=torch.float32),
            torch.empty(query.shape[:2], dtype=torch.float32),
        )

    def shared(self, starts: torch.Tensor) -> "Remainder":
        """The remainder of each row for all of its queries; see :attr:`DecodeRows.starts`."""
        count = starts.diff()
        return Remainder(*(part.repeat_interleave(count, 0) for part in self))


@dataclass
class TokenLists:
    """The tokens that rows attend to which decode.

    A *unit* is the part of a page that belongs to a KV head. Its tokens have the numbers ``unit *
    page_size + offset``.

    Attributes:
        entries: int32 [>= R * kv_heads, W]; for each (row, KV head) the numbers of tokens, or of
            stretches of ``run`` tokens (of units, if ``run`` is ``page_size``). Without
            ``per_head``: [>= R, W], page ids.
        lengths: int32 [R * kv_heads]; tokens to attend to. The last stretch may have fewer tokens
            than ``run``.
        run: Tokens per entry, a power of two.
        kv_heads: KV heads of the layer.
        per_head: Whether every KV head has a list of its own. Otherwise the KV heads of a row share
            a list of pages, and ``run`` is ``page_size``.
        starts: See :class:`DecodeRows`. The last query of a row sees all tokens of its lists, and
            the query before one token less.
    """

    entries: torch.Tensor
    lengths: torch.Tensor
    run: int
    kv_heads: int
    per_head: bool = True
    starts: torch.Tensor | None = None

    @classmethod
    def empty(cls, rows: DecodeRows, run: int, kv_heads: int) -> "TokenLists":
        """Room for lists as long as those of rows."""
        count, width = len(rows) * kv_heads, rows.lists.shape[1]
        entries = torch.empty(count, width, dtype=torch.int32)
        lengths = torch.empty(count, dtype=torch.int32)
        return cls(entries, lengths, run, kv_heads, starts=rows.starts)


@dataclass
class PromptLists:
    """The tokens that the queries of prompts attend to.

    A query sees the first tokens of the list of its sequence; the next query sees one token more.

    Attributes:
        entries: int32; the pages of each list, in order. All KV heads of a sequence share a list,
            [>= S, W], a block table; with ``per_head`` lists hold *units* (``page * kv_heads +
            head``), [>= S * kv_heads, W].
        starts: int32 [S + 1]; the first query of each sequence, and the end of the last one.
        seen: int32 [S], with ``per_head`` [S * kv_heads]; tokens of each list that the first query
            of its sequence sees, at least one.
        kv_heads: KV heads of the layer.
        per_head: Whether every KV head has a list of its own.
    """

    entries: torch.Tensor
    starts: torch.Tensor
    seen: torch.Tensor
    kv_heads: int
    per_head: bool = False
