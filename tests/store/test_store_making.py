"""The worker's half of a store: how it is made beside others, and what happens if it fails."""

import errno
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.store.test_store_worker import GEOMETRY, IDENTITY, commit, home_store, reader, record
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk.store import UNFINISHED
from vllm_kvretrieval.store.serving import halves, worker
from vllm_kvretrieval.store.serving.halves import StoreStep
from vllm_kvretrieval.store.serving.worker import WorkerStore

MAKE = """
import sys, time
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.store import UNFINISHED
from vllm_kvretrieval.store.disk.store import LOCK, take_locks
root = Folder.at(sys.argv[1])
locks = take_locks(root, [LOCK])
made = root.folder(UNFINISHED + "1", make=True)
with open(made.make("pages"), "wb", buffering=0) as file:
    print("makes", flush=True)
    for _ in range(int(sys.argv[2])):
        file.write(bytes(100))
        time.sleep(0.1)
    sys.stdin.read()
"""


def maker(tmp_path, steps):
    """A process that makes another store, and writes zeros so often."""
    command = [sys.executable, "-c", MAKE, str(tmp_path / "store"), str(steps)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"makes\n"
    return process


def test_another_worker_is_waited_for_as_long_as_it_gets_on(tmp_path, monkeypatch):
    """Where zeros are written, that may take minutes."""
    monkeypatch.setattr(worker, "WAIT_S", 1.0)
    home = WorkerStore(str(tmp_path / "store"), IDENTITY)
    process = maker(tmp_path, 30)
    end = threading.Timer(2.5, lambda: process.communicate())
    end.start()
    home.make(GEOMETRY)
    end.join()
    process = maker(tmp_path, 0)
    other = WorkerStore(str(tmp_path / "store"), {"model": "other"})
    with pytest.raises(RetrievalConfigError, match=f"in use by process {process.pid};"):
        other.make(GEOMETRY)
    process.communicate()


def test_what_was_left_unfinished_takes_no_room(tmp_path):
    """It is removed before anybody looks how much there is; not what is being made."""
    WorkerStore(str(tmp_path / "store"), IDENTITY)
    process = maker(tmp_path, 0)
    left = tmp_path / "store" / f"{UNFINISHED}1"
    WorkerStore(str(tmp_path / "store"), IDENTITY)
    assert left.exists()
    process.kill()
    process.communicate()
    WorkerStore(str(tmp_path / "store"), IDENTITY)
    assert not left.exists()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_no_store_does_not_matter(tmp_path, kind):
    home = WorkerStore(str(tmp_path / "store"), IDENTITY)
    stray = tmp_path / "store" / f"{UNFINISHED}1"
    if kind == "file":
        stray.write_text("")
    else:
        stray.mkdir()
    home.make(GEOMETRY)
    assert stray.exists() == (kind == "file")


def test_records_that_cannot_be_written(tmp_path, monkeypatch):
    """The log says so once, and once that it is over."""
    home, _ = home_store(tmp_path)
    commit(home, 1, 2)
    lines: list[str] = []
    log = SimpleNamespace(
        error=lambda text, *values: lines.append(f"error: {text % values}"),
        info=lambda text, *values: lines.append(f"info: {text % values}"),
    )
    monkeypatch.setattr(halves, "logger", log)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        for blocks in ([1], [], [2]):
            home.begin_step(StoreStep(void=blocks))
    assert [line[:5] for line in lines] == ["error"]
    home.begin_step(StoreStep())
    assert len(lines) == 1
    for _ in range(2):
        home.begin_step(StoreStep(void=[1]))
    assert [line[:5] for line in lines] == ["error", "info:"]
    assert reader(tmp_path, home).records().keys() == {2}


def test_whatever_goes_wrong_in_writing_is_no_end(tmp_path, monkeypatch):
    """A block that cannot be stored is not stored."""
    home, _ = home_store(tmp_path)

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(home._store, "commit", fail)
        commit(home, 1)
    commit(home, 2)
    assert reader(tmp_path, home).records().keys() == {2}
    assert home.take_counts()["store_blocks_written"] == 1


def test_a_thread_that_cannot_be_started(tmp_path, monkeypatch):
    """The start says so, not the first step that writes a block."""

    def fail(thread):
        raise RuntimeError("can't start new thread")

    home = WorkerStore(str(tmp_path / "store"), IDENTITY)
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RetrievalConfigError, match=r"threads cannot be started .* \(ulimit -u\)"):
        home.make(GEOMETRY)


def test_a_thread_that_may_not_run_on_other_cores(tmp_path, monkeypatch):
    """It runs where it may."""

    def fail(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "sched_setaffinity", fail)
    home, _ = home_store(tmp_path)
    commit(home, 1)
    assert reader(tmp_path, home).records().keys() == {1}
    assert record(1).key == reader(tmp_path, home).records()[1].key
