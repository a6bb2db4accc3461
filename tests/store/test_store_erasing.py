"""What is dropped is unreadable in the files of a store; other blocks and the space stay."""

import ctypes
import errno
import os
import random
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from benchmarks.stepper import BLOCK
from tests.support.store_life import GEOMETRY, Life, prompt, stepper
from tests.support.store_model import block_bytes, contents, new_store, write
from vllm_kvretrieval.store.disk import files
from vllm_kvretrieval.store.disk.changes import change
from vllm_kvretrieval.store.disk.contexts import NO_PARENT
from vllm_kvretrieval.store.disk.inbox import DROP
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.store.disk.store import PAGES, SIDE, Geometry

LARGE = Geometry(blocks=8, layers=2, layer_block_bytes=40_000, side_bytes=5_000)
ZEROS = bytes(GEOMETRY.block_bytes)


@pytest.fixture(params=["at once", "slowly"])
def way(request, monkeypatch):
    """How a file system erases."""
    if request.param == "slowly":
        monkeypatch.setattr(files, "_zero_at_once", lambda *_: False)
    return request.param


def test_what_is_erased(tmp_path, way):
    """Nothing beside it, and no space is given up."""
    store = new_store(tmp_path / "store", LARGE)
    for name, size in LARGE.files.items():
        os.posix_fallocate(store._fds[name], 0, size)
    data = [random.Random(block).randbytes(block_bytes(LARGE)) for block in range(LARGE.blocks)]
    for block in range(LARGE.blocks):
        write(store, block, data[block])
    space = {name: os.fstat(store._fds[name]).st_blocks for name in (PAGES, SIDE)}
    store.erase([6, 1, 2, 3])
    for block in range(LARGE.blocks):
        expected = bytes(len(data[block])) if block in (1, 2, 3, 6) else data[block]
        assert contents(store, block) == expected
    assert {name: os.fstat(store._fds[name]).st_blocks for name in (PAGES, SIDE)} == space
    store.erase([0], slowly=False)
    assert (contents(store, 0) == data[0]) == (way == "slowly")
    store.close()


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.ENOSPC, errno.EIO])
def test_a_file_system_that_cannot_erase_at_once(tmp_path, monkeypatch, error):
    """Or has no space to note it: zeros are written. Other errors are told."""

    def fallocate(*_):
        ctypes.set_errno(error)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate=fallocate))
    store = new_store(tmp_path / "store")
    write(store, 3, data := b"?" * block_bytes(store.geometry))
    told = pytest.raises(OSError, match="Input/output error")
    with told if error == errno.EIO else nullcontext():
        store.erase([3])
    assert (contents(store, 3) == data) == (error == errno.EIO)
    store.close()


def test_a_dropped_context_is_erased(tmp_path, way):
    """Its copies, too, but nothing that others share; when no server uses the store."""
    store = new_store(tmp_path / "store", GEOMETRY, {"block_size": BLOCK})
    texts = ["a", "ab", "abc", "abd", "abd"]
    for block, text in enumerate(texts):
        write(store, block, random.Random(block).randbytes(len(ZEROS)))
        parent = text[:-1].encode().ljust(32) if text[:-1] else NO_PARENT
        store.commit(block, Record(text.encode().ljust(32), parent, len(text) - 1, 0, 0))
    change(str(tmp_path / "store"), b"abd".ljust(32).hex(), DROP)
    assert [contents(store, block) == ZEROS for block in range(5)] == [False] * 3 + [True] * 2
    assert all(store.intact(block, record) for block, record in store.records().items())
    store.close()


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


def written(life):
    """Blocks whose contents are in the files."""
    return {block for block in range(GEOMETRY.blocks) if contents(life.store, block) != ZEROS}


def recorded(life):
    return {*life.store.records()}


def watch(life):
    """Have each step find the bytes of what its requests hold; those blocks without a hash."""
    compute, manager = life.stepper.look, life.scheduler.kv_cache_manager
    seen = []

    def look(output):
        compute(output)
        there = written(life)
        for name in output.num_scheduled_tokens:
            for block in manager.get_blocks(name).blocks[0]:
                assert block.block_id in there
                seen.extend([block] if block.block_hash is None else [])

    life.stepper.look = look
    return seen


def running(life, tokens):
    """A request that has begun to answer; its key of the last full block of the prompt."""
    name = life.stepper.add(tokens, 3 * BLOCK)
    keys = [*life.scheduler.requests[name].block_hashes]
    while len(life.stepper.outputs[name]) < 2:
        life.stepper.step()
    return keys[-1]


def test_a_server_erases_what_it_drops(directory, way):
    """With the tokens that have filled no block; not what a request still reads."""
    life = Life(directory, stepper(directory))
    life.stepper.ask(prompt(1), 2)
    life.stepper.ask(prompt(2, 1), 2)
    life.settle()
    assert written(life) == recorded(life)
    seen = watch(life)
    life.change(DROP, running(life, prompt(1)))
    life.stepper.ask(prompt(3), 2)
    assert len(seen) > 100
    life.settle()
    assert len(recorded(life)) == 1 + 8
    assert written(life) == recorded(life)
    life.end()


@pytest.mark.parametrize("how", ["reset", "preempted"])
def test_what_a_request_leaves_that_begins_anew(directory, how):
    life = Life(directory, stepper(directory))
    running(life, prompt(1))
    if how == "reset":
        assert life.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        (request,) = life.scheduler.running
        life.scheduler.running.remove(request)
        life.scheduler._preempt_request(request, time.monotonic())
    watch(life)
    life.stepper.run()
    life.settle()
    assert len(recorded(life)) == 8 + 3
    assert written(life) == recorded(life)
    life.end()


def drop_and_stop(directory):
    """A server with a request that was running when its document was dropped."""
    life = Life(directory, stepper(directory))
    life.change(DROP, running(life, prompt(1)))
    name = life.stepper.add(prompt(2), 2)
    while name in life.scheduler.requests:
        life.stepper.step()
    life.settle()
    assert len(written(life)) >= 8 + len(recorded(life))
    assert len(recorded(life)) == 8
    return life


def test_a_server_that_ends_erases_what_is_left(directory, way):
    """Also of a request that it has not ended."""
    life = drop_and_stop(directory)
    life.end()
    assert written(life) == recorded(life)
    assert len(recorded(life)) == 8


def test_a_server_that_was_killed_has_left_nothing(directory, way, monkeypatch):
    """If the file system can erase at once: otherwise a start would write zeros for long."""
    life = drop_and_stop(directory)
    left = written(life)
    with monkeypatch.context() as patch:
        patch.setattr(life.scheduler._store._store, "erase", lambda blocks: None)
        life.end()
    assert written(life) == left
    life = Life(directory, stepper(directory))
    assert written(life) == (recorded(life) if way == "at once" else left)
    assert life.stepper.ask(prompt(2), 2)[1] == 8 * BLOCK
    life.end()
