"""Calls that wait for reads, or take long, let other threads run Python meanwhile."""

import sys
import tempfile
import threading
import time

import pytest
import torch

from tests.support.kernel_checks import make_chooser, make_rows
from vllm_kvretrieval.kernels import Mode, TokenLists, cpu
from vllm_kvretrieval.retrieval.codec import CODECS
from vllm_kvretrieval.storage.encoded import EncodedHome

pytestmark = pytest.mark.threads

PAGES, PAGE, SIZE = 96, 128, 256
WIDTH = 2 * PAGE * SIZE  # of a page, in float32
TRIES = 20
"""Reads may have ended before a call that would wait for them."""


@pytest.fixture
def runs_beside():
    """Whether another thread runs during a call, which has the interpreter unless the call lets it
    go: nobody else makes it do so."""
    interval, turns, over = sys.getswitchinterval(), [0], threading.Event()
    ready = threading.Event()

    def run():
        while not over.is_set():
            turns[0] += 1
            ready.set()
            time.sleep(1e-4)

    def check(call, *arguments):
        before = turns[0]
        call(*arguments)
        return turns[0] > before

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    sys.setswitchinterval(1000)
    yield check
    sys.setswitchinterval(interval)
    over.set()
    thread.join()


def all_of_a_context():
    """A row that attends to all pages."""
    chooser = make_chooser(PAGES, 1, 1, 1, 16, torch.float32, page_size=PAGE)
    rows = make_rows([PAGES * PAGE], chooser, (1, 1, 1))
    rows.mode[:] = Mode.WHOLE
    rows.sink[:] = rows.window[:] = rows.select[:] = 0
    rows.lists[0, :PAGES] = torch.arange(PAGES)
    rows.lengths[:] = PAGES * PAGE
    return rows


@pytest.fixture(scope="module")
def cache():
    """A recall cache whose home is in a file, 96 MiB of it."""
    home = EncodedHome(tempfile.gettempdir(), 1, 4 * PAGES * WIDTH, 4 * PAGES * WIDTH)
    units = home.memory.view(torch.float32).view(PAGES, 1, 2 * PAGE, SIZE)
    counts = torch.zeros(1, 3, dtype=torch.int64)
    cache = cpu.RecallCache(units, PAGES, 1, counts, (home.fd, 0), CODECS["raw"])
    units.normal_()
    cache.write(torch.arange(PAGES * PAGE))
    cache.close(torch.arange(PAGES))
    return cache


@pytest.mark.parametrize("name", ["drop_pages", "adopt", "abandon", "check"])
def test_a_recall_cache(cache, runs_beside, name):
    def once():
        cache.drop_pages([*range(PAGES)])
        rows = all_of_a_context()
        found, late = (TokenLists.empty(rows, PAGE, 1) for _ in range(2))
        assert cache.stream(rows, found, late)
        return runs_beside(getattr(cache, name), *([] if name == "check" else [[0]]))

    assert any(once() for _ in range(TRIES))


@pytest.mark.parametrize("name", ["release", "check"])
def test_recall_of_tokens(runs_beside, name):
    layers = [torch.randn(PAGES, 1, PAGE, 2 * SIZE) for _ in range(2)]
    memory = [torch.zeros(1, 1, PAGES * PAGE, 2 * SIZE) for _ in layers]
    recall = cpu.TokenRecall(layers, memory, torch.zeros(1, 3, dtype=torch.int64), False)
    rows = all_of_a_context()
    rows.mode[:] = Mode.SELECT
    rows.sink[:] = rows.window[:] = 1
    rows.select[:] = PAGES - 2
    rows.fresh[:] = 1
    rows.block_table = torch.arange(PAGES, dtype=torch.int32)[None]
    rows.lists = torch.nn.functional.pad(rows.lists, (0, PAGES * PAGE))

    def once():
        recall.recall(rows, TokenLists.empty(rows, 1, 1))
        return runs_beside(getattr(recall, name), *([] if name == "check" else [0]))

    assert any(once() for _ in range(TRIES))
