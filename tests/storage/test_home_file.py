"""Where the file of a slow home lies: what is refused, and how its space is reserved."""

import ctypes
import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_kvretrieval.disk_space import allocate
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.storage import home_file
from vllm_kvretrieval.storage.home_file import check_room, directory_for, file_system, reserve

MIB = 1 << 20
IN_MEMORY = "/dev/shm"


@pytest.fixture
def file(tmp_path):
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        yield file.fileno()


@pytest.fixture
def logged(monkeypatch):
    lines: list[str] = []

    def note(text, *values):
        lines.append(text % values)

    monkeypatch.setattr(home_file, "logger", SimpleNamespace(info=note, warning_once=note))
    return lines


def test_memory_is_no_disk(monkeypatch):
    """/tmp lies in memory on many systems, and there a file takes what it is to save."""
    assert file_system(IN_MEMORY) == "tmpfs"
    monkeypatch.setattr(home_file, "DEFAULT_DIRECTORY", IN_MEMORY)
    message = r"home=disk: /dev/shm lies in memory \(tmpfs\).* with kv_retrieval\.home_path"
    with pytest.raises(RetrievalConfigError, match=message):
        directory_for(None)
    assert directory_for(IN_MEMORY) == IN_MEMORY, "if that is what the user wants"


def test_the_default_is_for_large_temporary_files(monkeypatch, tmp_path, logged):
    assert directory_for(None) == "/var/tmp"
    assert logged == []
    monkeypatch.setattr(home_file, "DEFAULT_DIRECTORY", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert directory_for(None) == str(tmp_path)
    assert "missing, or this user may not write to it" in logged[0]


def test_a_default_that_belongs_to_somebody_else(monkeypatch, tmp_path, logged):
    """As a volume of root's that a container mounts there."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/var/tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert directory_for(None) == str(tmp_path)
    (line,) = logged
    assert line.startswith("home=disk: /var/tmp is missing, or this user may not write to it, so")
    assert f"the file lies in {tmp_path}. Name a directory with kv_retrieval.home_path." in line
    assert directory_for("/elsewhere") == "/elsewhere"
    assert len(logged) == 1, "nothing is said of a directory that the user names"


def test_an_unknown_file_system_is_not_refused(monkeypatch):
    monkeypatch.setattr(
        home_file,
        "Path",
        lambda name: SimpleNamespace(
            stat=lambda: Path("/").stat(), exists=lambda: False, read_text=None
        ),
    )
    assert file_system("/") == ""


def test_space_is_reserved(file, tmp_path, logged):
    reserve(file, 3 * MIB, str(tmp_path))
    stat = os.fstat(file)
    assert (stat.st_size, stat.st_blocks * 512) == (3 * MIB, 3 * MIB)
    assert logged == []


def test_zeros_reach_the_disk_bit_by_bit(file, tmp_path, logged, monkeypatch):
    """Whoever waits for them sees the file grow."""
    sizes: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: sizes.append(os.fstat(fd).st_size))
    monkeypatch.setattr(home_file, "allocate", lambda fd, size: False)
    monkeypatch.setattr(home_file, "ZEROS", MIB)
    monkeypatch.setattr(home_file, "SYNCED", 2 * MIB)
    reserve(file, 5 * MIB, str(tmp_path))
    assert sizes == [2 * MIB, 4 * MIB]


def test_without_a_call_to_reserve_it(file, tmp_path, logged, monkeypatch):
    """Zeros are written, and it is said so."""
    monkeypatch.setattr(home_file, "allocate", lambda fd, size: False)
    monkeypatch.setattr(home_file, "ZEROS", MIB)
    monkeypatch.setattr(home_file, "PROGRESS_S", -1)
    reserve(file, 2 * MIB + 5, str(tmp_path))
    assert os.fstat(file).st_size == 2 * MIB + 5
    assert os.fstat(file).st_blocks * 512 >= 2 * MIB
    assert "cannot reserve space" in logged[0]
    assert len(logged) == 4


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_what_the_system_says(code, file, monkeypatch):
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)
    library = SimpleNamespace(fallocate=lambda *_: -1)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    assert not allocate(file, 5)
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        allocate(file, 5)


def test_a_disk_that_fills_up_meanwhile(file, tmp_path, monkeypatch):
    """Another worker's file may have come in between."""

    def full(fd, size):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(home_file, "allocate", full)
    with pytest.raises(RetrievalConfigError, match=r"needs 1\.0 GiB, but .* or name another disk"):
        reserve(file, 1 << 30, str(tmp_path))


def test_room_for_all(tmp_path):
    check_room(str(tmp_path), MIB, 2)
    with pytest.raises(RetrievalConfigError, match=r"needs 1024\.0 GiB for each of 64 workers"):
        check_room(str(tmp_path), 1 << 40, 64)
