"""The scheduler's half of a store on a disk that fails, and where there are no threads."""

import errno
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import store_start
from benchmarks.stepper import BLOCK
from tests.support.store_life import BLOCKS, Life, prompt, stepper
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.exactness_levels import BlockLevels
from vllm_kvretrieval.store.disk.files import PIECE
from vllm_kvretrieval.store.disk.inbox import PIN, UNPIN
from vllm_kvretrieval.store.disk.records import RECORD_BYTES
from vllm_kvretrieval.store.disk.store import RECORDS, USED, name_of
from vllm_kvretrieval.store.serving import halves
from vllm_kvretrieval.store.serving.blocks import Blocks
from vllm_kvretrieval.store.serving.halves import started
from vllm_kvretrieval.store.serving.scheduler import Arrivals, SchedulerStore


def small_store(directory, blocks=600):
    store_start.fill(directory, blocks)
    path = directory / name_of(store_start.IDENTITY)

    def opened() -> Any:
        pool = store_start.pool_for(blocks)
        known = Blocks([pool], [1])
        return SchedulerStore(str(directory), path.name, known, BlockLevels(), Arrivals())

    return path, opened


@pytest.fixture
def logged(monkeypatch):
    lines: list[str] = []
    log = SimpleNamespace(
        error=lambda text, *values: lines.append("error: " + text % values),
        info=lambda text, *values: lines.append("info: " + text % values),
    )
    monkeypatch.setattr(halves, "logger", log)
    return lines


def test_a_file_that_is_cut_off_while_it_is_open(tmp_path):
    """Of a file in memory a signal would tell, which ends the process."""
    path, opened = small_store(tmp_path / "store")
    child = os.fork()
    if not child:
        stored = opened()
        os.truncate(path / USED, 0)
        stored.finish(SimpleNamespace(request_id="1"), [[3, 550]])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_an_order_of_use_that_cannot_be_written(tmp_path, monkeypatch, logged):
    """It is said once, and once that it is over; memory has the order."""
    _, opened = small_store(tmp_path / "store")
    stored, request = opened(), SimpleNamespace(request_id="1")

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        for blocks in ([3, 550], [7], []):
            stored.finish(request, [blocks])
    assert [line[:10] for line in logged] == ["error: sto"]
    used = stored._store.used.copy()
    assert used[550] < used[3] < used[7] == used.max()
    stored.finish(request, [[9]])
    stored.finish(request, [[5]])
    assert [line[:5] for line in logged] == ["error", "info:"]
    stored.close()
    later = opened()
    assert later._store.used[5] == later._store.used.max()
    later.close()


def test_pieces_that_cannot_be_read(tmp_path, monkeypatch):
    """Their blocks were used longest ago, or are not there; the start goes on."""
    path, opened = small_store(tmp_path / "store")
    bad = {(path / name).stat().st_ino for name in (USED, RECORDS)}
    preadv = os.preadv

    def fail(fd, buffers, offset):
        size = sum(len(buffer) for buffer in buffers)
        if os.fstat(fd).st_ino in bad and offset < 2 * PIECE and offset + size > PIECE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    stored = opened()
    lost = range(PIECE // RECORD_BYTES, 2 * PIECE // RECORD_BYTES)
    assert {*range(1, 601)} - stored._stored.keys() == {*lost}
    assert not stored._store.used[512:].any()
    assert stored._store.used[:512].any()
    stored.close()


def test_a_damaged_number_of_use(tmp_path):
    path, opened = small_store(tmp_path / "store")
    with (path / USED).open("r+b") as file:
        file.write(b"\xff" * 8)
    stored = opened()
    stored.finish(SimpleNamespace(request_id="1"), [[3]])
    assert stored._store.used[3] == stored._store.used.max() == 600
    stored.close()


@pytest.mark.model
def test_a_reset_that_fails_lets_pins_be(tmp_path, monkeypatch):
    """They are held as often as before: what is let go of twice, two requests could get."""
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    name = life.stepper.add(prompt(1), 2)
    key = life.scheduler.requests[name].block_hashes[7]
    life.stepper.run()
    life.change(PIN, key)
    life.stepper.ask(prompt(2), 2)
    pool = life.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == BLOCKS - 1 - 8
    with monkeypatch.context() as patch:
        patch.setattr(life.scheduler.kv_cache_manager, "reset_prefix_cache", lambda: False)
        with pytest.raises(RuntimeError, match="Failed to reset"):
            life.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert pool.get_num_free_blocks() == BLOCKS - 1 - 8
    life.change(UNPIN, key)
    life.stepper.ask(prompt(2), 2)
    assert pool.get_num_free_blocks() == BLOCKS - 1
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
    life.end()


@pytest.mark.model
def test_a_check_that_fails(tmp_path, monkeypatch):
    """As for want of memory: the block counts as damaged, and the engine goes on."""
    directory = tmp_path / "store"
    life = Life(directory, stepper(directory))
    life.stepper.ask(prompt(1), 2)
    life.end()
    life = Life(directory, stepper(directory))

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(life.scheduler._store._store, "intact", fail)
        assert life.stepper.ask(prompt(1), 2)[1] == 0
    assert life.stepper.ask(prompt(1), 2)[1] == 8 * BLOCK
    life.end()


@pytest.mark.parametrize("most", [0, 1])
def test_threads_that_cannot_be_started(monkeypatch, most):
    """It is found out at the start, not in a step."""
    start, count = threading.Thread.start, 0

    def fail(thread):
        nonlocal count
        count += thread.name.startswith("few")
        if count > most:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RetrievalConfigError, match=r"threads cannot .* \(ulimit -u\)"):
            started(2, "few")
    threads = started(2, "enough")
    names = {thread.name for thread in threading.enumerate()}
    assert {"enough_0", "enough_1"} <= names
    assert not any(name.startswith("few") for name in names)
    threads.shutdown()
