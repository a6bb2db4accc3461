"""The store by itself: records, sums, crashes, failing disks, and strangers."""

import errno
import os
import random
import shutil
import subprocess
import sys
from contextlib import closing

import pytest

from tests.support.store_model import (
    DIVIDED,
    GEOMETRY,
    IDENTITY,
    Crash,
    FailingDisk,
    Model,
    again,
    block_bytes,
    contents,
    new_store,
    truncate,
    write,
)
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk.contexts import NO_PARENT
from vllm_kvretrieval.store.disk.files import Folder, Lock
from vllm_kvretrieval.store.disk.ranks import Ranks
from vllm_kvretrieval.store.disk.records import RECORD_BYTES, Record
from vllm_kvretrieval.store.disk.store import (
    PAGES,
    PREFIX,
    RECORDS,
    UNFINISHED,
    USED,
    Store,
    WorkerShare,
    make_store,
    name_of,
    open_store,
    remove_unfinished,
)

STEPS = 100_000
SECTOR = 512


@pytest.fixture
def store(tmp_path):
    return new_store(tmp_path / "store")


@pytest.mark.parametrize("geometry", [GEOMETRY, DIVIDED], ids=["alike", "divided"])
def test_a_trivial_model(tmp_path, geometry):
    """Random steps of an engine: what was committed is found, and nothing else."""
    store, chance = new_store(tmp_path / "store", geometry), random.Random(0)
    model = Model(chance)
    for step in range(STEPS):
        block = chance.randrange(GEOMETRY.blocks)
        what = chance.random()
        if what < 0.5:
            model.fill(store, block)
        elif what < 0.7:  # overwritten, and the server ended before the record was written
            write(store, block, chance.randbytes(block_bytes(geometry, block)))
            model.live.pop(block, None)
        elif what < 0.9:
            store.void([block])
            model.live.pop(block, None)
        elif what < 0.95:
            store.note_use([block], step)
        elif what < 0.96:
            used = store.used.copy()
            store = again(store)
            assert (store.used == used).all()
        elif what < 0.98:
            model.check(store)
    model.check(again(store))


@pytest.mark.parametrize("rounds", [100, pytest.param(20_000, marks=pytest.mark.slow)])
def test_crashes_at_every_write(tmp_path, monkeypatch, rounds):
    """The process ends within any one of its writes, of which a part is done."""
    disk = FailingDisk(monkeypatch)
    disk.error = "crash"
    chance = random.Random(1)
    store = new_store(tmp_path / "store")
    model = Model(chance)
    for block in range(GEOMETRY.blocks):
        model.fill(store, block)
    for _ in range(rounds):
        for writes in range(GEOMETRY.layers + 2):
            disk.part = chance.random()
            block = chance.randrange(GEOMETRY.blocks)
            disk.left = writes
            with pytest.raises(Crash):
                model.fill(store, block)
            store = again(store)
            # If not a byte of it was written, the block still has what it had before.
            offered = {b for b, record in store.records().items() if store.intact(b, record)}
            assert offered - {block} == model.live.keys()
            model.check(store, complete=False)
            model.fill(store, block)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, "short"])
def test_failing_writes(store, monkeypatch, error):
    """An error loses the block; a short write is completed."""
    disk = FailingDisk(monkeypatch)
    disk.error = error
    model = Model(random.Random(2))
    for writes in range(GEOMETRY.layers + 2):
        disk.left = writes
        if error == "short":
            model.fill(store, 3)
        else:
            with pytest.raises(OSError, match=os.strerror(error)):
                model.fill(store, 3)
        model.check(store)
        model.fill(store, 4)
    model.check(again(store))


def test_failing_voids(store, monkeypatch):
    """One that fails keeps no other from being written."""
    model, disk = Model(random.Random(8)), FailingDisk(monkeypatch)
    for block in (1, 2, 3):
        model.fill(store, block)
    disk.part, disk.left = 0, 1
    with pytest.raises(OSError, match="No space left"):
        store.void([1, 2, 3])
    assert store.records().keys() == {2}


