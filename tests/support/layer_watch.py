"""Layers of an engine on a device beside their specification in plain torch; runs in the worker.

A step may be the replay of a graph, so nothing is seen of it but what it leaves on the device. The
last layer that retrieves leaves its lists there, which all layers share. They are copied in the
order of the stream, and nobody waits. The specification works from keys in the cache alone, on the
CPU, and can also answer in place of the kernels, in eager steps.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from tests.spec import device as reference
from tests.support.device_checks import moved_rows
from vllm_kvretrieval.kernels.device import Column, DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.reference.index import build, keys_of
from vllm_kvretrieval.kernels.reference.plan import entry_count
from vllm_kvretrieval.kernels.types import Chooser, IndexRecords, Selection

ROUNDING = 0.02
"""The tolerance of a log-sum-exp of scores in half precision."""

_in_place: Any = None
"""The watch of this process, or what lets the specification answer."""


class Context:
    """A row's context, on the CPU.

    Args:
        impl: The layer's implementation of attention.
        rows: Of the step.
        row: The number of the row.
        options: int32 [COLUMNS]; of the request.
    """

    def __init__(self, impl: Any, rows: DeviceRows, row: int, options: torch.Tensor) -> None:
        self.length, self.seat = int(rows.seq_lens[row]), int(rows.seats[row])
        self.impl, self.options, self.fresh = impl, options.cpu(), rows.fresh[row].cpu()
        self.page_size = impl.units.shape[1]
        pages = rows.block_table[row, : -(-self.length // self.page_size)].long()
        self.cache = impl.units.unflatten(0, (-1, impl.num_kv_heads))[pages].cpu()
        self.pages = pages.cpu()
        self.chooser = impl.choosers[int(rows.choosers[row])]
        budget = self.options[[Column.SINK, Column.WINDOW, Column.SELECT]].sum()
        self.selects = bool(self.options[Column.SELECT] > 0) and len(pages) > budget

    def records(self) -> torch.Tensor:
        """uint8 [entries, kv_heads, bytes]; records of the keys, of the last entry as far as it
        goes."""
        store = self.chooser.store
        if not store.records.shape[2]:
            return store.records[:0].cpu()
        keys = torch.stack([keys_of(page, "token_major").transpose(0, 1) for page in self.cache])
        keys = keys.flatten(0, 1).float()
        keys[self.length :] = keys[self.length - 1]  # which its entry has already
        return build(keys.unflatten(0, (-1, store.entry_tokens)), store)

    def plan(self, query: torch.Tensor, held: Selection) -> DevicePlan:
        """The pages that the row's query attends to, by positions, and selects for the next step.

        Args:
            query: [heads, head_size].
            held: The layer's selection; what it has at the row's seat is written.
        """
        impl, store, seat = self.impl, self.chooser.store, slice(self.seat, self.seat + 1)
        own = IndexRecords(
            store.index, store.entry_tokens, self.records(), store.page_size, store.head_size,
            store.dtype, self.cache, "token_major",
        )  # fmt: skip
        heads = torch.zeros(1, held.chosen.shape[1], dtype=torch.int32)
        selection = Selection(held.query[seat], held.chosen[seat], corrected=heads)
        chooser = Chooser(own, selection, self.chooser.pooling, self.chooser.scale)
        zero, pages = torch.zeros(1, dtype=torch.int32), len(self.pages)
        rows = DeviceRows(
            zero, zero, torch.tensor([0, 1]), zero + self.length, zero.long(),
            torch.arange(pages, dtype=torch.int32)[None], zero, zero + self.fresh, zero,
            zero + self.length,
        )  # fmt: skip
        requests = DeviceRequests(self.options[None].clone(), *torch.zeros(2, 1, dtype=torch.int64))
        plan = DevicePlan.empty(
            rows=1, kv_heads=impl.num_kv_heads, group=impl.group, entries=1, width=pages,
            programs=1, device="cpu", positions=True,
        )  # fmt: skip
        reference.plan_decode(query[None], rows, requests, [chooser], plan)
        reference.select_ahead(rows, requests, 0, chooser, plan)
        return plan

    def attend(
        self, query: torch.Tensor, listed: torch.Tensor, tokens: int, head: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a KV head's queries to the tokens of a list, and log-sum-exps, float64."""
        members = slice(head * self.impl.group, (head + 1) * self.impl.group)
        units = self.cache[listed[: -(-tokens // self.page_size)].long(), head]
        keys, values = units.flatten(0, 1)[:tokens].double().chunk(2, dim=-1)
        scores = query[members].double() @ keys.T * self.impl.scale
        return scores.softmax(-1) @ values, scores.logsumexp(-1)


@dataclass
class Step:
    """What a step leaves on the device.

    Attributes:
        rows, table: Rows as ``prepare_rows`` leaves them, and options of the requests.
        before: The layer's selection before the step.
        after: Its selection, and the lists, lengths and log-sum-exps of its attention.
    """

    rows: DeviceRows
    table: torch.Tensor
    before: Selection
    after: tuple[Selection, torch.Tensor, torch.Tensor, torch.Tensor] | None = None


class Watch:
    """Notes what steps leave, in place of the ops that prepare their rows."""

    def __init__(self, runner: Any) -> None:
        kept = runner.retrieval_layers
        self.impl, self.tier = list(kept.impls.values())[-1], kept.tier
        self.steps: list[Step] = []
        groups = (group.get_metadata_builder() for of in runner.attn_groups for group in of)
        (self.builder,) = (b for b in groups if getattr(b, "ops", None) is not None)
        self.ops, self.builder.ops = self.builder.ops, self

    def close(self) -> None:
        """Watch no more."""
        self.builder.ops = self.ops

    def prepare_rows(
        self, rows: DeviceRows, requests: DeviceRequests, *args: Any, **options: Any
    ) -> None:
        """See ``DeviceOps.prepare_rows``. It runs once per step, and is no part of a graph."""
        self._complete()
        self.ops.prepare_rows(rows, requests, *args, **options)
        copied = moved_rows(rows, torch.clone)
        self.steps.append(Step(copied, requests.table.clone(), self._selection()))

    def take(self) -> dict[str, int]:
        """Compare the steps since the last time; the number of comparisons, and of what is wrong.

        ``lists``: of pages, of KV heads that select; ``attention``: log-sum-exps over these lists.
        After the last step ``records``: entries of the index, and ``units`` in the slots listed.
        """
        self._complete()
        if self.impl.units.is_cuda:
            torch.cuda.synchronize()  # whatever stream copies
        names = "lists", "attention", "records", "units"
        seen = {f"{prefix}{name}": 0 for name in names for prefix in ("", "wrong ")}

        def compared(name: str, right: torch.Tensor | bool) -> None:
            verdicts = torch.as_tensor(right).flatten()
            seen[name] += len(verdicts)
            seen[f"wrong {name}"] += int((~verdicts).sum())

        latest: dict[int, tuple[Step, int, Context]] = {}  # by seat
        for step in self.steps:
            for row in (step.rows.choosers >= 0).nonzero()[:, 0].tolist():
                seat = int(step.rows.seats[row])
                context = Context(self.impl, step.rows, row, step.table[seat])
                latest[seat] = step, row, context
                if context.selects:
                    self._compare(step, row, context, compared)
        for step, row, context in latest.values():
            self._compare_records(context, compared)
            if self.tier is not None and step is self.steps[-1]:
                self._compare_units(step, row, context, compared)
        self.steps.clear()
        return seen

    def _selection(self) -> Selection:
        selection = self.impl.choosers[0].selection
        return Selection(selection.query.clone(), selection.chosen.clone())

    def _complete(self) -> None:
        """Copy what the last step has left."""
        if self.steps and self.steps[-1].after is None:
            plan, _, lse = self.impl.workspace.of(len(self.steps[-1].rows))
            left = (tensor[: len(lse)].clone() for tensor in (plan.lists, plan.lengths, lse))
            self.steps[-1].after = self._selection(), *left

    def _compare(self, step: Step, row: int, context: Context, compared: Any) -> None:
        assert step.after is not None
        selection, *left = step.after
        heads, query = self.impl.num_kv_heads, selection.query[context.seat].cpu()
        lists, lengths, lse = (t.cpu()[row * heads : (row + 1) * heads] for t in left)
        held = Selection(step.before.query.cpu(), step.before.chosen.cpu())
        expected = context.plan(query, held)
        select = int(context.options[Column.SELECT])
        chosen = (c[context.seat, :, :select].cpu() for c in (selection.chosen, held.chosen))
        remembered = torch.eq(*chosen).all(1)
        for head in range(heads):
            tokens, wanted = int(lengths[head]), int(expected.lengths[head])
            listed = lists[head, : -(-max(tokens, 0) // context.page_size)]
            positions = listed.clamp(max=len(context.pages) - 1)
            if self.tier is None:
                positions = (listed[:, None] // heads == context.pages).int().argmax(1)
            specified = expected.lists[head, : len(listed)].long()
            if self.tier is None:
                specified = context.pages[specified] * heads + head
            same = specified.equal(listed.long()) and tokens == wanted
            compared("lists", same and bool(remembered[head]))
            _, exact = context.attend(query, positions, tokens, head)
            compared("attention", bool((lse[head] - exact).abs().max() < ROUNDING))

    def _compare_records(self, context: Context, compared: Any) -> None:
        store = context.chooser.store
        if store.index is None or not store.index.grows:
            return  # others may round otherwise
        entries = (context.pages[:, None] * store.parts + torch.arange(store.parts)).flatten()
        entries = entries[: entry_count(context.length, store)]
        ours = store.records[entries.to(store.records.device)].cpu()
        compared("records", (ours == context.records()[: len(entries)]).flatten(1).all(1))

    def _compare_units(self, step: Step, row: int, context: Context, compared: Any) -> None:
        assert step.after is not None
        _, lists, lengths, _ = step.after
        for head in range(self.impl.num_kv_heads):
            pair = row * self.impl.num_kv_heads + head
            tokens = int(lengths[pair])
            count = -(-max(tokens, 0) // context.page_size)
            slots = self.tier.slot_lists[pair, :count].long()
            held = self.impl.far.slots[slots].cpu().flatten(0, 1)[:tokens]
            positions = lists[pair, :count].cpu().long().clamp(max=len(context.pages) - 1)
            home = context.cache[positions, head].flatten(0, 1)[:tokens]
            right = (held == home).all(1)
            compared("units", torch.stack([p.all() for p in right.split(context.page_size)]))


class Specified:
    """Attention to selections is the specification's, and no step is the replay of a graph."""

    def __init__(self, runner: Any) -> None:
        self._manager = runner.cudagraph_manager
        self._graphs, self._manager._candidates = self._manager._candidates, {}
        self._impls = list(runner.retrieval_layers.impls.values())
        for impl in self._impls:
            kept = impl.choosers[0].selection
            held = Selection(kept.query.cpu().clone(), kept.chosen.cpu().clone())
            impl._attend_to_selection = partial(self._attend, impl, held)

    def close(self) -> None:
        """Let the kernels answer again."""
        self._manager._candidates = self._graphs
        for impl in self._impls:
            del impl._attend_to_selection

    @staticmethod
    def _attend(
        impl: Any,
        held: Selection,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: DeviceRows,
        output: torch.Tensor,
    ) -> None:
        """See ``RetrievalAttentionImpl``; keys and values are in the cache already."""
        with gpu_sync_allowed():
            for row in (rows.choosers >= 0).nonzero()[:, 0].tolist():
                context = Context(impl, rows, row, impl.requests.table[int(rows.seats[row])])
                of_row = query[row].cpu()
                plan = context.plan(of_row, held)
                attended = [
                    context.attend(of_row, plan.lists[head], int(plan.lengths[head]), head)[0]
                    for head in range(impl.num_kv_heads)
                ]
                output[row] = torch.cat(attended).to(output)


def watch(worker: Any) -> None:
    """Note what every step leaves, from now on."""
    _put_in_place(Watch(worker.model_runner))


@torch.inference_mode()
def take(worker: Any) -> dict[str, int]:
    """See :meth:`Watch.take`."""
    found: dict[str, int] = _in_place.take()
    return found


def specify(worker: Any) -> None:
    """Let the specification answer from now on."""
    _put_in_place(Specified(worker.model_runner))


def leave(worker: Any) -> None:
    """Let the engine be as it was."""
    _put_in_place(None)


def _put_in_place(other: Any) -> None:
    global _in_place
    if _in_place is not None:
        _in_place.close()
    _in_place = other
