"""Attention where the KV cache is in host memory, and slots on the device hold some of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils import torch_utils
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvretrieval.attention.cuda.homes import Home
from vllm_kvretrieval.attention.cuda.side import SideWork
from vllm_kvretrieval.attention.cuda.staging import Staging
from vllm_kvretrieval.kernels.device import DevicePlan, DeviceRequests, DeviceRows, ScoreRoom
from vllm_kvretrieval.kernels.slots import DecodeWorkspace, Origins, Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.types import IndexRecords
from vllm_kvretrieval.methods import DeviceMethod

MISSED_PROGRAMS = 64
"""The largest number of programs that recall the units that a step waits for, where attention does
not read them in place."""
AHEAD_PROGRAMS = 16
"""The largest number of programs that recall units for the next step while the model runs."""


class FarTier:
    """What the layers with a home in host memory share.

    Args:
        ops: Implementation of :class:`DeviceOps` and :class:`SlotOps`.
        side: Runs what is beside the model.
        staging: The memory into which prompts' contexts are copied.
        layers: How many there will be.
        seats: Most requests that run at once; they are numbered up to it.
        rows: Most rows of a step.
        kv_heads: KV heads of a layer.
        capacity: Slots of a KV head of a seat.
        width: Most pages, or tokens, that a KV head attends to.
        slot_tokens: Tokens of a slot: those of a page, or one.
        looks_ahead: Whether any method selects for the next step, beside the model.
        device: Where the slots are.
        opened: int32 [seats], on the device; ``EncodedUnits.first`` of the layers. None: their
            homes are not encoded.
    """

    def __init__(
        self,
        ops: Any,
        side: SideWork,
        staging: Staging,
        *,
        layers: int,
        seats: int,
        rows: int,
        kv_heads: int,
        capacity: int,
        width: int,
        slot_tokens: int,
        looks_ahead: bool,
        device: torch.device | str,
        opened: torch.Tensor | None = None,
    ) -> None:
        self.ops, self.side, self.staging, self._opened = ops, side, staging, opened
        self.kv_heads, self.capacity, self.layers = kv_heads, capacity, layers
        self._slot_tokens = slot_tokens
        self.far: list[FarLayer] = []
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.traffic = torch.zeros(seats, len(Traffic), dtype=torch.int64, device=device)
        lists, early = rows * kv_heads, width if looks_ahead else 0
        with torch.device(device):
            self.slot_lists = torch.zeros(lists, width, dtype=torch.int32)
            missed = 1 if opened is None else 2
            self._missed = torch.zeros(missed, lists * width, dtype=torch.int32)
            self.ahead = torch.zeros(lists, early, dtype=torch.int32)
            self._early = torch.zeros(2, lists * early, dtype=torch.int32)
        self._counts = torch.zeros(layers, 2, dtype=torch.int32, device=device)

    @staticmethod
    def list_bytes(entries: int, *, encoded: bool, looks_ahead: bool) -> int:
        """Bytes of the lists, of so many entries each.

        Args:
            entries: Of the lists of a step, all together.
            encoded, looks_ahead: Whether homes are encoded, and whether methods look ahead.
        """
        return entries * torch.int32.itemsize * (2 + encoded + 3 * looks_ahead)

    @property
    def slots(self) -> int:
        """The number of slots of all layers, seats and KV heads."""
        return self.layers * len(self.traffic) * self.kv_heads * self.capacity

    def add(self, home: Home, slots: torch.Tensor | None = None) -> "FarLayer":
        """Make the next layer of the model, with slots for parts of its cache.

        Args:
            home: The layer's cache, in host memory.
            slots: [slots / layers, slot_tokens, 2 * head_size]; None: they are made.
        """
        if slots is None:
            shape = self.slots // self.layers, self._slot_tokens, home.unit[1]
            slots = torch.empty(shape, dtype=home.dtype, device=self.step.device)
        self.far.append(FarLayer(self, len(self.far), home, slots))
        return self.far[-1]

    def begin_step(
        self,
        common: CommonAttentionMetadata,
        staged: np.ndarray,
        seats: np.ndarray,
        opened: np.ndarray,
        *,
        reads_written: bool,
    ) -> int:
        """Before every step, the replay of a graph included; see :meth:`Staging.begin_step`.

        No row leads where homes are encoded, since the dense half cannot read them.

        Args:
            common, staged, seats, reads_written: See there.
            opened: int32 [>= seats]; see ``EncodedUnits.first``.
        """
        self.step.add_(1)
        self._counts.zero_()
        lead = self.staging.begin_step(common, staged, seats, reads_written=reads_written)
        if self._opened is None:
            return lead
        torch_utils.async_tensor_h2d(opened[: len(self._opened)], out=self._opened)
        return 0

    @property
    def unit_bytes(self) -> int:
        """Bytes that are read over the bus for a slot."""
        home = self.far[0].home
        return home.unit_bytes * self._slot_tokens // home.unit[0]

    def missing(self, layer: int, home: Home) -> Recalls | Origins:
        """The units that a layer misses: where attention has to read them in its home, or what has
        to be recalled before."""
        if home.in_place is not None:
            units = self._missed[0].view_as(self.slot_lists)
            return Origins(home.in_place, units, beyond=units.shape[1] > self.capacity)
        sources, targets = self._missed
        return Recalls(sources, targets, self._counts[layer, :1])

    def early(self, layer: int) -> Recalls:
        """The units that a layer recalls ahead."""
        sources, targets = self._early
        return Recalls(sources, targets, self._counts[layer, 1:])


class FarLayer:
    """One layer.

    Args:
        tier: The tier that the layer belongs to.
        number: The layer's place among the tier's layers, in the order of the model.
        home: The layer's cache.
        slots: [seats * kv_heads * capacity, slot_tokens, 2 * head_size].
    """

    def __init__(self, tier: FarTier, number: int, home: Home, slots: torch.Tensor) -> None:
        self._tier, self.home, self.slots = tier, home, slots
        self._place = tier.staging.add(home)
        self._missing, self._early = tier.missing(number, home), tier.early(number)
        self._residency = Residency.empty(
            kv_heads=tier.kv_heads, slots=tier.capacity, step=tier.step, traffic=tier.traffic
        )

    def begin(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: DeviceRows,
        indexes: Sequence[IndexRecords],
    ) -> None:
        """Take in what the cache needs of the rows of a step, before these attend.

        Args:
            key, value: [tokens, kv_heads, head_size]; of the step.
            rows: The rows.
            indexes: The layer's.
        """
        self.home.begin(key, value, rows, self._residency, indexes)

    def attend_to_selection(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: DeviceRows,
        requests: DeviceRequests,
        methods: Sequence[DeviceMethod],
        plan: DevicePlan,
        room: ScoreRoom,
        partial: DecodeWorkspace,
        lse: torch.Tensor,
        scale: float,
        output: torch.Tensor,
        **rules: Any,
    ) -> None:
        """Attention of the rows that attend to a selection, whole contexts of few pages included.

        Args:
            query, output: [tokens, heads, head_size]; ``output`` is written.
            key, value: [tokens, kv_heads, head_size]; of this step, at home already.
            rows: The rows as ``prepare_rows`` left them, with ``far``.
            requests: The layer's requests.
            methods: How rows come to what they attend to.
            plan: With positions; written.
            room: See ``DeviceOps.select_ahead``.
            partial, lse: Written; see ``SlotOps.sparse_decode``.
            scale: Softmax scale.
            rules: Whose the queries are, the model's rules, and where scores go; see
                ``SlotOps.sparse_decode``.
        """
        tier, ops = self._tier, self._tier.ops
        for method in methods:
            method.choose(ops, query, rows, requests, plan)
        lists, lengths = tier.slot_lists[: len(lse)], plan.lengths[: len(lse)]
        of_layer = self._residency, self._missing, self.slots
        ops.resolve(key, value, plan, rows, *of_layer, lists)
        if isinstance(self._missing, Recalls):
            self._recall(self._missing, MISSED_PROGRAMS)
        else:
            rules |= {"origins": self._missing}
        ahead = [method for method in methods if method.looks_ahead]
        if ahead:  # others attend to all that they select
            tier.side.submit(lambda: self._look_ahead(ahead, rows, requests, room))
        ops.sparse_decode(query, self.slots, lists, lengths, scale, output, lse, partial, **rules)

    def _look_ahead(
        self,
        methods: Sequence[DeviceMethod],
        rows: DeviceRows,
        requests: DeviceRequests,
        room: ScoreRoom,
    ) -> None:
        for method in methods:
            method.choose_ahead(self._tier.ops, rows, requests, room)
        self._tier.ops.resolve_ahead(
            methods[0].selection,
            rows,
            requests,
            self._residency,
            self._early,
            self._tier.ahead,
            self.slots.shape[1],
        )
        self._recall(self._early, AHEAD_PROGRAMS)

    def _recall(self, units: Recalls, programs: int) -> None:
        self.home.recall(self.slots, self._residency, units, programs)

    def attend_to_prompts(
        self,
        half: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: DeviceRows,
        output: torch.Tensor,
        *scales: torch.Tensor | None,
    ) -> None:
        """Attention of the rows whose contexts are staged.

        Args:
            half: The dense half.
            layer: vLLM's.
            query, output: [tokens, heads, head_size]; ``output`` is written.
            key, value: [tokens, kv_heads, head_size]; of this step.
            rows: The rows of the step.
            scales: The scales of the output.
        """
        tier = self._tier
        for number, wave in enumerate(tier.staging.waves):
            buffer, of_wave = tier.staging.take(self._place, number), wave.tokens
            own = query[of_wave], key[of_wave], value[of_wave]
            tier.ops.write_kv(*own[1:], wave.slot_mapping, buffer, ())
            half.forward(layer, *own, buffer, wave.metadata, output[of_wave], *scales)
        if tier.staging.waves:  # nobody reads the contexts of this layer any more
            self.home.end(key, value, rows)