def test_a_void_that_fails_for_one_worker(tmp_path, monkeypatch):
    """The other one forgets its part all the same."""
    stores, record = list[Store](), Record(b"k" * 32, NO_PARENT, 0, 0, 1)
    with closing(Folder.at(str(tmp_path), make=True)) as root:
        for rank in range(2):
            make_store(root, IDENTITY, GEOMETRY, truncate, part := WorkerShare(rank, 2))
            stores.append(open_store(str(tmp_path), name_of(IDENTITY, part), write=True))
            write(stores[-1], 1, bytes(block_bytes(GEOMETRY)))
            stores[-1].commit(1, record)
    both, disk = Ranks(stores), FailingDisk(monkeypatch)
    disk.part, disk.left = 0, 0
    with pytest.raises(OSError, match="No space left"):
        both.void([1])
    assert [[*store.records()] for store in stores] == [[1], []]
    both.close()


@pytest.mark.parametrize("error", [errno.EIO, "short"])
def test_failing_reads(store, monkeypatch, error):
    """What cannot be read is not offered; a short read is completed."""
    model, preadv = Model(random.Random(7)), os.preadv
    model.fill(store, 3)
    (record,) = store.records().values()

    def fail(fd, buffers, offset):
        if error == "short":
            return preadv(fd, [buffers[0][:5]], offset)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "preadv", fail)
    assert store.intact(3, record) == (error == "short")


def test_power_loss(tmp_path):
    """The disk has any mixture of old and new sectors, of all files."""
    chance = random.Random(3)
    sizes = GEOMETRY.__class__(blocks=8, layers=2, layer_block_bytes=1024, side_bytes=1024)
    store = new_store(tmp_path / "store", sizes)
    model = Model(chance)
    for block in range(sizes.blocks):
        model.fill(store, block)
    files = [store.folder.path / name for name in sizes.files]
    before = [file.read_bytes() for file in files]
    old = dict(model.live)
    for block in (1, 3, 5, 5):
        model.fill(store, block)
    store.void([6])
    after = [file.read_bytes() for file in files]
    found = 0
    for _ in range(500):
        for file, one, other in zip(files, before, after, strict=True):
            mixed = bytearray(one)
            for begin in range(0, len(one), SECTOR):
                if chance.random() < 0.5:
                    mixed[begin : begin + SECTOR] = other[begin : begin + SECTOR]
            file.write_bytes(mixed)
        store = again(store)
        model.check(store, complete=False)
        intact = {b for b, r in store.records().items() if store.intact(b, r)}
        assert {0, 2, 4, 7} <= intact, "what did not change is there"
        found += len(intact - old.keys())
        model.live = old
    assert not found


@pytest.mark.parametrize("geometry", [GEOMETRY, DIVIDED], ids=["alike", "divided"])
@pytest.mark.parametrize("name", GEOMETRY.files)
def test_bit_flips(tmp_path, geometry, name):
    """A flipped bit loses the block that it is in, and no other."""
    store, chance = new_store(tmp_path / "store", geometry), random.Random(4)
    model = Model(chance)
    for block in range(GEOMETRY.blocks):
        model.fill(store, block)
    path = store.folder.path / name
    whole = path.read_bytes()
    for _ in range(200):
        place, bit = chance.randrange(len(whole)), chance.randrange(8)
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        store = again(store)
        offered = {b for b, r in store.records().items() if store.intact(b, r)}
        model.check(store, complete=False)
        unused = name == USED or (name == RECORDS and place % RECORD_BYTES in range(8, 16))
        assert len(offered) == GEOMETRY.blocks - (not unused)


def test_erasing_in_both_parts(tmp_path):
    """Blocks on both sides of the border, and no others."""
    store = new_store(tmp_path / "store", DIVIDED)
    data = [bytes([block + 1]) * block_bytes(DIVIDED, block) for block in range(16)]
    for block in range(16):
        write(store, block, data[block])
    store.erase([2, 8, 9, 10, 11, 15])
    erased = [block for block in range(16) if not any(contents(store, block))]
    assert erased == [2, 8, 9, 10, 11, 15]
    assert all(contents(store, block) == data[block] for block in range(16) if block not in erased)


