"""The compiled recall cache against its specification, over thousands of random steps."""

import mmap
import os
import tempfile
from dataclasses import replace

import pytest
import torch

from tests.test_kernels import make_chooser, make_rows
from vllm_kvretrieval.kernels import cpu, reference

PAGES, HEADS, PAGE, HEAD_SIZE = 60, 2, 32, 16
UNITS = PAGES * HEADS
REQUESTS = 4
SINK, WINDOW, SELECT = BUDGET = 1, 2, 3
LEAST_SLOTS = REQUESTS * HEADS * sum(BUDGET)


class Home:
    """A layer's KV cache in an unnamed file behind one page of something else."""

    def __init__(self):
        shape = (UNITS, 1, 2 * PAGE, HEAD_SIZE)
        offset = mmap.PAGESIZE
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.file.truncate(offset + 4 * torch.Size(shape).numel())
        self.map = mmap.mmap(self.file.fileno(), 0)
        self.units = torch.frombuffer(self.map, dtype=torch.float32, offset=offset).view(shape)
        self.units.normal_()
        self.place = self.file.fileno(), offset


@pytest.fixture
def home():
    return Home()


def caches(home, slots):
    """The compiled cache and its specification, over the same home."""
    counts = [torch.zeros(REQUESTS, 3, dtype=torch.int64) for _ in range(2)]
    return [
        cpu.RecallCache(home.units, slots, HEADS, counts[0], home.place),
        reference.RecallCache(home.units, slots, HEADS, counts[1]),
    ], counts


