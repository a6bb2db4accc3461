"""The ops of a cache in two tiers: recall into slots, write-through, attention over slots.

A **unit** is the (page, KV head) slice of one layer's KV cache: ``[page, 2 * head_size]`` elements,
contiguous, where the row of a token holds its key and then its value. That is vLLM's KV cache
layout ``LBHNC``, so its own kernels can read the tensors described here. The **home** holds every
unit, ``[pages, kv_heads, page, 2 * head_size]``, in host memory that the GPU has mapped; **slots**
hold some of them in device memory, ``[slots, page, 2 * head_size]``. Unit ``u`` of the home is
``page_id * kv_heads + kv_head``.

The slots of a layer are divided: every (seat, KV head) has ``C`` of its own, and knows what they
hold by positions of pages in the context. Pages that requests share are in slots once per request;
but nothing that happens to another request, or to a page's number, concerns the slots of this one.

Nothing here waits for the host: lists and their lengths live on the device, and shapes are fixed,
so every op can be captured in a CUDA graph. At each step a layer's ops run in this order::

    write (to the home, with its indexes), write_tail, plan_decode
    resolve, recall_units, sparse_decode       what the step attends to
    resolve_ahead, recall_units                what the next step may attend to, on a side stream
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from vllm_kvretrieval.kernels.device import DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.types import Selection


@dataclass(frozen=True)
class DecodeWorkspace:
    """Room for the partial results of attention over parts of a list; shared by all layers.

    Launches that share a workspace must run one after another. ``R`` rows.

    Attributes:
        out: float32 [R, splits, group, head_size].
        lse: float32 [R, splits, group].
        arrivals: int32 [R]; parts that are done. Zero before and after every launch.
    """

    out: torch.Tensor
    lse: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def empty(
        cls, *, rows: int, splits: int, group: int, head_size: int, device: torch.device | str
    ) -> "DecodeWorkspace":
        """Workspace for up to ``rows`` rows whose lists are attended to in ``splits`` parts."""
        return cls(
            torch.empty(rows, splits, group, head_size, device=device),
            torch.empty(rows, splits, group, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    @property
    def splits(self) -> int:
        return self.lse.shape[1]


class Traffic(IntEnum):
    """What is counted per seat, in units: looked up, missed, recalled ahead; and held now."""

    LOOKED_UP = 0
    MISSED = 1
    AHEAD = 2
    HELD = 3


@dataclass
class Residency:
    """What the slots of a layer hold; ``S`` seats, ``H`` KV heads, ``C`` slots of each.

    Slot ``c`` of a KV head of a seat is ``(seat * H + kv_head) * C + c``.

    Attributes:
        held: int32 [S, H, C]; the page in a slot, by its position in the context; negative: none.
        stamp: int32 [S, H, C]; the step that used a slot last.
        step: int32 [1]; the number of the step. Shared by all layers, and advanced by one on the
            device before the first of them.
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
        """Of ``slots`` slots per KV head, none of which holds anything, on ``step``'s device."""
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
        count: int32 [1]; how many there are.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    count: torch.Tensor

    @classmethod
    def empty(cls, units: int, device: torch.device | str) -> "Recalls":
        """Room for ``units`` units, of which none is to be recalled."""
        sources, targets = torch.zeros(2, units, dtype=torch.int32, device=device)
        return cls(sources, targets, torch.zeros(1, dtype=torch.int32, device=device))


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
            slots: [slots, page, 2 * head_size], same dtype; those listed are written.
            sources: int32 [N]; units of the home.
            targets: int32 [N]; the slot that each goes to, no slot twice.
            count: int32 [1]; how many entries of the lists count, at most N.
            programs: Thread blocks to launch at most, each of which takes a part of one
                multiprocessor. Does not change the result.
        """
        ...

    def write_tail(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: DeviceRows,
        residency: Residency,
        slots: torch.Tensor,
    ) -> None:
        """Write new keys and values of decode steps to the slots of their pages.

        Of rows that have a chooser and are not fresh, where a slot holds the page of the new token.
        Bytes moved: ``2 * kv_heads * head_size`` elements per row read and written, and what the
        slots hold, read.

        Args:
            key, value: [>= R, kv_heads, head_size]; tokens may be strided. Row ``i`` holds the only
                token of row ``i``, if it has a chooser.
            rows: As ``prepare_rows`` left them.
            residency: Of the layer.
            slots: [S * kv_heads * C, page, 2 * head_size], written.
        """
        ...

    def resolve(
        self,
        plan: DevicePlan,
        rows: DeviceRows,
        residency: Residency,
        recalls: Recalls,
        slot_lists: torch.Tensor,
        page_size: int,
    ) -> None:
        """Find a slot for every page that the rows of a step attend to.

        Where no slot holds a page, it gets one that this call does not use otherwise: an empty
        one, or the one not used for the longest time; among equals the first. What is missing goes,
        in the order of the list, to these slots in their order, and is to be recalled before
        attention. Slots of a fresh row are empty at first. Rows without a chooser are left alone.

        Args:
            plan: With positions. Lists of at most ``C`` pages.
            rows: As ``prepare_rows`` left them; a seat has one row at most.
            residency: Of the layer; written.
            recalls: What is missing is appended.
            slot_lists: int32 [>= N, W], written as far as lists reach.
            page_size: Tokens per page.
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

        As there, but no slot that this step has used is given away: where there are too few others,
        the first pages of the list get them. Rows without a chooser are left alone, and those whose
        contexts are within their budgets.

        Args:
            selection: Of the layer, as ``plan_decode`` left it; of equal counts.
            rows: As ``prepare_rows`` left them; a seat has one row at most.
            requests: As ``plan_decode`` left them.
            residency: Of the layer; written.
            recalls: What is to be recalled is appended.
            slot_lists: int32 [>= N, most selected], written; -1: the page got none.
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
        """Copy the pages of contexts from their home to one buffer, in context order.

        Bytes moved: the pages, read over the bus and written to device memory.

        Args:
            home: [pages, kv_heads, page, 2 * head_size].
            buffer: [pages there, kv_heads, page, 2 * head_size], same dtype, written.
            block_table: int32 [R, >= pages]; page ids in context order; rows may be strided.
            lengths: int32 [R]; tokens of each context, of which the last page may have a part.
            starts: int32 [R]; the page of the buffer where each context begins.
            programs: As in :meth:`recall_units`.
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
    ) -> None:
        """Attention of one query token per request over the slots that each KV head lists.

        Every (request, KV head) pair is a row with a list of its own, ``R = B * kv_heads`` rows.
        A row attends to the first ``lengths[r]`` tokens of its slots, put one after another. Bytes
        moved: ``2 * head_size`` elements of slots per token attended to.

        Args:
            query: [>= B, kv_heads * group, head_size]; requests may be strided.
            slots: [slots, page, 2 * head_size], same dtype.
            slot_lists: int32 [R, width]; entries beyond a row's length are not read.
            lengths: int32 [R]; tokens, at most ``width * page``. 0: the output is 0 and its
                log-sum-exp is -inf. Negative: both stay as they are.
            scale: Softmax scale.
            out: [>= B, kv_heads * group, head_size], query's dtype, written; requests may be
                strided.
            lse: float32 [R, group], written: natural logarithm of the sum of the exponentials of
                the scaled scores, with which parts of a context can be merged.
            workspace: Written; has at least R rows.
        """
        ...
