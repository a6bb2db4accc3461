"""The compiled recall cache against its specification, over thousands of random steps."""

import errno
import os
import tempfile
from dataclasses import replace

import pytest
import torch

from tests.spec import ops as reference
from tests.support.kernel_checks import make_chooser, make_rows
from tests.support.open_pages import OpenPages
from tests.support.recall_life import (
    BUDGET,
    HEAD_SIZE,
    HEADS,
    LEAST_SLOTS,
    PAGE,
    PAGES,
    REQUESTS,
    SELECT,
    SINK,
    UNITS,
    WINDOW,
    Engine,
    Home,
    caches,
    compare,
    full,
    listed,
    stage,
)
from vllm_kvretrieval.kernels import TokenLists, cpu
from vllm_kvretrieval.retrieval.codec import CODECS
from vllm_kvretrieval.tiers.encoded import EncodedHome

pytestmark = pytest.mark.threads


@pytest.fixture
def home():
    return Home()


@pytest.mark.parametrize(
    ("slots", "codec", "counts"),
    [
        (LEAST_SLOTS, None, None),
        (LEAST_SLOTS + 7, None, None),
        pytest.param(UNITS, None, None, marks=pytest.mark.slow),
        (LEAST_SLOTS, None, [[1, 5], [6, 0]]),
        (LEAST_SLOTS, "k8v4", None),
        (LEAST_SLOTS, "k2v2_sparse", None),
        (LEAST_SLOTS + 7, "raw", None),
    ],
)
def test_random_life(slots, codec, counts):
    """Add, append, finish, share: both caches agree on every slot, and slots on home."""
    home = Home() if codec is None else OpenPages(CODECS[codec])
    given = None if counts is None else torch.tensor(counts * (REQUESTS // 2)).int()
    both, counts = caches(home, slots)
    compiled, specified = both
    random = torch.Generator().manual_seed(slots)
    engine = Engine(home, random)
    most = SELECT if given is None else int(given.max())
    chooser = make_chooser(PAGES, REQUESTS, HEADS, 1, HEAD_SIZE, torch.float32, most)
    chooser.selection.counts = given
    seen = dict.fromkeys(("add", "remove", "append", "copy", "stream"), 0)
    for _ in range(600 if codec else 2000):
        action = engine.integer(0, 20)
        if action == 0 and len(engine.requests) < REQUESTS and engine.free():
            seen["add"] += 1
            written = engine.add()
            for cache in both:
                cache.write(written)
            if codec:
                stage(both, [-1, *written.unique_consecutive().div(PAGE, rounding_mode="floor")])
                specified.close(full(written))  # while what is open is there
                compiled.close(full(written))
        elif action == 1 and engine.requests:
            seen["remove"] += 1
            entry = sorted(engine.requests)[0]
            pages = engine.requests[entry][0]
            engine.remove(entry)
            for cache in both:
                cache.release(entry)
                if codec:
                    cache.abandon(pages)
        elif action == 2 and engine.free() and not codec:
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
            streams = engine.integer(0, 2)
            for cache in both:
                own = replace(rows, lists=units.clone(), lengths=rows.lengths.clone(), handle=None)
                late = TokenLists(
                    torch.full_like(units, -1), torch.zeros_like(own.lengths), PAGE, HEADS
                )
                if not streams:
                    cache.resolve(own)
                elif cache.stream(own, late):
                    seen["stream"] += 1
                else:
                    late.lengths.zero_()
                cache.prefetch(own, chooser)
                cache.wait()
                lists = listed(own.lengths, own.lists), listed(late.lengths, late.entries)
                for here, there, asked in zip(*lists, listed(rows.lengths, units), strict=True):
                    compare(cache, specified, here, there, asked)
                tables.append(lists)
                assert cache.check() == ""
            assert tables[0] == tables[1]
            if codec:
                if engine.integer(0, 4) == 0:
                    pages, length = engine.requests[entries[0]]
                    stage(both, [*pages[: -(-length // PAGE)], -1])
                filled = torch.cat([full(written[e]) for e in entries])
                specified.close(filled)
                compiled.close(filled)
        assert [cache.check() for cache in both] == ["", ""]
        assert both[0].resident() == both[1].resident()
        assert both[0].used == both[1].used == len(both[0].resident())
        assert counts[0].equal(counts[1])
    if codec:
        assert seen.pop("copy") == 0
    assert min(seen.values()) > (10 if codec else 20), seen
    assert counts[0].min() > 0
    for entry in list(engine.requests):
        pages = engine.requests[entry][0]
        engine.remove(entry)
        compiled.release(entry)
        if codec:
            compiled.abandon(pages)
    assert compiled.pinned == 0
    if codec:
        assert not home.units.any(), "memory has been given back"


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
            rows.lengths[r * HEADS + head] = length
    cache.resolve(rows)
    return rows


def test_too_few_slots(home):
    for cache in caches(home, 2 * HEADS * sum(BUDGET) - 1)[0]:
        step(cache, [PAGE * 2], (1, 1, 0))
        with pytest.raises(RuntimeError, match="fewer slots than one step attends to"):
            step(cache, [PAGE * sum(BUDGET)] * 2)
        assert cache.check() == "", "what was not read is not taken for read"
        step(cache, [PAGE * sum(BUDGET)])
        assert cache.check() == ""


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
        (as_rows(select=-1), "-1 pages to select"),
        (as_rows(seq_lens=PAGE * 10 + 1), "are 11, 1 more than the 10 of block"),
        (replace(rows, handle=None, lists=rows.lists[:1]), "has 1 rows, .* need 2"),
        (replace(rows, handle=None, lengths=rows.lengths[:1]), "1 lengths for 1 requests of 2 KV"),
    ):
        for call in (cache.resolve, lambda rows: cache.prefetch(rows, chooser)):
            with pytest.raises(ValueError, match=message):
                call(wrong)
    # Less than sink and window, ...
    for wrong in (-1, PAGE * 2, PAGE * 10 + 1, 2**31 - 1, -(2**31)):
        own = replace(rows, handle=None, lengths=torch.tensor([PAGE * 10, wrong]).int())
        with pytest.raises(ValueError, match=f"row 0: a list of {wrong} tokens, of which there is"):
            cache.resolve(own)
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
    assert [cache.take_error() for _ in range(2)] == [errno.EIO, 0]
    os.dup2(kept, home.place[0])
    assert cache.check() == ""
    assert home.units.equal(content)
    step(cache, [PAGE * 10], (SINK, WINDOW, 7))
    assert cache.take_failed_pages() == []
    assert cache.check() == ""


@pytest.fixture(params=["raw", "k8v4", "k4v4_sparse"])
def open_pages(request):
    return OpenPages(CODECS[request.param])


def write(cache, home, tokens):
    """The first tokens of the layer; what is full is encoded."""
    home.units[: -(-tokens // PAGE) * HEADS].normal_()
    cache.write(torch.arange(tokens))
    cache.close(torch.arange(tokens // PAGE))


def test_pages_that_are_not_open(open_pages):
    both, _ = caches(open_pages, UNITS)
    for cache in both:
        write(cache, open_pages, 3 * PAGE + 5)
        for tokens in ([2 * PAGE + 7], [5 * PAGE + 1]):
            with pytest.raises(RuntimeError, match="is written to, but not open"):
                cache.write(torch.tensor(tokens))
        for page in (2, 5):
            with pytest.raises(RuntimeError, match=f"page {page} is to be closed, but not open"):
                cache.close(torch.tensor([page]))
        cache.abandon([1, 3, 7])
        with pytest.raises(RuntimeError, match="is written to, but not open"):
            cache.write(torch.tensor([3 * PAGE + 5]))
        assert cache.check() == ""


def test_pages_and_buffers_that_do_not_fit_are_refused(home, open_pages):
    (cache, _), _ = caches(open_pages, UNITS)
    write(cache, open_pages, 3 * PAGE + 5)
    target = torch.zeros(2, HEADS, 2 * PAGE, 2 * HEAD_SIZE)
    for page in (PAGES, -1, 1 << 40):
        pages = torch.tensor([0, page])
        for call in (cache.close, lambda pages: cache.abandon(pages.tolist())):
            with pytest.raises(ValueError, match=rf"pages\[1\] is {page}, the home has {PAGES}"):
                call(pages)
    for page in (PAGES, -2):
        with pytest.raises(ValueError, match=rf"is {page}, the home has {PAGES}"):
            cache.stage(torch.tensor([0, page]), target)
    assert not target.any()
    wrong = [target.bfloat16(), target[:, :1], target[:, :, ::2], target[:1], target[..., :16]]
    for buffer in wrong:
        with pytest.raises(ValueError, match="pages are staged in blocks"):
            cache.stage(torch.arange(4), buffer)
    assert cache.check() == ""
    (raw, _), _ = caches(home, UNITS)
    for call in (lambda: raw.close(torch.tensor([0])), lambda: raw.abandon([0])):
        with pytest.raises(ValueError, match="the home is not encoded"):
            call()


def test_encoded_pages_that_cannot_be_written_or_read(open_pages):
    """They are reported once; a page that could not be written stays lost until it is new."""
    (cache, _), _ = caches(open_pages, UNITS)
    write(cache, open_pages, 10 * PAGE)
    nothing, kept = os.open(os.devnull, os.O_RDONLY), os.dup(open_pages.place[0])
    os.dup2(nothing, open_pages.place[0])
    rows = step(cache, [PAGE * sum(BUDGET)])
    assert not cache.slots[rows.lists[0, 0]].any()
    assert set(cache.take_failed_pages()) == set(range(sum(BUDGET)))
    target = torch.ones(1, HEADS, 2 * PAGE, 2 * HEAD_SIZE)
    cache.stage(torch.tensor([8, 9]), target)
    assert not target.any()
    assert set(cache.take_failed_pages()) == {8, 9}
    cache.write(torch.arange(20 * PAGE, 21 * PAGE))
    assert cache.take_error() == errno.EIO
    cache.close(torch.tensor([20]))
    assert cache.take_failed_pages() == [20]
    assert cache.take_error() == errno.EBADF
    os.dup2(kept, open_pages.place[0])
    assert cache.take_failed_pages() == []
    step(cache, [PAGE * sum(BUDGET)])
    cache.stage(torch.tensor([8, 9]), target)
    assert cache.take_failed_pages() == []
    assert target.any()
    cache.stage(torch.tensor([20, 20]), target)
    assert set(cache.take_failed_pages()) == {20}
    assert cache.take_error() == errno.ENODATA
    assert cache.check() == ""


def test_memory_is_taken_by_open_pages_only():
    """Whatever lies beside them in the system's pages, each of which holds four of ours here."""
    page, pages = 16, 60
    home = EncodedHome(tempfile.gettempdir(), 1, pages * 1024, pages * 1024)
    units = home.memory.view(torch.bfloat16).view(pages, 1, 2 * page, 16)
    counts = torch.zeros(1, 3, dtype=torch.int64)
    cache = cpu.RecallCache(units, 1, 1, counts, (home.fd, 0), CODECS["raw"])
    random = torch.Generator().manual_seed(3)
    opened: set[int] = set()
    for _ in range(1000):
        number = int(torch.randint(pages, (), generator=random))
        if number in opened:
            opened.remove(number)
            cache.close(torch.tensor([number]))
        else:
            opened.add(number)
            cache.write(torch.tensor([number * page]))
            units[number] = number + 1
        for kept in opened:
            assert units[kept].eq(kept + 1).all()
    cache.close(torch.tensor(sorted(opened)))
    assert not units.any()


def test_pages_of_an_earlier_run(open_pages):
    """Another cache adopts them, and reads what was encoded; its specification, too."""
    (first, _), _ = caches(open_pages, 8)
    pages = [3, 4, 9]
    tokens = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])
    for page in pages:
        open_pages.units[page * HEADS : (page + 1) * HEADS].normal_()
    first.write(tokens)
    assert not first.closed(pages)
    first.close(torch.tensor(pages))
    assert first.closed(pages)
    assert not first.closed([*pages, 5])
    expected = torch.zeros(3, HEADS, PAGE, 2 * HEAD_SIZE)
    first.stage(torch.tensor(pages), expected)
    counts = torch.zeros(REQUESTS, 3, dtype=torch.int64)
    codec, place = open_pages.codec, open_pages.place
    for later in (
        cpu.RecallCache(open_pages.units, 8, HEADS, counts, place, codec),
        reference.RecallCache(open_pages.units, 8, HEADS, counts, codec, place),
    ):
        assert not later.closed(pages)
        later.adopt(pages)
        assert later.closed(pages)
        found = torch.zeros_like(expected)
        later.stage(torch.tensor(pages), found)
        assert torch.equal(found, expected)
        later.write(torch.tensor([PAGE]))
        with pytest.raises(RuntimeError, match="is open, and is to be adopted"):
            later.adopt([1])
    with pytest.raises(ValueError, match="the home has"):
        first.adopt([PAGES])
