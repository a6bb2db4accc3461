"""A store on volumes and disks as others treat them: rights, locks, holes, copies on write."""

import array
import fcntl
import logging
import os
import shlex
import subprocess
import sys
from contextlib import closing

import pytest

from tests.support.store_life import GEOMETRY, Life, prompt, stepper
from tests.support.store_model import again, new_store
from vllm_kvretrieval import disk_space
from vllm_kvretrieval.command import main
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk import files
from vllm_kvretrieval.store.disk import store as store_module
from vllm_kvretrieval.store.disk.files import Folder, Lock
from vllm_kvretrieval.store.disk.store import StoreInUseError, open_store
from vllm_kvretrieval.store.serving.worker import WorkerStore
from vllm_kvretrieval.tiers import place

MIB = 1 << 20
IDENTITY = {"model": "test", "dtype": "bfloat16", "codec": "raw", "vllm": "0", "block_size": 32}


@pytest.fixture
def store(tmp_path):
    return new_store(tmp_path / "store", identity=IDENTITY)


@pytest.fixture
def warned(monkeypatch, caplog):
    """Lines of the log, of a process that has said nothing yet."""
    monkeypatch.setattr(files, "_told", set())
    caplog.set_level(logging.WARNING, files.logger.name)
    return lambda: [record.getMessage() for record in caplog.records]


def entries(store):
    """Everything on the volume, the directory of all stores included."""
    top = store.folder.path.parent
    return [top, *top.rglob("*")]


def modes(store):
    return {path.stat().st_mode & 0o777 for path in entries(store)}


def start_of_pod(store):
    """The rights that Kubernetes gives to the group of a volume with ``fsGroup``."""
    for path in entries(store):
        more = 0o2110 if path.is_dir() else 0
        path.chmod(path.stat().st_mode & 0o7777 | 0o660 | more)


@pytest.mark.parametrize("action", ["open", "ls", "verify"])
def test_rights_of_a_group_are_taken_away(store, warned, capsys, action):
    """Of all files, and one line says so."""
    start_of_pod(store)
    assert modes(store) == {0o770, 0o660}
    if action == "open":
        store = again(store)
        assert modes(store) - {0o660} == {0o750, 0o700, 0o600}
    else:
        store.close()
        assert main(["store", action, str(store.folder.path.parent)]) == 0
        assert store.folder.path.name in capsys.readouterr().out
    (line,) = warned()
    assert f"a group had rights to {store.folder.path.parent} or" in line
    assert "fsGroupChangePolicy: OnRootMismatch" in line


def test_one_command_closes_a_store_to_everybody(store, warned):
    """What everybody has rights to is refused."""
    for path in entries(store):
        path.chmod(0o755)
    with pytest.raises(RetrievalConfigError, match="is open to other users") as error:
        again(store)
    assert modes(store) == {0o755}
    command = str(error.value).rpartition("close it: ")[2].rstrip(".")
    subprocess.run(command, shell=True, check=True)
    open_store(str(store.folder.path.parent), store.folder.path.name, write=True).close()
    assert not warned()


def test_one_command_makes_a_store_ones_own(store, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    top = shlex.quote(str(store.folder.path.parent))
    with pytest.raises(RetrievalConfigError, match=f"as root, run chown -R 4321 {top}, or name a"):
        again(store)


def test_a_directory_for_everybody_stays_so(tmp_path, warned):
    """It may be /tmp, and nobody is told to close or take it."""
    for mode in (0o1777, 0o777):
        tmp_path.chmod(mode)
        with pytest.raises(RetrievalConfigError, match="name a new one below it") as error:
            Folder.at(str(tmp_path))
        assert "chmod" not in str(error.value)
        assert tmp_path.stat().st_mode & 0o7777 == mode


def test_rights_that_cannot_be_taken_away(store, monkeypatch):
    """The file system may have none of its own."""
    start_of_pod(store)
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: None)
    with pytest.raises(RetrievalConfigError, match="is open to other users"):
        again(store)


TAKE = "import sys; from vllm_kvretrieval.store.disk.files import *; "
TAKE += "sys.exit(Lock(Folder.at(sys.argv[1]), 'lock').take())"


def test_locks_within_a_process(tmp_path):
    """It gets one once, and keeps it though another descriptor of the file is closed."""
    tmp_path.chmod(0o700)
    folder = Folder.at(str(tmp_path))
    one, other = Lock(folder, "lock"), Lock(folder, "lock")
    assert one.take()
    assert not other.take()
    other.close()
    os.close(folder.open("lock"))
    assert subprocess.run([sys.executable, "-c", TAKE, str(tmp_path)]).returncode == 0
    third = Lock(folder, "lock")
    assert not third.take()
    del one
    assert third.take(), "nobody has the first one any more"
    third.close()


