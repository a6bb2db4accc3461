"""The whole step of a layer by freekv, as an engine runs it, against its specification.

From writing a token to recall ahead beside attention, with the KV cache on the device or in host
memory. The interpreter runs it on "cpu" (triton/test_slots.py); on a GPU (tests/gpu) steps are
replays of a CUDA graph, which see new inputs in the tensors of the one that was captured. The
specification always computes on the CPU, from the state before the step.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from tests.spec import device as device_reference
from tests.spec import slots as slots_reference
from tests.support import triton_checks
from tests.support.device_checks import bits, same_entries
from tests.support.side_work import Interleaved
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import (
    RECORD_ALIGNMENT,
    Column,
    DevicePlan,
    DeviceRequests,
    DeviceRows,
    ScoreRoom,
)
from vllm_kvretrieval.kernels.slots import DecodeWorkspace, Origins, Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.types import Chooser, IndexRecords, Selection
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.families.scored import CORRECTION_THRESHOLD

REFERENCE = SimpleNamespace(**vars(device_reference) | vars(slots_reference))
DTYPE, PAGE, SEATS = torch.bfloat16, 32, 3
CONTEXT = 24  # pages of a row's block table
SINK, WINDOW, SELECT = 1, 2, 5
WIDTH = SINK + WINDOW + SELECT
CAPACITY = 2 * WIDTH
EXACT_ROW, EXACT_STEPS = 2, range(4, 6)
"""A request that attends to its whole context, for some steps."""
NEW_ROW, NEW_STEP = 1, 8
"""A request whose seat another one takes, and when."""
UNTOUCHED = 7.0
"""Outputs of rows that another kernel attends to."""


@dataclass
class State:
    """The tensors of a layer's step, on one device; those of the tiers are None without them."""

    home: torch.Tensor
    chooser: Chooser
    requests: DeviceRequests
    rows: DeviceRows
    plan: DevicePlan
    room: ScoreRoom
    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    partial: DecodeWorkspace
    residency: Residency | None = None
    slots: torch.Tensor | None = None
    origins: Origins | None = None
    early: Recalls | None = None
    lists: torch.Tensor | None = None
    ahead: torch.Tensor | None = None


