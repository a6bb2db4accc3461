"""The compiled recall of tokens against its specification, over thousands of random steps."""

from dataclasses import replace

import pytest
import torch

from tests.spec.tokens import TokenRecall as Reference
from tests.support.kernel_checks import make_chooser, make_rows
from vllm_kvretrieval.kernels import cpu

pytestmark = pytest.mark.threads

PAGES, HEADS, PAGE, WIDTH = 40, 3, 32, 32
REQUESTS, MOST_PAGES = 3, 12
SINK, WINDOW, SELECT = BUDGET = 4, 8, 20  # tokens
PAGE_BUDGET = 1, 1, 1


class Home:
    """Layers of rows."""

    def __init__(self, layers):
        shape = layers, PAGES, HEADS, PAGE, WIDTH
        self.layers = [*torch.randn(shape).to(torch.bfloat16)]


def recalls(home, capacity, shared):
    """The compiled one and its specification, over the same home."""
    counts = [torch.zeros(REQUESTS, 3, dtype=torch.int64) for _ in range(2)]
    memories = [
        [torch.zeros(REQUESTS, HEADS, capacity, WIDTH).to(layer.dtype) for layer in home.layers]
        for _ in range(2)
    ]
    ours = cpu.TokenRecall(home.layers, memories[0], counts[0], shared)
    return (ours, Reference(home.layers, memories[1], counts[1], shared)), memories, counts