@pytest.mark.model
def test_two_engines_of_a_process(tmp_path, monkeypatch):
    """The second one is refused, and the first one goes on."""
    monkeypatch.setattr("vllm_kvretrieval.store.serving.worker.STOPS_S", 0)
    life = Life(tmp_path / "store", stepper(tmp_path / "store"))
    life.stepper.ask(prompt(1), 2)
    with pytest.raises(StoreInUseError, match=f"by process {os.getpid()} .another engine of this"):
        Life(tmp_path / "store", stepper(tmp_path / "store"))
    assert life.stepper.ask(prompt(1), 2)[1]
    life.end()


def made(tmp_path):
    """A store of some MiB, as a server makes it."""
    sizes = GEOMETRY.__class__(blocks=64, layers=2, layer_block_bytes=MIB // 64, side_bytes=8192)
    home = WorkerStore(str(tmp_path / "store"), IDENTITY)
    home.make(sizes)
    home.close()
    return home.name, sizes


def with_holes(tmp_path):
    """The same, as it comes back from many a backup: zeros are left out."""
    name, sizes = made(tmp_path)
    copy = ["cp", "-a", "--sparse=always", str(tmp_path / "store"), str(tmp_path / "copy")]
    subprocess.run(copy, check=True)
    assert held(tmp_path, name) == 0
    return name, sizes


def held(tmp_path, name):
    """Bytes that the files with pages have on the disk."""
    return sum(
        (tmp_path / "copy" / name / file).stat().st_blocks * 512 for file in ("pages", "side")
    )


def test_space_is_reserved_again(tmp_path):
    name, sizes = with_holes(tmp_path)
    with closing(open_store(str(tmp_path / "copy"), name)):
        assert held(tmp_path, name) == 0, "not for those who look at it"
    with closing(open_store(str(tmp_path / "copy"), name, write=True)) as store:
        assert held(tmp_path, name) >= sizes.files["pages"] + sizes.files["side"]
        assert store.lacking == 0


@pytest.mark.parametrize("why", ["disk", "quota"])
def test_a_disk_without_the_space_for_holes(tmp_path, monkeypatch, why):
    """A server is refused, and has not filled the disk up; a command goes on."""
    name, sizes = with_holes(tmp_path)
    if why == "disk":
        disk = type("Disk", (), {"f_bavail": 1, "f_frsize": MIB})
        monkeypatch.setattr(os, "fstatvfs", lambda fd: disk)
    else:

        def refuse(fd, size):
            raise OSError

        monkeypatch.setattr(store_module, "allocate", refuse)
    with pytest.raises(RetrievalConfigError, match=r"disk has 0\.00 GiB too little.*`rm -r"):
        WorkerStore(str(tmp_path / "copy"), IDENTITY)
    assert held(tmp_path, name) == 0
    with closing(open_store(str(tmp_path / "copy"), name, write=True)) as store:
        assert 0 < store.lacking <= sizes.bytes
        store.void([0])


@pytest.fixture
def calls(monkeypatch):
    """What is done to a file of a file system that has the flag, in order: (what, its size)."""
    done, flags = list[tuple[str, int]](), dict[int, int]()

    def ioctl(fd, request, values):
        assert isinstance(values, array.array)
        if request == disk_space.FS_IOC_GETFLAGS:
            values[0] = flags.get(fd, 0x80000)
        else:
            flags[fd] = values[0]
            assert values[0] == 0x80000 | disk_space.FS_NOCOW_FL, "others stay"
            done.append(("flag", os.fstat(fd).st_size))

    allocate = disk_space.allocate

    def note(fd, size):
        done.append(("space", os.fstat(fd).st_size))
        return allocate(fd, size)

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    monkeypatch.setattr(place, "allocate", note)
    return done


def test_files_are_written_in_place(tmp_path, calls):
    """Of a home, and of a store: said of the empty file, before its space is reserved."""
    place.make_file(str(tmp_path), MIB).close()
    assert calls == [("flag", 0), ("space", 0)]
    made(tmp_path)
    assert calls == [("flag", 0), ("space", 0)] * 5


@pytest.mark.parametrize("kind", ["btrfs", "ext4"])
def test_a_file_system_that_copies_all_the_same(tmp_path, monkeypatch, kind):
    """The log says so where it matters."""
    lines = list[str]()
    monkeypatch.setattr(place, "file_system", lambda directory: kind)
    monkeypatch.setattr(place.logger, "warning", lambda text, *_: lines.append(text))
    monkeypatch.setattr(place, "write_in_place", lambda fd: False)
    place.make_file(str(tmp_path), MIB).close()
    assert len(lines) == (kind == "btrfs")
    assert place.keeps_space(str(tmp_path)) == (kind == "ext4")
