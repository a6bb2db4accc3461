"""The ops of a cache in two tiers: recall into slots, write-through, attention over slots.

A **unit** is the (page, KV head) slice of one layer's KV cache: ``[page, 2 * head_size]`` elements,
contiguous, where the row of a token holds its key and then its value. This is vLLM's KV cache
layout ``LBHNC``, so vLLM's kernels can read the tensors described here. The **home** holds all
units, ``[pages, kv_heads, page, 2 * head_size]``, in host memory that the GPU has mapped. **Slots**
hold some of them in device memory, ``[slots, page, 2 * head_size]``. The unit of a page and a KV
head has the number ``page_id * kv_heads + kv_head``.

Where methods select single tokens, a slot holds one, and so does a unit: that of page unit ``u``,
at place ``t`` in its page, has the number ``u * page + t``. What is said of pages is then true of
tokens.

The slots of a layer are divided: every (seat, KV head) has ``C`` slots of its own. A slot is known
by the position of its page in the context. A page that requests share takes a slot for each of
them; in return, the slots of a request do not depend on other requests or on page ids.

No op waits for the host: lists and their lengths are on the device, and shapes are fixed, so every
op can be captured in a CUDA graph. At each step the ops of a layer run in this order::

    write (to the home, with its indexes), plan_decode
    resolve, sparse_decode                        the pages that the step attends to
    select_ahead, resolve_ahead, recall_units     pages for the next step, on a side stream

Pages that a step attends to and that no slot holds come over the bus as ``sparse_decode`` reads
them, which brings them into their slots. So they come while it attends to the others. Where a home
cannot be read in place, an op of its own brings them before.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from vllm_kvretrieval.kernels.device import DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.types import Selection


@dataclass(frozen=True)
class DecodeWorkspace:
    """Room for partial results of attention to parts of a list, for ``R`` rows.

    All layers share it. Launches that share a workspace must run one after another.

    Attributes:
        out: float32 [R, splits, group, head_size]; the group is that of all queries of a row.
        lse: float32 [R, splits, group].
        arrivals: int32 [R]; the number of parts that are done. Zero before and after every launch.
    """

    out: torch.Tensor
    lse: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def empty(
        cls, *, rows: int, splits: int, group: int, head_size: int, device: torch.device | str
    ) -> "DecodeWorkspace":
        """A workspace for ``rows`` rows, whose lists are divided into ``splits`` parts."""
        return cls(
            torch.empty(rows, splits, group, head_size, device=device),
            torch.empty(rows, splits, group, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    @property
    def splits(self) -> int:
        return self.lse.shape[1]


class Traffic(IntEnum):
    """The counts per seat, in units: looked up, missed, recalled ahead, and held now."""

    LOOKED_UP = 0
    MISSED = 1
    AHEAD = 2
    HELD = 3


@dataclass
class Residency:
    """The contents of the slots of a layer, for ``S`` seats, ``H`` KV heads and ``C`` slots each.

    Slot ``c`` of a KV head of a seat is ``(seat * H + kv_head) * C + c``.

    Attributes:
        held: int32 [S, H, C]; the position in the context of the page in a slot; negative: the slot
            is empty.
        stamp: int32 [S, H, C]; the last step that used a slot.
        step: int32 [1]; the number of the step, shared by all layers. It is advanced by one on the
            device before the first layer.
        traffic: int64 [S, len(Traffic)]; shared by all layers.
    """

    held: torch.Tensor
    stamp: torch.Tensor
    step: torch.Tensor
    traffic: torch.Tensor

    @classmethod
    def empty(
        cls, *, kv_heads: int, slots: int, step: torch.Tensor, traffic: torch.Tensor
    ) -> "Residency":
        """The contents of ``slots`` empty slots per KV head, on the device of ``step``."""
        shape = len(traffic), kv_heads, slots
        return cls(
            torch.full(shape, -1, dtype=torch.int32, device=step.device),
            torch.zeros(shape, dtype=torch.int32, device=step.device),
            step,
            traffic,
        )


@dataclass
class Recalls:
    """Units to be recalled, in no particular order.

    Attributes:
        sources: int32 [N]; units of the home.
        targets: int32 [N]; slots.
        count: int32 [1]; the number of units.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    count: torch.Tensor

    @classmethod
    def empty(cls, units: int, device: torch.device | str) -> "Recalls":
        """Room for ``units`` units; none is to be recalled yet."""
        sources, targets = torch.zeros(2, units, dtype=torch.int32, device=device)
        return cls(sources, targets, torch.zeros(1, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class Origins:
    """Where attention has to read the pages of its lists that no slot holds yet.

    Attributes:
        home: [pages, kv_heads, page, 2 * head_size]; its pages have as many tokens as slots have,
            or a multiple.
        units: int32 [>= N, W]; by the places of pages in lists, as far as these reach: the unit of
            the home, or a negative number where the slot holds it.
        beyond: Whether lists may be longer than there are slots.
    """

    home: torch.Tensor
    units: torch.Tensor
    beyond: bool = False


class SlotOps(Protocol):
    """One implementation of the ops."""

    def recall_units(
        self,
        home: torch.Tensor,
        slots: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
        count: torch.Tensor,
        *,
        programs: int = 16,
    ) -> None:
        """Copy units from their home into slots.

        Bytes moved: ``count`` times the size of a unit, read over the bus and written to device
        memory.

        Args:
            home: [pages, kv_heads, page, 2 * head_size].
            slots: [slots, page, 2 * head_size], same dtype; the slots in ``targets`` are written.
            sources: int32 [N]; units of the home.
            targets: int32 [N]; the slot of each unit. No slot occurs twice.
            count: int32 [1]; how many entries of the lists are valid, at most N.
            programs: The largest number of thread blocks, each of which takes a part of one
                multiprocessor. It does not change the result.
        """
        ...

    def resolve(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: DevicePlan,
        rows: DeviceRows,
        residency: Residency,
        missing: Recalls | Origins,
        slots: torch.Tensor,
        slot_lists: torch.Tensor,
    ) -> None:
        """Find a slot for every page that the rows of a step attend to, and write their tokens.

        A page that is in no slot gets one that this call does not use otherwise: an empty slot, or
        the slot that was not used for the longest time; of equal slots the first. Missing pages, in
        the order of the list, go to these slots in their order, and have to be recalled before
        attention, or by it. Of a list that is longer than there are slots, the first ``C`` pages
        get slots, and the others none: attention reads them at home in every step. Slots of a row
        whose ``fresh`` is 1 are empty at first. Rows without a chooser are left alone.

        New keys and values of a row, those of drafts among them, go to the slots that hold the
        pages of its tokens, as far as there were any; recall brings them with other pages. Bytes
        moved: ``2 * kv_heads * head_size`` elements per token, read and written; some 16 per slot
        and entry of a list.

        Args:
            key, value: [tokens, kv_heads, head_size]; tokens may be strided. They are at home
                already.
            plan: A plan with positions, and lists of at most ``C`` pages, or of any length where
                ``Origins.beyond`` says so.
            rows: The rows, as ``prepare_rows`` has written them. No two have the same seat.
            residency: The contents of the layer's slots; written.
            missing: Missing units are appended to recalls, or written to ``Origins.units``.
            slots: [S * kv_heads * C, page, 2 * head_size], written.
            slot_lists: int32 [>= N, W]; written as far as the lists reach; -1: the page has no
                slot.
        """
        ...

    def resolve_ahead(
        self,
        selection: Selection,
        rows: DeviceRows,
        requests: DeviceRequests,
        residency: Residency,
        recalls: Recalls,
        slot_lists: torch.Tensor,
        page_size: int,
    ) -> None:
        """Find slots for the pages that the rows of a step have just selected, after ``resolve``.

        It works as ``resolve``, but takes no slot that this step has used. If there are too few
        others, the first pages of the list get them. Rows without a chooser, and rows whose
        contexts are within their budgets, are left alone.

        Args:
            selection: The selection of the layer, as ``plan_decode`` has written it, without
                ``counts``.
            rows: The rows, as ``prepare_rows`` has written them. No two have the same seat.
            requests: The requests, as ``plan_decode`` has written them.
            residency: The contents of the layer's slots; written.
            recalls: Units to be recalled are appended.
            slot_lists: int32 [>= N, most selected], written; -1: the page has no slot.
            page_size: Tokens per page.
        """
        ...

    def stage_context(
        self,
        home: torch.Tensor,
        buffer: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        *,
        programs: int = 16,
    ) -> None:
        """Copy the pages of contexts from their home into one buffer, in context order.

        Bytes moved: the pages, read over the bus and written to device memory.

        Args:
            home: [pages, kv_heads, page, 2 * head_size].
            buffer: [pages of the buffer, kv_heads, page, 2 * head_size], same dtype, written.
            block_table: int32 [R, >= pages]; page ids in context order; rows may be strided.
            lengths: int32 [R]; tokens of each context. The last page need not be full.
            starts: int32 [R]; the page of the buffer where each context begins.
            programs: See :meth:`recall_units`.
        """
        ...

    def sparse_decode(
        self,
        query: torch.Tensor,
        slots: torch.Tensor,
        slot_lists: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
        workspace: DecodeWorkspace,
        *,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
        starts: torch.Tensor | None = None,
        queries: int = 1,
        scores: torch.Tensor | None = None,
        origins: Origins | None = None,
    ) -> None:
        """Attention of the queries of requests to the slots that each KV head lists.

        Every (request, KV head) pair is a row with a list of its own; ``R = B * kv_heads`` rows.
        The last query of a row attends to the first ``lengths[r]`` tokens of its slots, one slot
        after the other, and the query before it to one token less. Bytes moved: ``2 * head_size``
        elements of slots per token of a list, whatever the number of its queries; with ``origins``
        those of missing pages over the bus instead, and once more as they are written.

        Args:
            query: [tokens, kv_heads * group, head_size]; tokens may be strided.
            slots: [slots, page, 2 * head_size], same dtype; with ``origins`` written.
            slot_lists: int32 [R, width]; entries beyond a row's length are not read. Negative: the
                page has no slot, and is in ``origins``.
            lengths: int32 [R]; tokens, at most ``width * page``. 0: the output is 0, and the
                log-sum-exp is the sink's, or -inf. Negative: both stay as they are.
            scale: Softmax scale.
            out: As ``query``, with its dtype, written; tokens may be strided.
            lse: float32 [R, queries * group], written as far as a request has queries: the natural
                logarithm of the sum of the exponentials of the scaled scores. It serves to merge
                parts of a context.
            workspace: A workspace of at least R rows, of groups of ``queries * group``; written.
            sinks: [kv_heads * group]; for each query head the score of something without a value,
                which takes its share of every softmax. None: there is none.
            softcap: Scaled scores ``s`` become ``softcap * tanh(s / softcap)``; 0: they do not.
            starts: int32 [B + 1]; the first query of each request, and the end of the last one's.
                None: request ``i`` has query ``i`` alone.
            queries: The most queries of a request whose length is not negative.
            scores: float32 [R, group, most], contiguous, written: the scaled scores of the first
                ``most`` tokens of each list, after ``softcap``; with ``lse`` they say what part of
                the attention a token gets. Only rows of one query have them; None: nobody asks.
            origins: Where pages are that slots do not hold yet; their tokens are written to their
                slots, as far as a row's length reaches. No two lists may name such a slot. None:
                slots hold all pages.
        """
        ...