def test_another_level_is_another_sum(store):
    """Contents of one level are not offered as of another, whatever became of the record."""
    model = Model(random.Random(5))
    model.fill(store, 0)
    record = store.records()[0]
    for changed in (record._replace(level=record.level + 1), record._replace(key=bytes(32))):
        assert not store.intact(0, changed)
    assert store.intact(0, record)


@pytest.mark.parametrize("name", GEOMETRY.files)
def test_a_file_that_was_cut_off(store, name):
    path = store.folder.path / name
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(RetrievalConfigError, match=rf"{name} has \d+ bytes in place of"):
        again(store)


def test_files_of_another_store(tmp_path, store):
    """Pages and records of another store are not offered, even of the same identity."""
    model = Model(random.Random(6))
    other = new_store(tmp_path / "other")
    for block in range(GEOMETRY.blocks):
        model.fill(other, block)
    for name in GEOMETRY.files:
        shutil.copy(other.folder.path / name, store.folder.path / name)
    store = again(store)
    assert len(store.records()) == GEOMETRY.blocks
    assert not any(store.intact(block, record) for block, record in store.records().items())


@pytest.mark.parametrize("change", ["bit", "cut", "format", "missing", "name"])
def test_a_damaged_identity(store, change):
    path = store.folder.path / "identity.json"
    text = path.read_text()
    if change == "bit":
        path.write_text(text.replace("bfloat16", "bfloat17"))
    elif change == "cut":
        path.write_text(text[:-20])
    elif change == "format":
        path.write_text(text.replace('"format": 1', '"format": 2'))
    elif change == "missing":
        path.unlink()
    else:
        store.folder.path = store.folder.path.rename(store.folder.path.with_name("kv-0123"))
    what = {"format": "has format 2", "name": "another name"}.get(change, "is damaged")
    with pytest.raises(RetrievalConfigError, match=what):
        again(store)


def test_what_cannot_be_made_leaves_nothing(tmp_path):
    """Neither a full disk nor the end of the process leaves a store that is half made."""
    root = Folder.at(str(tmp_path / "store"), make=True)

    def full(fd, size, directory):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        make_store(root, IDENTITY, GEOMETRY, full)
    assert root.names() == []
    root.folder(UNFINISHED + "1", make=True).make(PAGES)
    assert remove_unfinished(root) == 1
    make_store(root, IDENTITY, GEOMETRY, truncate)
    assert root.names() == [name_of(IDENTITY)]
    assert name_of(IDENTITY) != name_of(IDENTITY | {"dtype": "float32"})


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
def test_nobody_else_may_read(tmp_path, mask):
    """Whatever the umask."""
    before = os.umask(mask & 0o077)
    try:
        path = new_store(tmp_path / "store").folder.path
    finally:
        os.umask(before)
    for entry in path.rglob("*"):
        assert entry.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["identity.json", *GEOMETRY.files])
def test_links_are_not_followed(tmp_path, store, name):
    path = store.folder.path / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        again(store)


def test_a_linked_store_is_not_followed(tmp_path, store):
    path = store.folder.path
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        again(store)


@pytest.mark.parametrize("name", ["", "identity.json", *GEOMETRY.files])
def test_what_others_may_read_is_refused(store, name):
    (store.folder.path / name).chmod(0o744)
    with pytest.raises(RetrievalConfigError, match="open to other users"):
        again(store)


def test_a_directory_that_others_may_write(tmp_path):
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(RetrievalConfigError, match="open to other users"):
        Folder.at(str(path))


HOLD = """
import sys
from vllm_kvretrieval.store.disk.files import Folder, Lock
lock = Lock(Folder.at(sys.argv[1]), "lock")
print(lock.take(), flush=True)
sys.stdin.read()
"""


def test_locks(tmp_path):
    """Held by one process, and dropped when it is killed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    tmp_path.chmod(0o700)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        lock = Lock(Folder.at(str(tmp_path)), "lock")
        assert not lock.take()
        assert lock.owner == str(holder.pid)
        holder.kill()
        holder.wait()
    assert lock.take()
    assert lock.owner == str(os.getpid())
    lock.close()


def test_a_reader_cannot_write(store):
    root = Folder.at(str(store.folder.path.parent))
    reader = Store(root.folder(store.folder.path.name))
    assert reader.folder.path.name.startswith(PREFIX)
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.void([0])