def twin(value: Any) -> Any:
    """A copy on the CPU, of a tensor or of all tensors of a dataclass."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Chooser):
        value.handle = None  # a view of its tensors
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: twin(getattr(value, f.name)) for f in fields(value)})
    return value


class Chain:
    """A layer whose steps are the kernels'.

    Args:
        device: Where slots, records and lists are.
        home: [pages, kv_heads, PAGE, 2 * head_size]; pages of all rows, as the device sees them.
        side: Runs what is beside attention.
        far: Whether the home is in host memory, and there are slots.
        group: Query heads per KV head.
    """

    def __init__(self, device, home, side, group, far):
        self.device, self.side = device, side
        pages, kv_heads, _, width = home.shape
        self.kv_heads, self.group, head_size = kv_heads, group, width // 2
        own = RetrievalConfig(method="freekv", budget=WIDTH * PAGE).own
        pairs, heads = SEATS * kv_heads, kv_heads * group
        assert pages == SEATS * CONTEXT
        with torch.device(device):
            store = IndexRecords.empty(
                own.index, pages=pages, kv_heads=kv_heads, head_size=head_size, page_size=PAGE,
                entry_tokens=own.entry_tokens, dtype=DTYPE, cache=home, layout="token_major",
                alignment=RECORD_ALIGNMENT,
            )  # fmt: skip
            kernels.index_pages(torch.arange(pages, dtype=torch.int32), store)
            selection = Selection.empty(
                seats=SEATS, kv_heads=kv_heads, group=group, head_size=head_size,
                most_selected=SELECT, dtype=DTYPE,
            )  # fmt: skip
            selection.query.zero_()
            number = torch.arange(SEATS, dtype=torch.int32)
            key, value = torch.zeros(2, SEATS, kv_heads, head_size, dtype=DTYPE)
            query, out = torch.zeros(2, SEATS, heads, head_size, dtype=DTYPE)
            self.state = State(
                home,
                Chooser(store, selection, own.pooling, head_size**-0.5),
                DeviceRequests.empty(SEATS, device),
                DeviceRows(
                    number.flip(0), torch.zeros_like(number), torch.arange(SEATS + 1).int(),
                    # Whole to begin with, soon beyond its budget, and far beyond it.
                    torch.tensor([WIDTH, CONTEXT - 3, CONTEXT - 2]).int() * PAGE - 3,
                    torch.zeros(SEATS).long(), torch.randperm(pages).int().view(SEATS, CONTEXT),
                    *torch.zeros(4, SEATS).int(),
                ),
                DevicePlan.empty(
                    rows=SEATS, kv_heads=kv_heads, group=group, entries=CONTEXT * store.parts,
                    width=WIDTH, programs=2, device=device, positions=far,
                ),
                ScoreRoom(
                    torch.empty(pairs, group, CONTEXT * store.parts),
                    torch.empty(pairs, 2, 2, group),
                    torch.zeros(pairs, dtype=torch.int32),
                ),
                key, value, query, out, torch.zeros(pairs, group),
                DecodeWorkspace.empty(
                    rows=pairs, splits=4, group=group, head_size=head_size, device=device
                ),
            )  # fmt: skip
            if far:
                self._add_tier(pairs, width)
        table = self.state.requests.table
        table[:, : Column.SELECT + 1] = torch.tensor([SINK, WINDOW, SELECT], device=device)
        table[:, Column.THRESHOLD] = bits(CORRECTION_THRESHOLD.of(own))
        self.draw(-1)

    def _add_tier(self, pairs, width):
        state = self.state
        step, traffic = torch.zeros(1).int(), torch.zeros(SEATS, len(Traffic)).long()
        state.residency = Residency.empty(
            kv_heads=self.kv_heads, slots=CAPACITY, step=step, traffic=traffic
        )
        state.slots = torch.zeros(pairs * CAPACITY, PAGE, width, dtype=DTYPE)
        state.early = Recalls.empty(pairs * WIDTH, self.device)
        state.lists, state.ahead, units = torch.zeros(3, pairs, WIDTH, dtype=torch.int32)
        state.origins = Origins(state.home, units)

    def draw(self, number):
        """The inputs of the next step, in the tensors of the last one."""
        state, rows = self.state, self.state.rows
        rows.seq_lens += 1
        table = state.requests.table
        table[int(rows.seats[EXACT_ROW]), Column.EXACT] = number in EXACT_STEPS
        if number == NEW_STEP:
            table[int(rows.seats[NEW_ROW]), Column.LAST_LEN] = 0
            rows.seq_lens[NEW_ROW] = (WIDTH + 4) * PAGE
        last = rows.seq_lens.long() - 1
        pages = rows.block_table.gather(1, (last // PAGE)[:, None])[:, 0]
        rows.slot_mapping.copy_(pages * PAGE + last % PAGE)
        state.key.copy_(torch.randn(state.key.shape))
        state.value.copy_(torch.randn(state.value.shape))
        # Some heads go on in the direction of their last query, and do not correct.
        fresh = torch.randn(state.query.shape).unflatten(1, (self.kv_heads, self.group))
        old = state.query.float().cpu().unflatten(1, fresh.shape[1:3])
        goes_on = torch.rand(SEATS, self.kv_heads, 1, 1) < 0.5
        state.query.copy_(torch.where(goes_on, old + 0.02 * fresh, fresh).flatten(1, 2))
        state.out.fill_(UNTOUCHED)

    def prepare(self):
        """What an engine does before it replays a step."""
        state = self.state
        kernels.prepare_rows(state.rows, state.requests, PAGE, far=state.residency is not None)
        if state.residency is not None:
            state.residency.step.add_(1)
        if state.early is not None:
            state.early.count.zero_()

    def step(self):
        """The launches that a graph holds."""
        state, side = self.state, self.side
        ops = getattr(side, "ops", kernels)  # interleaved, where side work is
        write(ops, state)
        select(ops, state)
        if state.residency is not None:
            resolve(ops, state)
        side.submit(lambda: look_ahead(ops, state, programs=4))
        attend(ops, state)
        side.wait()

    def check(self, run, steps):
        """Take steps, and compare each with its specification.

        Args:
            run: Takes a step: ``step``, or the replay of its graph.
            steps: How many.
        """
        corrected = looked_up = 0
        for number in range(steps):
            self.draw(number)
            self.prepare()
            before = twin(self.state)
            before.chooser.store.cache = before.home
            if before.origins is not None:
                before.origins = replace(before.origins, home=before.home)
            run()
            found = twin(self.state)
            specify(before, found)
            looked_up += int((found.plan.lengths > WIDTH * PAGE - PAGE).sum())
            corrected = found.requests.corrected.sum()
        assert 0 < corrected < looked_up, "some heads select anew, and some do not"


def interpreted(device, *, far, kv_heads=2, group=2, head_size=64, steps=10):
    """Steps that the interpreter takes, launches beside attention in between."""
    torch.manual_seed(0)
    home = torch.randn(SEATS * CONTEXT, kv_heads, PAGE, 2 * head_size).to(DTYPE)
    chain = Chain(device, home, Interleaved(kernels), group, far)
    chain.check(chain.step, steps)


def write(ops, state):
    """New keys and values, to the cache and its index."""
    store = state.chooser.store
    ops.write_kv(state.key, state.value, state.rows.slot_mapping, state.home, [store])


def select(ops, state):
    ops.plan_decode(state.query, state.rows, state.requests, [state.chooser], state.plan)


def resolve(ops, state):
    """Slots for what this step attends to, and its tokens into them."""
    of_rows = state.key, state.value, state.plan, state.rows
    ops.resolve(*of_rows, state.residency, state.origins, state.slots, state.lists)


def look_ahead(ops, state, **options):
    """What the next step attends to, and into slots that this one does not use."""
    ops.select_ahead(state.rows, state.requests, 0, state.chooser, state.room)
    if state.residency is None:
        return
    early, selection = state.early, state.chooser.selection
    held = state.rows, state.requests, state.residency
    ops.resolve_ahead(selection, *held, early, state.ahead, PAGE)
    ops.recall_units(state.home, state.slots, early.sources, early.targets, early.count, **options)


def attend(ops, state):
    units, lists = state.slots, state.lists
    if units is None:
        units, lists = state.home.flatten(0, 1), state.plan.lists
    ops.sparse_decode(
        state.query, units, lists, state.plan.lengths, state.chooser.scale, state.out, state.lse,
        state.partial, origins=state.origins,
    )  # fmt: skip


def specify(state, found):
    """Take the step by the specification, and compare what is found after each of its parts.

    Args:
        state: Before the step; written.
        found: After it.
    """
    write(REFERENCE, state)
    assert torch.equal(state.home.view(torch.int16), found.home.view(torch.int16)), "cache"
    ours, theirs = (s.chooser.store for s in (state, found))
    same_entries(ours, theirs, state.rows.seq_lens, state.rows.block_table)
    ours.records.copy_(theirs.records)
    select(REFERENCE, state)
    lengths = state.plan.lengths
    assert torch.equal(lengths, found.plan.lengths), "lengths"
    listed = torch.arange(WIDTH) * PAGE < lengths[:, None]
    assert torch.equal(state.plan.lists[listed], found.plan.lists[listed]), "lists"
    assert torch.equal(state.requests.corrected, found.requests.corrected), "corrected heads"
    sparse = state.rows.seq_lens > WIDTH * PAGE
    seats = state.rows.seats[sparse & (state.rows.choosers >= 0)].long()
    ours, theirs = (s.chooser.selection for s in (state, found))
    assert torch.equal(ours.query[seats], theirs.query[seats]), "queries"
    if state.residency is not None:
        resolve(REFERENCE, state)
        assert torch.equal(state.lists[listed], found.lists[listed]), "slots of the lists"
        units = [s.origins.units[listed] for s in (state, found)]
        assert torch.equal(*units), "units that are missing"
    attend(REFERENCE, state)
    rows = lengths.view(SEATS, -1)[:, 0] >= 0
    assert torch.equal(found.out[~rows], state.out[~rows]), "rows that are left alone"
    pairs = lengths >= 0
    expected, actual = ((s.out[rows], s.lse[pairs]) for s in (state, found))
    triton_checks.close(expected, actual, DTYPE)
    look_ahead(REFERENCE, state)
    assert torch.equal(ours.chosen[seats], theirs.chosen[seats]), "selection"
    if state.residency is not None:
        for name in ("held", "stamp", "traffic"):
            assert torch.equal(getattr(state.residency, name), getattr(found.residency, name)), name
        assert torch.equal(state.slots.view(torch.int16), found.slots.view(torch.int16)), "slots"