def rows_of(tables, lens, seats, fresh, random, shared, by_page=False):
    """A decode step's rows, whose lists name random tokens, or pages, of each context."""
    budget = PAGE_BUDGET if by_page else BUDGET
    chooser = make_chooser(PAGES, REQUESTS, HEADS, 1, 16, torch.float32, sum(budget))
    rows = make_rows(lens, chooser, budget)
    rows.per_token = not by_page
    rows.lists = torch.full((len(lens) * HEADS, sum(BUDGET) + 4 * PAGE), -1, dtype=torch.int32)
    rows.seats = torch.tensor(seats, dtype=torch.int32)
    rows.fresh = torch.tensor(fresh, dtype=torch.uint8)
    rows.block_table = torch.zeros(len(lens), MOST_PAGES, dtype=torch.int32)
    for r, (table, length) in enumerate(zip(tables, lens, strict=True)):
        rows.block_table[r, : len(table)] = torch.tensor(table)
        sink, window, select = budget
        units = -(-length // PAGE) if by_page else length
        for head in range(HEADS):
            if head == 0 or not shared:
                middle = torch.randperm(units - sink - window, generator=random)[:select]
            chosen = [*range(sink), *sorted((middle + sink).tolist())]
            chosen += range(units - window, units)
            of_page = torch.tensor(table)[torch.tensor(chosen) // (1 if by_page else PAGE)]
            numbers = of_page * HEADS + head
            if not by_page:
                numbers = numbers * PAGE + torch.tensor(chosen) % PAGE
            rows.lists[r * HEADS + head, : len(numbers)] = numbers.int()
            rest = units * PAGE - length if by_page else 0  # of the tail page
            rows.lengths[r * HEADS + head] = len(numbers) * (PAGE if by_page else 1) - rest
    return rows


@pytest.mark.parametrize("shared", [False, True], ids=["per head", "shared"])
@pytest.mark.parametrize("capacity", [96, MOST_PAGES * PAGE])
def test_random_life(shared, capacity):
    """Requests come, decode, pause and go; both agree on lists, places and counts."""
    home = Home(3 if shared else 1)
    both, memories, counts = recalls(home, capacity, shared)
    random = torch.Generator().manual_seed(capacity)
    state: dict[int, tuple[list[int], int]] = {}  # by seat
    seen = dict.fromkeys(("new", "gone", "pages", "paused"), 0)
    integer = lambda low, high: int(torch.randint(low, high, (), generator=random))  # noqa: E731
    paused: set[int] = set()
    for _ in range(150):
        seat = integer(0, REQUESTS)
        if seat not in state:
            free = sorted(set(range(PAGES)) - {p for table, _ in state.values() for p in table})
            order = torch.randperm(len(free), generator=random)[:MOST_PAGES]
            table = [free[i] for i in order.tolist()]
            for layer in home.layers:
                layer[table] = torch.randn(layer[table].shape, generator=random).to(layer.dtype)
            state[seat] = table, integer(5 * PAGE, (MOST_PAGES - 2) * PAGE)
            paused.add(seat)
            seen["new"] += 1
        elif integer(0, 12) == 0 or state[seat][1] == MOST_PAGES * PAGE:
            del state[seat]
            for recall in both:
                recall.release(seat)
            seen["gone"] += 1
        elif integer(0, 12) == 0:
            paused.add(seat)
            seen["paused"] += 1
        room = [s for s, (_, length) in state.items() if length < MOST_PAGES * PAGE]
        stepping = [s for s in room if s == seat or integer(0, 4)]
        if not stepping:
            continue
        lens = []
        for s in stepping:
            table, length = state[s]
            state[s] = table, length + 1
            lens.append(length + 1)
            page, offset = table[length // PAGE], length % PAGE
            for layer in home.layers:
                layer[page, :, offset] = torch.randn(HEADS, WIDTH, generator=random).to(layer.dtype)
        fresh = [int(s in paused) for s in stepping]
        paused |= state.keys() - set(stepping)
        paused -= set(stepping)
        by_page = integer(0, 4) == 0
        seen["pages"] += by_page
        rows = rows_of(
            [state[s][0] for s in stepping], lens, stepping, fresh, random, shared, by_page
        )
        named = rows.lists.clone()
        lists = []
        for recall in both:
            own = replace(rows, lists=named.clone(), handle=None)
            recall.recall(own)
            for layer in range(len(home.layers)):
                recall.wait(layer)
            lists.append(own.lists)
        assert both[0].check() == ""
        assert lists[0].equal(lists[1])
        assert counts[0].equal(counts[1])
        assert both[0].used == both[1].used
        for ours, theirs, layer in zip(*memories, home.layers, strict=True):
            assert ours.equal(theirs)
            if not by_page:
                there = ours.flatten(0, 2)[lists[0][named >= 0].long()]
                assert there.equal(layer.flatten(0, 2)[named[named >= 0].long()])
    assert min(seen.values()) > 3, seen
    assert both[1].check() == ""
    attended, missed, recalled = counts[0].sum(0).tolist()
    assert 0 < missed == recalled < attended
    for seat in range(REQUESTS):
        both[0].release(seat)
    assert both[0].used == 0


def step(recall, lens=(300,), **changed):
    """One step of requests that share no page; some of its tensors are replaced."""
    tables = [list(range(12 * r, 12 * r + 12)) for r in range(len(lens))]
    random = torch.Generator().manual_seed(0)
    seats = list(range(len(lens)))
    rows = rows_of(tables, list(lens), seats, [1] * len(lens), random, shared=False)
    for key, value in changed.items():
        setattr(rows, key, torch.as_tensor(value).to(getattr(rows, key).dtype))
    recall.recall(rows)
    recall.wait(0)
    return rows


def test_rows_that_do_not_fit_are_refused():
    """Before anything has happened."""
    home = Home(1)
    (recall, _), _, (counts, _) = recalls(home, 64, shared=False)
    step(recall)
    before = counts.clone(), recall.used
    random = torch.Generator().manual_seed(0)
    lists = rows_of([list(range(12))], [300], [0], [1], random, shared=False).lists
    twice, other, beyond, nothing = (lists.clone() for _ in range(4))
    twice[0, 1] = twice[0, 0]
    other[1, 0] -= PAGE  # of another head
    beyond[0, 31] = (9 * HEADS) * PAGE + 12  # position 300
    nothing[2, 3] = -1
    for changed, message in (
        ({"seats": [REQUESTS]}, f"seat {REQUESTS} is outside"),
        (
            {"mode": [2], "sink": [0], "window": [0], "seq_lens": [150]},
            "attends to the whole context, which is not recalled",
        ),
        ({"lists": twice}, "entry 1 of KV head 0 is .* or out of order"),
        ({"lists": other}, "entry 0 of KV head 1 is 0, nothing in its context"),
        ({"lists": beyond}, "entry 31 of KV head 0 is 876, nothing in its context"),
        ({"lists": nothing}, "entry 3 of KV head 2 is -1, nothing in its context"),
        ({"lists": torch.full_like(lists, 2**31 - 1)}, "entry 0 of KV head 0 is 2147483647"),
        ({"block_table": torch.full((1, 12), -5)}, "entry 0 of KV head 0"),
        ({"seq_lens": [31]}, "are 32, 1 more than the 31 tokens of the context"),
    ):
        with pytest.raises(ValueError, match=message):
            step(recall, **changed)
    with pytest.raises(ValueError, match="row 1: another one has its seat"):
        step(recall, (300, 300), seats=[1, 1])
    (narrow, _), _, _ = recalls(home, 16, shared=False)
    with pytest.raises(ValueError, match="attends to 32 tokens, there is room for 16"):
        step(narrow)
    with pytest.raises(ValueError, match="layer 1 of 1"):
        recall.wait(1)
    assert (counts.equal(before[0]), recall.used) == (True, before[1])
    assert recall.check() == ""


def test_layers_that_differ_are_refused():
    home = Home(2)
    slots = torch.zeros(REQUESTS, HEADS, 64, WIDTH, dtype=torch.bfloat16)
    counts = torch.zeros(REQUESTS, 3, dtype=torch.int64)
    for memories, message in (
        ([slots, slots[:2]], "must be alike"),
        ([slots, slots.float()], "must be alike"),
        ([slots[:, :2].contiguous()] * 2, "do not fit a home of 3 KV heads"),
        ([slots.transpose(2, 3)] * 2, "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.TokenRecall(home.layers, memories, counts, shared=True)
    huge = torch.empty(REQUESTS, HEADS, 2**28, WIDTH, dtype=slots.dtype, device="meta")
    with pytest.raises(ValueError, match="more than 31 bits number"):
        cpu.TokenRecall(home.layers, [huge, huge], counts, shared=True)
