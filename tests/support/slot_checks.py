"""Checks of what finds slots for pages, as triton_checks.py has them of the other kernels."""

import random

import torch

from tests.spec import slots as reference
from tests.support import triton_checks
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import Column, DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.slots import DecodeWorkspace, Origins, Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.types import Selection

PAGE = 16
SINK, WINDOW = 1, 2
HEAD_SIZE = 48


class Side:
    """One implementation whose slots hold the numbers of units in place of units; new tokens go to
    slots of their own."""

    def __init__(self, ops, device, *, seats, kv_heads, capacity, rows, width, in_place, run):
        self.ops = ops
        step = torch.zeros(1, dtype=torch.int32, device=device)
        traffic = torch.zeros(seats, len(Traffic), dtype=torch.int64, device=device)
        self.residency = Residency.empty(
            kv_heads=kv_heads, slots=capacity, step=step, traffic=traffic
        )
        # Slots and pages of one token, so that a unit's number is all there is to copy.
        self.slots = torch.full((seats * kv_heads * capacity,), -1, device=device)
        size = len(self.slots), PAGE, 2 * HEAD_SIZE
        self.written = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self.lists = torch.full((rows * kv_heads, width), -7, dtype=torch.int32, device=device)
        self.recalls = Recalls.empty(rows * kv_heads * width, device)
        self.units = torch.full_like(self.lists, -7)
        home = torch.empty(1, kv_heads, run * PAGE, 0, device=device)
        beyond = width > capacity
        self.missing = Origins(home, self.units, beyond=beyond) if in_place else self.recalls

    def recall(self):
        """Copy what is listed, and return it."""
        count = int(self.recalls.count)
        self.recalls.count.zero_()
        return self._copy(self.recalls.sources[:count], self.recalls.targets[:count])

    def read_in_place(self):
        """The same of what lists miss, and get a slot for."""
        listed = (self.units >= 0) & (self.lists >= 0)
        return self._copy(self.units[listed], self.lists[listed])

    def _copy(self, sources, targets):
        assert len(targets.unique()) == len(targets), "no slot twice"
        self.slots[targets.long()] = sources.long()
        return set(zip(sources.tolist(), targets.tolist(), strict=True))

    def state(self):
        held = self.residency.held, self.residency.stamp, self.residency.traffic
        return *held, self.lists, self.units, self.written


