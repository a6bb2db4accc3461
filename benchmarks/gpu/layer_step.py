"""A retrieval layer's decode step outside an engine: its tensors, its ops, the bytes they move.

Takes the device, so that tests run all of it at small sizes in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.layer_parts import DTYPE, Layer, Op, Pool, Shape
from tests.spec import device as device_reference
from tests.spec import slots as slots_reference
from vllm_kvretrieval.attention.cuda.side import SideWork
from vllm_kvretrieval.attention.cuda.workspace import count_programs
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import (
    Column,
    DevicePlan,
    DeviceRequests,
    DeviceRows,
)
from vllm_kvretrieval.kernels.slots import DecodeWorkspace, Origins, Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.types import Chooser, Selection
from vllm_kvretrieval.retrieval.families.scored import CORRECTION_THRESHOLD

MISSED, AHEAD = 0.04, 0.15
"""Shares of the units attended to that a step is taken to miss, and to recall ahead."""
BUDGETS, AHEAD_PROGRAMS = 2, 16
"""Budgets of slots, and programs of recall, as in the engine, whose modules need vLLM."""


class LayerStep:
    """The step of several layers of one shape, whose contexts together are beyond the L2 cache.

    Contexts are pages of the pool in an order of their own; requests may share pages, but for the
    one that they write to. Queries stay the same, so every KV head goes on with its selection.

    Args:
        pool: Where keys and values are.
        shape: Of the layers.
        batch, context: Requests, and tokens of each.
        layers: How many.
        units: Multiprocessors.
        side: Where pages are recalled ahead; the pool is host memory then. None: on the device.
    """

    def __init__(
        self,
        pool: Pool,
        shape: Shape,
        *,
        batch: int,
        context: int,
        layers: int,
        units: int,
        side: SideWork | None,
    ) -> None:
        self.pool, self.shape, self.side = pool, shape, side
        self.batch, self.context = batch, context
        self.device = pool.store.records.device
        self.config, self.scale = shape.config, shape.head_size**-0.5
        self.page = self.config.page_size
        self.pages = -(-context // self.page)
        self.budget = self.config.page_budget()
        with self.device:
            self.requests = DeviceRequests.empty(batch, self.device)
            self._fill_requests()
            pairs = batch * shape.kv_heads
            splits = kernels.count_splits(pairs, units, shape.budget, shape.head_size)
            self.plan = DevicePlan.empty(
                rows=batch,
                kv_heads=shape.kv_heads,
                group=shape.group,
                entries=self.pages * pool.store.parts,
                width=self.budget.total,
                programs=count_programs(pairs, units),
                device=self.device,
                positions=side is not None,
            )
            self.room = self.plan.another()
            self.partial = DecodeWorkspace.empty(
                rows=pairs,
                splits=splits,
                group=shape.group,
                head_size=shape.head_size,
                device=self.device,
            )
            self.lse = torch.empty(pairs, shape.group)
            self.layers = [self._layer(number, layers) for number in range(layers)]
        self.early = Recalls.empty(pairs * self.budget.total, self.device)
        self.ahead_lists = torch.zeros_like(self.plan.lists)
        # What lists miss, and what attention is told that they do.
        self.found, self.drawn = (
            Origins(pool.cache, torch.full_like(self.plan.lists, -1)) for _ in range(2)
        )
        for layer in self.layers:
            self._settle(layer)

    @property
    def sparse(self) -> bool:
        """Whether the rows attend to a selection."""
        return self.pages > self.budget.total

    @property
    def attended(self) -> int:
        """Units that a layer's rows attend to by lists."""
        if not self.sparse and self.side is None:
            return 0
        return self.batch * self.shape.kv_heads * min(self.pages, self.budget.total)

    def _fill_requests(self) -> None:
        table, threshold = self.requests.table, CORRECTION_THRESHOLD.of(self.config.own)
        table[:, : Column.SELECT + 1] = torch.tensor(self.budget, dtype=torch.int32)
        bits = torch.tensor(threshold, dtype=torch.float32).view(torch.int32)
        table[:, Column.THRESHOLD] = bits

    def _layer(self, number: int, layers: int) -> Layer:
        shape, batch = self.shape, self.batch
        heads = shape.kv_heads * shape.group
        own = layers * batch  # pages that are written to come first
        others = len(self.pool.cache) - own
        table = torch.stack([torch.randperm(others)[: self.pages] + own for _ in range(batch)])
        table[:, -1] = torch.arange(number * batch, (number + 1) * batch)
        last = self.context - 1
        rows = DeviceRows(
            seats=torch.arange(batch, dtype=torch.int32),
            prefilling=torch.zeros(batch, dtype=torch.int32),
            query_start=torch.arange(batch + 1, dtype=torch.int32),
            seq_lens=torch.full((batch,), self.context, dtype=torch.int32),
            slot_mapping=table[:, -1] * self.page + last % self.page,
            block_table=table.int(),
            choosers=torch.zeros(batch, dtype=torch.int32),
            fresh=torch.zeros(batch, dtype=torch.int32),
            dense_lens=torch.zeros(batch, dtype=torch.int32),
            certain=torch.full((batch,), self.context, dtype=torch.int32),
        )
        selection = Selection.empty(
            seats=batch,
            kv_heads=shape.kv_heads,
            group=shape.group,
            head_size=shape.head_size,
            most_selected=self.budget.select,
            dtype=DTYPE,
        )
        query = torch.randn(batch, heads, shape.head_size).to(DTYPE)
        key, value = torch.randn(2, batch, shape.kv_heads, shape.head_size).to(DTYPE)
        layer = Layer(
            rows,
            query,
            key,
            value,
            torch.zeros_like(query),
            Chooser(self.pool.store, selection, self.config.own.pooling, self.scale),
            torch.zeros_like(self.plan.lists),
            torch.zeros_like(self.plan.lengths),
        )
        if self.side is not None:
            capacity = BUDGETS * self.budget.total
            step = torch.zeros(1, dtype=torch.int32)
            traffic = torch.zeros(batch, len(Traffic), dtype=torch.int64)
            layer.residency = Residency.empty(
                kv_heads=shape.kv_heads, slots=capacity, step=step, traffic=traffic
            )
            slots = batch * shape.kv_heads * capacity
            layer.slots = torch.zeros(slots, self.page, 2 * shape.head_size, dtype=DTYPE)
        return layer

    def _settle(self, layer: Layer) -> None:
        """Run a first step, so that every request goes on from one, and its slots are filled."""
        rows, far = layer.rows, self.side is not None
        self.requests.table[:, Column.LAST_LEN] = 0
        kernels.prepare_rows(rows, self.requests, self.page, far=far)
        self._write(layer)
        self._plan(layer)
        layer.lists.copy_(self.plan.lists)
        layer.lengths.copy_(self.plan.lengths)
        if layer.residency is not None:
            layer.residency.step.add_(1)
            self._resolve(layer)
        self._attend(layer, self.found)
        rows.fresh.zero_()

    def _write(self, layer: Layer) -> None:
        kernels.write_kv(
            layer.key,
            layer.value,
            layer.rows.slot_mapping,
            self.pool.cache,
            [self.pool.store],
        )

    def _plan(self, layer: Layer) -> None:
        kernels.plan_decode(layer.query, layer.rows, self.requests, [layer.chooser], self.plan)

    def _select_ahead(self, layer: Layer) -> None:
        kernels.select_ahead(layer.rows, self.requests, 0, layer.chooser, self.room)

    def _resolve(self, layer: Layer) -> None:
        assert layer.residency is not None
        assert layer.slots is not None
        of_layer = layer.rows, layer.residency, self.found, layer.slots, layer.lists
        kernels.resolve(layer.key, layer.value, self.plan, *of_layer)

    def _resolve_ahead(self, layer: Layer) -> None:
        assert layer.residency is not None
        kernels.resolve_ahead(
            layer.chooser.selection,
            layer.rows,
            self.requests,
            layer.residency,
            self.early,
            self.ahead_lists,
            self.page,
        )

    def _recall_ahead(self, layer: Layer) -> None:
        assert layer.slots is not None
        kernels.recall_units(
            self.pool.cache,
            layer.slots,
            self.early.sources,
            self.early.targets,
            self.early.count,
            programs=AHEAD_PROGRAMS,
        )

    def _attend(self, layer: Layer, origins: Origins | None = None) -> None:
        slots = layer.slots
        if slots is None:
            slots = self.pool.cache.flatten(0, 1)
        kernels.sparse_decode(
            layer.query,
            slots,
            layer.lists,
            layer.lengths,
            self.scale,
            layer.out,
            self.lse,
            self.partial,
            origins=None if layer.slots is None else origins or self.drawn,
        )

    def check(self) -> dict[str, float]:
        """The difference between the first layer's step and the specification.

        Returns:
            ``attention``: the relative error of its outputs. ``selection``: the share of the first
            request's pages that the specification lists, too; scores may tie after rounding.
        """
        layer = self.layers[0]
        if not self.attended:
            return {}
        units = self._units(layer)
        expected = torch.zeros_like(layer.out)
        slots_reference.sparse_decode(
            layer.query,
            self.pool.cache.flatten(0, 1),
            units,
            layer.lengths,
            self.scale,
            expected,
            torch.zeros_like(self.lse),
            self.partial,
        )
        error = (layer.out - expected).double().norm() / expected.double().norm()
        return {"attention": float(error), "selection": self._agreement(layer, units)}

    def _units(self, layer: Layer) -> torch.Tensor:
        """Units of the pool that a layer's lists stand for."""
        pages = -(-int(layer.lengths.max()) // self.page)
        lists = layer.lists[:, :pages].long()
        if layer.residency is None:
            return lists
        heads = self.shape.kv_heads
        positions = layer.residency.held.flatten()[lists].view(self.batch, heads, pages)
        table = layer.rows.block_table.long()[:, None].expand(-1, heads, -1)
        found = table.gather(2, positions.long()) * heads
        return (found + torch.arange(heads, device=self.device)[:, None]).flatten(0, 1)

    def _agreement(self, layer: Layer, units: torch.Tensor) -> float:
        """Compare with the specification, on the CPU, over the first request's records."""
        own, heads, config = layer.rows.block_table[0].long(), self.shape.kv_heads, self.config
        records = self.pool.store.records.unflatten(0, (-1, self.pool.store.parts))[own]
        shape = {"kv_heads": heads, "head_size": self.shape.head_size, "dtype": DTYPE}
        selection = Selection.empty(
            seats=1, group=self.shape.group, most_selected=self.budget.select, **shape
        )
        store = replace(self.pool.store, records=records.flatten(0, 1).cpu(), cache=None)
        number = torch.zeros(1, dtype=torch.int32)
        rows = DeviceRows(
            seats=number,
            prefilling=number,
            query_start=torch.arange(2, dtype=torch.int32),
            seq_lens=number + self.context,
            slot_mapping=number.long(),
            block_table=torch.arange(self.pages, dtype=torch.int32)[None],
            choosers=number,
            fresh=number + 1,
            dense_lens=number,
            certain=number + self.context,
        )
        requests = DeviceRequests(
            self.requests.table[:1].cpu(), *torch.zeros(2, 1, dtype=torch.int64)
        )
        plan = DevicePlan.empty(
            rows=1,
            kv_heads=heads,
            group=self.shape.group,
            entries=self.pages,
            width=self.budget.total,
            programs=1,
            device="cpu",
        )
        chooser = Chooser(store, selection, config.own.pooling, self.scale)
        device_reference.plan_decode(layer.query[:1].cpu(), rows, requests, [chooser], plan)
        agreeing = 0
        for head in range(heads):
            expected = plan.lists[head, : units.shape[1]] // heads
            listed = set((units[head].cpu() // heads).tolist())
            agreeing += len(listed & set(own[expected.long().to(own.device)].tolist()))
        return agreeing / units[:heads].numel()

    def ops_of_step(self) -> dict[str, Op]:
        """All ops, in their order, and ``step``: those of a layer together.

        After :meth:`check`: what is read over the bus overwrites slots. No op finds anything
        missing, so that is as it is drawn here.
        """
        shape, batch, far = self.shape, self.batch, self.side is not None
        index, group = self.pool.store, self.shape.group
        entries = batch * shape.kv_heads * self.pages * index.parts if self.sparse else 0
        record = index.records.shape[2]
        tokens = 2 * batch * shape.kv_heads * 2 * shape.head_size * DTYPE.itemsize
        attended = self.attended * shape.unit_bytes
        ops = {
            "write_kv": self._op(self._write, tokens),
            "plan_decode": self._op(self._plan, 0),
            "select_ahead": self._op(self._select_ahead, entries * (record + 12 * group)),
        }
        missed = 0
        if far:
            missed, early = (
                self._draw() * shape.unit_bytes,
                int(self.early.count) * shape.unit_bytes,
            )
            slots = batch * shape.kv_heads * BUDGETS * self.budget.total
            books = 16 * (slots + self.attended)
            ops |= {
                "resolve": self._op(self._resolve, books + tokens),
                "resolve_ahead": self._op(self._resolve_ahead, books),
                "recall_ahead": self._op(self._recall_ahead, 0, early),
            }
        ops["sparse_decode"] = self._op(self._attend, attended, missed)
        ops["step"] = self._op(self._step, sum(op.nbytes for op in ops.values()))
        # Last: a request for which it runs twice does not go on from its last step.
        ops["prepare_rows"] = self._op(self._prepare, 0)
        return ops

    def _op(self, call: Callable[[Layer], None], nbytes: float, over_bus: float = 0) -> Op:
        return Op([partial(call, layer) for layer in self.layers], nbytes, over_bus)

    def _draw(self) -> int:
        """Let units be recalled ahead, from anywhere to slots of any, and others be missing.

        Returns:
            How many are missing.
        """
        units, slots = self.pool.cache.shape[0] * self.shape.kv_heads, self.layers[0].slots
        assert slots is not None
        count = min(math.ceil(self.attended * AHEAD), len(self.early.sources))
        self.early.sources[:count] = torch.randperm(units, device=self.device)[:count].int()
        self.early.targets[:count] = torch.randperm(len(slots), device=self.device)[:count].int()
        self.early.count.fill_(count)
        missed, lists = math.ceil(self.attended * MISSED), self.drawn.units
        used = self.attended // len(lists)  # places of a list
        places = torch.randperm(self.attended, device=self.device)[:missed]
        sources = torch.randperm(units, device=self.device)[:missed].int()
        lists[places // used, places % used] = sources
        return missed

    def _prepare(self, layer: Layer) -> None:
        far = self.side is not None
        kernels.prepare_rows(layer.rows, self.requests, self.page, far=far)

    def _step(self, layer: Layer) -> None:
        """A layer's step as in the engine, with what is ahead on the side, if there is one."""
        self._write(layer)
        self._plan(layer)
        looks_ahead = self.config.own.speculates
        if self.side is None:
            if looks_ahead:
                self._select_ahead(layer)
            self._attend(layer)
            return
        self._resolve(layer)

        def ahead() -> None:
            self._select_ahead(layer)
            self._resolve_ahead(layer)
            self._recall_ahead(layer)

        if looks_ahead:
            self.side.submit(ahead)
        self._attend(layer)
        self.side.wait()
