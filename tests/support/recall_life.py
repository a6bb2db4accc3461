"""Homes of a layer for tests of recall caches, and requests that come, grow, share and end."""

import mmap
import tempfile

import torch

from tests.spec import ops as reference
from tests.support.kernel_checks import make_rows
from vllm_kvretrieval.kernels import cpu

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


def caches(home, slots):
    """The compiled cache and its specification, over the same home."""
    counts = [torch.zeros(REQUESTS, 3, dtype=torch.int64) for _ in range(2)]
    codec = getattr(home, "codec", None)
    return [
        cpu.RecallCache(home.units, slots, HEADS, counts[0], home.place, codec),
        reference.RecallCache(home.units, slots, HEADS, counts[1], codec),
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
        """Append a token. Returns the slot mapping, or None if no page is free."""
        pages, tokens = self.requests[entry]
        if tokens % PAGE == 0:
            if not self.free():
                return None
            pages = [*pages, self.free()[0]]
            self.owners[pages[-1]] += 1
        self.requests[entry] = pages, tokens + 1
        return self.write(pages, tokens, tokens + 1)

    def rows(self, entries, chooser):
        """The rows of a decode step, with page lists as ``plan_decode`` would write them.

        Where the chooser has counts, as many pages as these say.
        """
        counts = chooser.selection.counts
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
                    select = SELECT if counts is None else min(int(counts[entry, head]), middle)
                    chosen, following = (
                        torch.randperm(middle, generator=self.random)[:select].sort().values + SINK
                        for _ in range(2)
                    )
                    window = attended[-WINDOW:]
                    attended = torch.cat([attended[:SINK], chosen, window])
                    chooser.selection.chosen[entry, head, :select] = following.int()
                units = torch.tensor(pages)[attended] * HEADS + head
                rows.lists[r * HEADS + head, : len(units)] = units.int()
                rows.lengths[r * HEADS + head] = len(units) * PAGE - (-lens[r] % PAGE)
        return rows


def full(written):
    """The pages that these tokens fill."""
    return written[written % PAGE == PAGE - 1] // PAGE


def listed(lengths, entries):
    """The entries of each list, and how many tokens they have."""
    pairs = zip(entries, lengths.tolist(), strict=True)
    return [(entry[: -(-length // PAGE)].tolist(), length) for entry, length in pairs]


def compare(cache, specified, here, late, asked):
    """The units that were asked for are in slots, in their order, here or late."""
    (here, tokens), (late, more), (units, length) = map(list, (here, late, asked))
    here, late, source = list(here), list(late), []
    for unit in units:
        content = specified.content(unit)
        source = here if here and cache.slots[here[0]].equal(content) else late
        assert cache.slots[source.pop(0)].equal(content)
    assert here == late == []
    last, other = (tokens, more) if source is here else (more, tokens)
    assert last + other == length
    assert other % PAGE == 0, "the page that may be partly filled is the last one"


def stage(both, pages):
    """Both lay out the same."""
    pages = torch.tensor([int(page) for page in pages])
    blocks = len(pages) // 2
    found = [torch.full((blocks, HEADS, 2 * PAGE, 2 * HEAD_SIZE), 7.0) for _ in both]
    for cache, target in zip(both, found, strict=True):
        cache.stage(pages[: 2 * blocks], target)
    assert found[0].equal(found[1])