class Contexts:
    """Requests that come and go, grow by a token a step, and select almost what they selected.

    They have up to ``drafts`` drafts, of which some are accepted. Pages of the home have ``run`` of
    those that slots have.
    """

    def __init__(self, device, *, seats, kv_heads, select, rows, drafts, run, seed):
        self.draw, self.kv_heads, self.select = random.Random(seed), kv_heads, select
        self.drafts, self.run = drafts, run
        self.table_pages = 4 * select + 40
        self.rows = DeviceRows(
            torch.zeros(rows, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int32),
            torch.arange(rows + 1, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int64),
            torch.zeros(rows, self.table_pages, dtype=torch.int32),
            *torch.zeros(4, rows, dtype=torch.int32),
        )
        self.requests = DeviceRequests.empty(seats, "cpu")
        self.requests.table[:, : Column.SELECT + 1] = torch.tensor([SINK, WINDOW, select])
        self.selection = Selection.empty(
            seats=seats, kv_heads=kv_heads, group=1, head_size=16, most_selected=select,
            dtype=torch.float32,
        )  # fmt: skip
        self.device = device
        self.running = {}
        self.arrive(range(rows))

    def arrive(self, seats):
        for seat in seats:
            pages = self.draw.randint(SINK + WINDOW + 1, 3 * self.select + 10)
            table = torch.tensor(self.draw.sample(range(9999), self.table_pages))
            self.running[seat] = [pages * PAGE - self.draw.randint(0, 3), table]
            self.rows.fresh[seat] = 1

    def chosen(self, seat, head, between):
        """The pages that a head selects: all but two of the previous ones, if these are still
        between."""
        before = self.selection.chosen[seat, head].tolist()[2:]
        kept = {p for p in before if SINK <= p < SINK + between}
        kept = set(sorted(kept)[: self.select - 2])
        others = [p for p in range(SINK, SINK + between) if p not in kept]
        return sorted(kept | set(self.draw.sample(others, self.select - len(kept))))

    def step(self, plan):
        """The next token of every request; returns how many pages the lists have."""
        listed = 0
        for row, (length, table) in self.running.items():
            self.rows.seats[row] = row
            self.rows.choosers[row] = -1 if self.draw.random() < 0.1 else 0
            drafts = self.draw.randint(0, self.drafts)
            end = length + drafts
            self.rows.seq_lens[row], self.rows.certain[row] = end, length
            self.rows.query_start[row + 1] = self.rows.query_start[row] + 1 + drafts
            self.rows.block_table[row] = table
            self.running[row][0] += 1 + self.draw.randint(0, drafts)
            pages = -(-length // PAGE)
            last = -(-end // PAGE)
            between = pages - SINK - WINDOW
            for head in range(self.kv_heads):
                pair = row * self.kv_heads + head
                if self.rows.choosers[row] < 0:
                    plan.lengths[pair] = -1
                    continue
                pages_of_head = list(range(last))
                if between > self.select:
                    new = self.chosen(row, head, between)
                    old = self.selection.chosen[row, head].tolist()[: len(new)]
                    usable = sorted({p for p in old if SINK <= p < SINK + between})
                    corrected = self.rows.fresh[row] or self.draw.random() < 0.3
                    middle = new if corrected or len(usable) < len(new) else usable
                    pages_of_head = [*range(SINK), *middle, *range(SINK + between, last)]
                    self.selection.chosen[row, head] = -5
                    self.selection.chosen[row, head, : len(new)] = torch.tensor(new)
                plan.lists[pair, : len(pages_of_head)] = torch.tensor(pages_of_head).int()
                plan.lengths[pair] = (len(pages_of_head) - 1) * PAGE + (end - 1) % PAGE + 1
                listed += len(pages_of_head)
        return listed

    def units(self, pair, positions):
        """The units of pages of a (row, KV head), by their positions in its context."""
        row, head = divmod(pair, self.kv_heads)
        at_home = self.rows.block_table[row, positions.long() // self.run]
        return (at_home * self.kv_heads + head) * self.run + positions % self.run

    def left_alone(self):
        """A row that was skipped does not follow its previous step when it comes back."""
        for row in self.running:
            self.rows.fresh[row] = int(self.rows.choosers[row] < 0)


def resolve(
    device,
    *,
    capacity,
    select,
    kv_heads=2,
    rows=3,
    drafts=0,
    steps=12,
    seed=0,
    least_hits=0.6,
    in_place=False,
    run=1,
):
    """Step for step what the specification does; and slots hold what is said to be in them."""
    seats, width = rows + 1, SINK + WINDOW + select + -(-drafts // PAGE)
    shape = {"kv_heads": kv_heads, "rows": rows}
    drawn = {"select": select, "drafts": drafts, "run": run, "seed": seed}
    contexts = Contexts("cpu", seats=seats, **drawn, **shape)
    plan = DevicePlan.empty(
        rows=rows, kv_heads=kv_heads, group=1, entries=1, width=width, programs=1, device="cpu",
        positions=True,
    )  # fmt: skip
    shape |= {"seats": seats, "capacity": capacity, "width": width}
    shape |= {"in_place": in_place, "run": run}
    sides = [Side(reference, "cpu", **shape), Side(kernels, device, **shape)]
    missed = ahead = listed = beyond = 0
    for step in range(steps):
        if step in (steps // 2, steps - 4):
            contexts.arrive([contexts.draw.randrange(rows)])
        listed += contexts.step(plan)
        count, found = int(contexts.rows.query_start[-1]), []
        tokens = torch.randn(count, 2 * kv_heads, HEAD_SIZE).bfloat16()
        for side in sides:
            moved = [to(side, thing) for thing in (plan, contexts.rows, contexts.selection)]
            there, in_rows, selection = moved
            side.residency.step += 1
            side.lists.fill_(-7)
            side.units.fill_(-7)
            of_step = side.residency, side.missing, side.written, side.lists
            side.ops.resolve(*tokens.to(side.slots.device).chunk(2, 1), there, in_rows, *of_step)
            critical = side.read_in_place() if in_place else side.recall()
            attended = side.lists.clone()
            check_attended(side, contexts, plan, attended)
            held = side.slots.clone()
            side.lists.fill_(-7)
            early = set()
            if run == 1:
                side.ops.resolve_ahead(
                    selection, in_rows, to(side, contexts.requests), side.residency, side.recalls,
                    side.lists, PAGE,
                )  # fmt: skip
                early = side.recall()
            in_use = attended[attended >= 0].long()
            assert torch.equal(side.slots[in_use], held[in_use]), "a slot of this step is lost"
            found.append((critical, early, attended))
        (critical, early, attended), other = found
        assert (critical, early) == other[:2], f"step {step}"
        assert torch.equal(attended, other[2].cpu()), f"step {step}"
        for expected, actual in zip(sides[0].state(), sides[1].state(), strict=True):
            assert torch.equal(expected, actual.cpu()), f"step {step}"
        missed, ahead = missed + len(critical), ahead + len(early)
        beyond += int((attended == -1).sum())
        contexts.left_alone()
    assert sides[0].written.any(), "some tokens are of pages in slots"
    traffic = sides[0].residency.traffic.sum(0).tolist()
    assert traffic == [listed, missed + beyond, ahead, (sides[0].residency.held >= 0).sum()]
    assert bool(ahead) == (capacity > width and run == 1), "pages come ahead where there are slots"
    assert bool(beyond) == (capacity < width), "lists that are longer than there are slots"
    assert 1 - missed / listed > least_hits, f"{missed} of {listed} units missed"


def check_attended(side, contexts, plan, attended):
    """Every page that a step attends to is in the slot that is named for it, or at home where none
    is left."""
    capacity = side.residency.held.shape[2]
    for pair, length in enumerate(plan.lengths.tolist()):
        pages = -(-length // PAGE) if length >= 0 else 0
        units, there = contexts.units(pair, plan.lists[pair, :pages]), slice(min(pages, capacity))
        assert side.slots[attended[pair, there].long()].tolist() == units[there].tolist()
        left = slice(there.stop, pages)
        assert (attended[pair, left] == -1).all()
        assert side.units[pair, left].tolist() == units[left].tolist()
        assert (attended[pair, pages:] == -7).all(), "nothing else is written"
        assert (side.units[pair, pages:] == -7).all(), "nor of what is missing"
        assert (attended[pair, there] // capacity == pair).all(), "slots of one's own"


def to(side, thing):
    """The tensors of a dataclass on the device of one side."""
    device = side.slots.device
    moved = {k: v.to(device) if torch.is_tensor(v) else v for k, v in vars(thing).items()}
    return type(thing)(**moved)


def read_in_place(
    device, *, lengths, page, splits, kv_heads=2, group=2, head_size=48, queries=1, run=1
):
    """Slots that lack pages of a home are attended to as if they had them, and filled; without a
    slot a page is attended to at home. A page of the home has ``run`` of those that slots have."""
    torch.manual_seed(page + splits)
    rows, width = len(lengths), -(-max(lengths) // page) + 1
    requests = rows // kv_heads
    row = {"dtype": torch.bfloat16, "device": device}
    home = torch.randn(2 * rows * width, kv_heads, page * run, 2 * head_size, **row)
    at_home = home.view(-1, page, 2 * head_size)
    full = torch.randn(3 * rows * width, page, 2 * head_size, **row)
    lists = torch.randperm(len(full), device=device)[: rows * width].int().view(rows, width)
    units = torch.randperm(len(at_home), device=device)[: rows * width].int()
    missing = torch.rand(rows, width, device=device) < 0.5
    units = units.view(rows, width).where(missing, -1)
    slots = full.clone()
    for place, length in enumerate(lengths):
        ends = (length - page * torch.arange(width)).clamp(0, page).tolist()
        for unit, slot, end in zip(units[place], lists[place], ends, strict=True):
            if unit >= 0:
                full[slot, :end] = at_home[unit, :end]
                slots[slot, :end] = float("nan")
    homeless = torch.rand(rows, width, device=device) < 0.3
    some = lists.where(~homeless | ~missing, -1)
    filled = full.clone()
    filled[lists[some < 0].long()] = slots[lists[some < 0].long()]
    query = torch.randn(requests * queries, kv_heads * group, head_size, **row)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * queries
    of_lists = torch.tensor(lengths, dtype=torch.int32, device=device), head_size**-0.5
    workspace = DecodeWorkspace.empty(
        rows=rows, splits=splits, group=queries * group, head_size=head_size, device=device
    )
    results = []
    at, beyond = Origins(home, units), Origins(home, units, beyond=True)
    for ops, held, listed, origins, left in (
        (kernels, full, lists, None, full),
        (kernels, slots.clone(), lists, at, full),
        (reference, slots.clone(), lists, at, full),
        (kernels, slots.clone(), some, beyond, filled),
        (reference, slots.clone(), some, beyond, filled),
    ):
        out, lse = torch.zeros_like(query), torch.zeros(rows, queries * group, device=device)
        ops.sparse_decode(
            query, held, listed, *of_lists, out, lse, workspace, starts=starts, queries=queries,
            origins=origins,
        )  # fmt: skip
        assert torch.equal(held.view(torch.int16), left.view(torch.int16)), "slots"
        results.append((out, lse))
    assert missing.any()
    assert not missing.all()
    assert (some < 0).any()
    for kernel, specified in ((1, 2), (3, 4)):
        for expected, actual in zip(results[0], results[kernel], strict=True):
            assert torch.equal(expected, actual), "attention"
        triton_checks.close(results[specified], results[kernel], torch.bfloat16)


def stage(device, *, kv_heads, head_size, page, programs):
    """Contexts arrive in order, pages that are partly filled whole; all else stays."""
    torch.manual_seed(head_size + page + kv_heads)
    home = torch.randn(23, kv_heads, page, 2 * head_size, device=device).bfloat16()
    buffer = torch.randn(17, kv_heads, page, 2 * head_size, device=device).bfloat16()
    table = torch.stack([torch.randperm(23, device=device)[:12].int() for _ in range(4)])[:, :9]
    lengths = torch.tensor([5 * page, 0, 1, 8 * page - 3], dtype=torch.int32, device=device)
    starts = torch.tensor([10, 3, 9, 1], dtype=torch.int32, device=device)
    expected, actual = buffer.clone(), buffer.clone()
    reference.stage_context(home, expected, table, lengths, starts)
    kernels.stage_context(home, actual, table, lengths, starts, programs=programs)
    assert not torch.equal(expected, buffer)
    assert torch.equal(expected, actual)


def far_units(device):
    """Units and pages whose first element has a number that 31 bits do not hold."""
    kv_heads, page, width = 3, PAGE, 32
    pages = 2**31 // (kv_heads * page * width) + 2
    home = torch.empty(pages, kv_heads, page, width, dtype=torch.bfloat16, device=device)
    home[[-2, -1]] = torch.randn_like(home[[-2, -1]])
    units = pages * kv_heads
    slots = home.view(units, page, width)
    last = torch.tensor([units - 1], dtype=torch.int32, device=device)
    near = torch.zeros_like(last)
    one = torch.ones_like(last)
    held = torch.zeros(2, page, width, dtype=torch.bfloat16, device=device)
    kernels.recall_units(home, held, last, near, one)
    assert torch.equal(held[0], home[-1, -1])
    kernels.recall_units(held[None], slots, near, last - 1, one)
    assert torch.equal(home[-1, -2], held[0])
    buffer = torch.zeros(1, *home.shape[1:], dtype=torch.bfloat16, device=device)
    kernels.stage_context(home, buffer, (one * pages - 1)[None], one, near)
    assert torch.equal(buffer[0], home[-1])
    kernels.stage_context(buffer, home, near[None], one, one * pages - 2)
    assert torch.equal(home[-2], home[-1])