class Engine:
    """The least that a scheduler does: requests with page lists that grow, share and end."""

    def __init__(self, home, generator):
        self.home, self.random = home, generator
        self.requests: dict[int, tuple[list[int], int]] = {}  # entry -> pages, tokens
        self.owners = [0] * PAGES

    def integer(self, low, high):
        return int(torch.randint(low, high, (), generator=self.random))

    def free(self):
        return [page for page in range(PAGES) if not self.owners[page]]

    def write(self, pages, first, last):
        """Tokens [first, last) of a request with these pages; the slot mapping."""
        slots = [pages[t // PAGE] * PAGE + t % PAGE for t in range(first, last)]
        for page in {slot // PAGE for slot in slots}:
            self.home.units[page * HEADS : (page + 1) * HEADS].normal_(generator=self.random)
        return torch.tensor(slots)

    def add(self):
        """A new request, half of the time behind a prefix of another; what it writes."""
        entry = next(e for e in range(REQUESTS) if e not in self.requests)
        shared = []
        if self.requests and self.integer(0, 2):
            pages, tokens = self.requests[sorted(self.requests)[0]]
            shared = pages[: self.integer(0, tokens // PAGE + 1)]
        room = min(len(self.free()), 10)
        tokens = len(shared) * PAGE + self.integer(1, room * PAGE)
        pages = shared + self.free()[: -(-tokens // PAGE) - len(shared)]
        self.requests[entry] = pages, tokens
        for page in pages:
            self.owners[page] += 1
        return self.write(pages, len(shared) * PAGE, tokens)

    def remove(self, entry):
        """Finish, abort or preempt."""
        for page in self.requests.pop(entry)[0]:
            self.owners[page] -= 1
        return entry

    def append(self, entry):
        """One more token; the slot mapping, or None where no page is free."""
        pages, tokens = self.requests[entry]
        if tokens % PAGE == 0:
            if not self.free():
                return None
            pages = [*pages, self.free()[0]]
            self.owners[pages[-1]] += 1
        self.requests[entry] = pages, tokens + 1
        return self.write(pages, tokens, tokens + 1)

    def rows(self, entries, chooser):
        """The rows of a decode step, with page lists as ``plan_decode`` would write them."""
        lens = [self.requests[e][1] for e in entries]
        exact = [r for r, length in enumerate(lens) if -(-length // PAGE) <= sum(BUDGET)]
        rows = make_rows(lens, chooser, BUDGET, exact=exact)
        rows.seats = torch.tensor(entries, dtype=torch.int32)
        for r, entry in enumerate(entries):
            pages = self.requests[entry][0]
            rows.block_table[r, : len(pages)] = torch.tensor(pages)
            for head in range(HEADS):
                attended = torch.arange(len(pages))
                if r not in exact:
                    middle = len(pages) - SINK - WINDOW
                    chosen, following = (
                        torch.randperm(middle, generator=self.random)[:SELECT].sort().values + SINK
                        for _ in range(2)
                    )
                    window = attended[-WINDOW:]
                    attended = torch.cat([attended[:SINK], chosen, window])
                    chooser.selection.chosen[entry, head, :SELECT] = following.int()
                units = torch.tensor(pages)[attended] * HEADS + head
                rows.lists[r * HEADS + head, : len(units)] = units.int()
        return rows


@pytest.mark.parametrize("slots", [LEAST_SLOTS, LEAST_SLOTS + 7, UNITS])
def test_random_life(home, slots):
    """Add, append, finish, share: both caches agree on every slot, and slots on home."""
    both, counts = caches(home, slots)
    random = torch.Generator().manual_seed(slots)
    engine = Engine(home, random)
    chooser = make_chooser(PAGES, REQUESTS, HEADS, 1, HEAD_SIZE, torch.float32, SELECT)
    seen = dict.fromkeys(("add", "remove", "append", "copy"), 0)
    for _ in range(2000):
        action = engine.integer(0, 20)
        if action == 0 and len(engine.requests) < REQUESTS and engine.free():
            seen["add"] += 1
            written = engine.add()
            for cache in both:
                cache.write(written)
        elif action == 1 and engine.requests:
            seen["remove"] += 1
            entry = engine.remove(sorted(engine.requests)[0])
            for cache in both:
                cache.release(entry)
        elif action == 2 and engine.free():
            seen["copy"] += 1
            page = engine.free()[0]
            home.units[page * HEADS : (page + 1) * HEADS].normal_(generator=random)
            for cache in both:
                cache.drop_pages([page])
        elif engine.requests:
            entries = [e for e in sorted(engine.requests) if engine.integer(0, 4)]
            written = {e: engine.append(e) for e in entries}
            entries = [e for e in entries if written[e] is not None]
            if not entries:
                continue
            seen["append"] += 1
            rows = engine.rows(entries, chooser)
            units = rows.lists
            tables = []
            for cache in both:
                for e in entries:
                    cache.write(written[e])
                own = replace(rows, lists=units.clone(), handle=None)
                cache.resolve(own)
                tables.append(own.lists)
                assert cache.check() == ""
                for slot, unit in zip(own.lists.flatten(), units.flatten(), strict=True):
                    assert unit < 0 or cache.slots[slot].equal(home.units[unit])
                cache.prefetch(own, chooser)
            assert tables[0].equal(tables[1])
        assert [cache.check() for cache in both] == ["", ""]
        assert both[0].resident() == both[1].resident()
        assert both[0].used == both[1].used == len(both[0].resident())
        assert counts[0].equal(counts[1])
    assert min(seen.values()) > 20, seen
    assert counts[0].min() > 0
    for entry in list(engine.requests):
        engine.remove(entry)
        both[0].release(entry)
    assert both[0].pinned == 0


def step(cache, lens, budget=BUDGET):
    """One step of requests that share no page."""
    chooser = make_chooser(PAGES, REQUESTS, HEADS, 1, HEAD_SIZE, torch.float32, SELECT)
    rows = make_rows(lens, chooser, budget)
    rows.seats = torch.arange(len(lens)).int()
    pages = 0
    for r, length in enumerate(lens):
        count = -(-length // PAGE)
        rows.block_table[r, :count] = torch.arange(pages, pages + count)
        pages += count
        for head in range(HEADS):
            rows.lists[r * HEADS + head, :count] = rows.block_table[r, :count] * HEADS + head
    cache.resolve(rows)
    return rows


def test_too_few_slots(home):
    for cache in caches(home, 2 * HEADS * sum(BUDGET) - 1)[0]:
        with pytest.raises(RuntimeError, match="fewer slots than one step attends to"):
            step(cache, [PAGE * sum(BUDGET)] * 2)


def test_a_pinned_page_is_not_given_up(home):
    for cache in caches(home, UNITS)[0]:
        rows = step(cache, [PAGE * sum(BUDGET)])
        tail = int(rows.block_table[0, sum(BUDGET) - 1])
        with pytest.raises(RuntimeError, match=f"page {tail} is given up while"):
            cache.write(torch.tensor([tail * PAGE]))
        cache.release(0)
        cache.write(torch.tensor([tail * PAGE]))
        assert tail * HEADS not in cache.resident()
        assert cache.check() == ""


def test_rows_that_do_not_fit_are_refused(home):
    """Before a slot is taken or pinned."""
    (cache, _), (counts, _) = caches(home, UNITS)
    rows = step(cache, [PAGE * 10])
    chooser = make_chooser(PAGES, REQUESTS, HEADS, 1, HEAD_SIZE, torch.float32, SELECT)
    before, pinned, counted = cache.resident(), cache.pinned, counts.clone()
    as_rows = lambda **values: replace(  # noqa: E731
        rows, handle=None, **{k: torch.tensor([v]).int() for k, v in values.items()}
    )
    for wrong, message in (
        (as_rows(seats=REQUESTS), f"row 0: seat {REQUESTS} is outside the state's {REQUESTS}"),
        (as_rows(sink=-1), "-1 pages of sink"),
        (as_rows(select=8), "are 11, 1 more than the 10 pages of the context"),
        (as_rows(seq_lens=PAGE * 10 + 1, select=-1), "are 11, 1 more than the 10 of block"),
        (replace(rows, handle=None, lists=rows.lists[:1]), "has 1 rows, .* need 2"),
    ):
        for call in (cache.resolve, lambda rows: cache.prefetch(rows, chooser)):
            with pytest.raises(ValueError, match=message):
                call(wrong)
    with pytest.raises(ValueError, match="select is 4, 1 more than the 3 that"):
        cache.prefetch(as_rows(select=SELECT + 1), chooser)
    few = make_chooser(PAGES, 1, HEADS, 1, HEAD_SIZE, torch.float32, SELECT)
    with pytest.raises(ValueError, match="seat 1 is outside the state's 1"):
        cache.prefetch(as_rows(seats=1), few)
    other = make_chooser(PAGES, REQUESTS, HEADS + 1, 1, HEAD_SIZE, torch.float32, SELECT)
    with pytest.raises(ValueError, match="the layer has 3 KV heads, its recall cache 2"):
        cache.prefetch(rows, other)
    with pytest.raises(ValueError, match=rf"slot_mapping\[1\] is {PAGES * PAGE}, the cache has"):
        cache.write(torch.tensor([-1, PAGES * PAGE]))
    assert (cache.resident(), cache.pinned, cache.check()) == (before, pinned, "")
    assert counts.equal(counted)


@pytest.mark.parametrize("ahead", [False, True])
def test_read_errors(home, ahead):
    """Pages that cannot be read are reported once, hold zeros, and are read again later."""
    (cache, _), _ = caches(home, UNITS)
    content = home.units.clone()
    step(cache, [PAGE * sum(BUDGET)])
    nothing, kept = os.open(os.devnull, os.O_RDONLY), os.dup(home.place[0])
    os.dup2(nothing, home.place[0])
    if ahead:
        chooser = make_chooser(PAGES, REQUESTS, HEADS, 1, HEAD_SIZE, torch.float32, SELECT)
        chooser.selection.chosen[:] = torch.arange(3, 3 + SELECT)
        rows = make_rows([PAGE * 10], chooser, BUDGET)
        rows.seats.zero_()
        rows.block_table[0] = torch.arange(20, 30)
        cache.prefetch(rows, chooser)
        cache.write(torch.tensor([-1]))  # waits
        failed = {23, 24, 25}
    else:
        rows = step(cache, [PAGE * (sum(BUDGET) + 2)], (SINK, WINDOW, SELECT + 2))
        assert not cache.slots[rows.lists[0, -1]].any()
        failed = {6, 7}
    assert set(cache.take_failed_pages()) == failed
    assert cache.take_failed_pages() == []
    os.dup2(kept, home.place[0])
    assert cache.check() == ""
    assert home.units.equal(content)
    step(cache, [PAGE * 10], (SINK, WINDOW, 7))
    assert cache.take_failed_pages() == []
    assert cache.check() == ""
