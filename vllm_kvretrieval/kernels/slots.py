"""The ops of a cache in two tiers: recall into slots, write-through, attention over slots.

A **unit** is the (page, KV head) slice of one layer's KV cache: ``[page, 2 * head_size]`` elements,
contiguous, where the row of a token holds its key and then its value. That is vLLM's KV cache
layout ``LBHNC``, so its own kernels can read the tensors described here. The **home** holds every
unit, ``[pages, kv_heads, page, 2 * head_size]``, in host memory that the GPU has mapped; **slots**
hold some of them in device memory, ``[slots, page, 2 * head_size]``. Unit ``u`` of the home is
``page_id * kv_heads + kv_head``.

Nothing here waits for the host: lists and their lengths live on the device, and shapes are fixed,
so every op can be captured in a CUDA graph.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


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

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        home: torch.Tensor,
        slots: torch.Tensor,
        tail_slots: torch.Tensor | None = None,
    ) -> None:
        """Write new keys and values through to their home, and to their page's slot if it has one.

        Bytes moved: ``2 * kv_heads * head_size`` elements per token read and written over the bus,
        and written once more to device memory where there is a slot.

        Args:
            key, value: [>= T, kv_heads, head_size]; tokens may be strided.
            slot_mapping: int64 [T]; ``page_id * page + offset``, negative for padding.
            home: [pages, kv_heads, page, 2 * head_size], written.
            slots: [slots, page, 2 * head_size], written.
            tail_slots: int32 [T, kv_heads]; the slot of the token's page, negative where it has
                none. None: no token's page has one.
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
                log-sum-exp is -inf.
            scale: Softmax scale.
            out: [>= B, kv_heads * group, head_size], query's dtype, written; requests may be
                strided.
            lse: float32 [R, group], written: natural logarithm of the sum of the exponentials of
                the scaled scores, with which parts of a context can be merged.
            workspace: Written; has at least R rows.
        """
        ...
