"""Faults to plant in the ops of an engine of tests/support/device_engine.py, in its process.

Each is what a broken kernel, or a forgotten call of one, would do in every layer and step.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import Column

MOST_ROWS = 4
"""Of a step that decodes."""


class Sound:
    """The ops as they are.

    Attributes:
        homes: Where there may be such a fault.
        layer: What is wrong about a layer, by the names of ``tests/support/layer_watch.py``.
        answers: Whether the answers of a short test are wrong.
    """

    homes: ClassVar[Sequence[str]] = ("device",)
    layer: ClassVar[Sequence[str]] = ()
    answers = True

    def __getattr__(self, name: str) -> Any:
        return getattr(kernels, name)


class NothingSelected(Sound):
    """Lists have sink and window alone."""

    layer = ("lists",)

    def plan_decode(self, query, rows, requests, choosers, plan):
        with _column(requests, Column.SELECT, 0):
            kernels.plan_decode(query, rows, requests, choosers, plan)


class LastStepsList(Sound):
    """Heads attend to what the last step has selected, also where they are to select anew."""

    layer = ("lists",)

    def plan_decode(self, query, rows, requests, choosers, plan):
        with _column(requests, Column.THRESHOLD, _bits(-1.0)):
            kernels.plan_decode(query, rows, requests, choosers, plan)


class ThisStepsList(Sound):
    """Heads select anew where they are to attend to what the last step has selected."""

    layer = ("lists",)

    def plan_decode(self, query, rows, requests, choosers, plan):
        with _column(requests, Column.THRESHOLD, _bits(1.0)):
            kernels.plan_decode(query, rows, requests, choosers, plan)


class NothingAhead(Sound):
    """Nothing is selected beside attention, so heads go on with what they selected last."""

    homes = ("device", "host")
    layer = ("lists",)

    def select_ahead(self, rows, requests, number, chooser, room):
        pass


class AnotherSeatsList(Sound):
    """A request's heads attend to what a request beside it has selected."""

    homes = ("device", "host")
    layer = ("lists",)

    def plan_decode(self, query, rows, requests, choosers, plan):
        kernels.plan_decode(query, rows, requests, choosers, plan)
        pairs = len(rows) * choosers[0].store.kv_heads
        lists = plan.lists[:pairs].unflatten(0, (len(rows), -1))
        lists.copy_(lists.roll(1, 0))


class NoIndex(Sound):
    """Records stay what they were at the start."""

    layer = ("lists", "records")

    def write_kv(self, key, value, slot_mapping, cache, indexes, **options):
        kernels.write_kv(key, value, slot_mapping, cache, (), **options)
        for store in indexes:
            store.records.zero_()


class StaleIndex(Sound):
    """Prompts are taken into the index, and decoded tokens are not."""

    layer = ("records",)
    answers = False  # what is decoded here is in the window

    def write_kv(self, key, value, slot_mapping, cache, indexes, **options):
        decodes = len(slot_mapping) <= MOST_ROWS
        taken = () if decodes else indexes
        kernels.write_kv(key, value, slot_mapping, cache, taken, **options)


class NoMerge(Sound):
    """Of a list that is attended to in parts, the first part is the result."""

    homes = ("device", "host")
    layer = ("attention",)

    def sparse_decode(self, query, slots, lists, lengths, scale, out, lse, workspace, **rules):
        kernels.sparse_decode(query, slots, lists, lengths, scale, out, lse, workspace, **rules)
        if workspace.splits == 1:
            return
        pairs, attended = len(lse), lengths >= 0
        lse[attended] = workspace.lse[:pairs, 0][attended] * math.log(2)
        parts = workspace.out[:pairs, 0].reshape(-1, *out.shape[1:])
        rows = _sparse(lengths, query.shape[1] // lse.shape[1])
        out[: len(rows)][rows] = parts[rows].to(out.dtype)


class NotWritten(Sound):
    """Where attention is to be written there is what the dense half has left."""

    layer = ()

    def sparse_decode(self, query, slots, lists, lengths, scale, out, lse, workspace, **rules):
        kernels.sparse_decode(query, slots, lists, lengths, scale, out, lse, workspace, **rules)
        rows = _sparse(lengths, query.shape[1] // lse.shape[1])
        out[: len(rows)][rows] = 0


class WrongSlot(Sound):
    """A unit comes into the slot of the one before it."""

    homes = ("host",)
    layer = ("attention", "units")

    def recall_units(self, home, slots, sources, targets, count, **options):
        listed = int(count)
        wrong = targets.clone()
        wrong[:listed] = targets[:listed].roll(1)
        kernels.recall_units(home, slots, sources, wrong, count, **options)

    def sparse_decode(self, query, slots, lists, lengths, *args, origins, **rules):
        places = torch.arange(lists.shape[1]) * slots.shape[1] < lengths[:, None]
        units = origins.units[: len(lists)].clone()
        missing = places & (units >= 0)
        units[missing] = units[missing].roll(1)
        origins = replace(origins, units=units)
        kernels.sparse_decode(query, slots, lists, lengths, *args, origins=origins, **rules)


class NoRecall(Sound):
    """Slots are given to pages, which do not come ahead."""

    homes = ("host",)
    layer = ("attention", "units")

    def recall_units(self, home, slots, sources, targets, count, **options):
        pass


class NothingMissing(Sound):
    """Attention takes slots for those of pages that are not there yet."""

    homes = ("host",)
    layer = ("attention", "units")

    def sparse_decode(self, *args, origins, **rules):
        kernels.sparse_decode(*args, **rules)


class NoTail(Sound):
    """New tokens come to their pages at home, and not to the slots of these."""

    homes = ("host",)
    layer = ("attention", "units")

    def resolve(self, key, value, plan, rows, residency, missing, slots, slot_lists):
        elsewhere = slots.clone()
        kernels.resolve(key, value, plan, rows, residency, missing, elsewhere, slot_lists)


class DraftsInRecords(Sound):
    """Records keep what rejected drafts have left in them."""

    def write_kv(self, key, value, slot_mapping, cache, indexes, **options):
        kernels.write_kv(key, value, slot_mapping, cache, indexes)


class DraftsInScores(Sound):
    """Pages are scored by drafts, too."""

    def plan_decode(self, query, rows, requests, choosers, plan):
        kernels.plan_decode(query, replace(rows, drafts=0), requests, choosers, plan)


class LastQuery(Sound):
    """The query of the last draft selects."""

    def plan_decode(self, query, rows, requests, choosers, plan):
        ends = rows.query_start.clone()
        ends[:-1] = rows.query_start[1:] - 1
        rows = replace(rows, query_start=ends.clamp(min=0))
        kernels.plan_decode(query, rows, requests, choosers, plan)


class DraftsCount(Sound):
    """Drafts are taken for tokens that are certain."""

    def prepare_rows(self, rows, requests, page_size, **options):
        kernels.prepare_rows(rows, requests, page_size, **options)
        rows.certain.copy_(rows.seq_lens)


DRAFT_FAULTS: dict[str, type[Sound]] = {
    "drafts in records": DraftsInRecords,
    "drafts in scores": DraftsInScores,
    "the last query": LastQuery,
    "drafts count": DraftsCount,
}
"""What would let rejected drafts leave a trace."""
FAULTS: dict[str, type[Sound]] = {
    "nothing selected": NothingSelected,
    "last step's list": LastStepsList,
    "this step's list": ThisStepsList,
    "nothing selected ahead": NothingAhead,
    "another seat's list": AnotherSeatsList,
    "index never updated": NoIndex,
    "index not updated by decoding": StaleIndex,
    "dropped merge": NoMerge,
    "attention not written": NotWritten,
    "recall into a wrong slot": WrongSlot,
    "no recall ahead": NoRecall,
    "missing units not read at home": NothingMissing,
    "tail not written": NoTail,
}


def plant(name):
    """Let an engine of this process use these ops, from now on."""
    from tests.support.device_worker import DeviceRunner

    DeviceRunner.side.ops._ops = Sound() if name is None else (FAULTS | DRAFT_FAULTS)[name]()


@contextmanager
def _column(requests: Any, column: Column, value: Any) -> Iterator[None]:
    """Another option of all requests for a while."""
    held = requests.table[:, column].clone()
    requests.table[:, column] = value
    yield
    requests.table[:, column] = held


def _bits(threshold: float) -> torch.Tensor:
    return torch.tensor(threshold).view(torch.int32)


def _sparse(lengths: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """bool [rows]; which rows attend to a selection."""
    return lengths.view(-1, kv_heads)[:, 0] >= 0
