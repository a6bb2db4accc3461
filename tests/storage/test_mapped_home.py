"""The file of a slow home."""

import mmap
import os
import signal

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch

from tests.support import programs
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.cpu import MappingGuard
from vllm_kvretrieval.storage import mapped
from vllm_kvretrieval.storage.mapped import DiskHome, page_runs

pytestmark = pytest.mark.threads

MIB = 1 << 20


def test_what_is_written_is_in_the_file(tmp_path):
    home = DiskHome(str(tmp_path), 3, MIB, MappingGuard)
    assert home.memory.numel() == 3 * MIB
    assert not home.memory.any()
    home.memory.copy_(torch.arange(3 * MIB) % 100)
    assert os.pread(home.fd, 3 * MIB, 0) == home.memory.numpy().tobytes()
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_resident_memory_is_let_go_of(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "TRIM_BYTES", 16 * MIB)
    home = DiskHome(str(tmp_path), 2, 32 * MIB, MappingGuard)

    def resident():
        maps = psutil.Process().memory_maps(grouped=False)
        return sum(part.rss for part in maps if str(tmp_path) in part.path) / MIB

    for part in home.memory.split(MIB):
        part.fill_(7)
        home.note_written(MIB)
        assert resident() < 18
    assert home.memory.eq(7).all()
    assert resident() > 60
    home.unmap(0)
    assert 31 < resident() < 33
    home.unmap(1)
    assert resident() == 0
    home.stage(0, page_runs(np.arange(4, 12), MIB), None)
    assert resident() == 8


def test_runs_of_pages():
    runs = page_runs(np.array([7, 3, 4, 5, 9, 8, 4], dtype=np.int32), 1000)
    assert runs.tolist() == [[3000, 3000], [7000, 3000]]


def test_what_cannot_be_read_is_zero_and_reported(tmp_path):
    """Touched by whomever: the kernel's SIGBUS does not end the process."""
    layer, page = 256 * mmap.PAGESIZE, 2 * mmap.PAGESIZE
    home = DiskHome(str(tmp_path), 2, layer, MappingGuard)
    home.memory.fill_(1)
    os.ftruncate(home.fd, layer + 8 * page)
    home.stage(1, page_runs(np.array([3, 100]), page), None)
    assert home.take_lost(page) == set()
    lost = home.memory[layer + 8 * page :]
    assert not lost[3 * page : 3 * page + 10].any()
    lost[50 * page : 52 * page].fill_(5)
    assert lost[50 * page : 52 * page].eq(5).all()
    assert home.take_lost(page) == {11, 58, 59}
    assert home.take_lost(page) == set()
    os.ftruncate(home.fd, 2 * layer)
    assert home.memory.sum() == layer + 8 * page, "the file is mapped again"
    assert home.take_lost(page) == set()
    small = page // 4  # smaller than the system's
    os.ftruncate(home.fd, layer)
    assert home.memory[-1] == 0
    assert home.take_lost(small) == {510, 511}


def test_single_tokens_are_read_by_a_mapping_of_their_own(tmp_path):
    """The same bytes; what is lost there is zero and reported, too, and back when the file is."""
    layer, page = 16 * mmap.PAGESIZE, 2 * mmap.PAGESIZE
    home = DiskHome(str(tmp_path), 2, layer, MappingGuard)
    first, second = home.scattered(0), home.scattered(1)
    home.memory[layer + 5] = 7
    assert (len(first), len(second), second[5]) == (layer, layer, 7)
    home.note_written(1 << 40)
    assert second[5] == 7
    os.ftruncate(home.fd, layer)
    assert second[3 * page] == 0
    assert home.take_lost(page) == {3}
    os.ftruncate(home.fd, 2 * layer)
    home.memory[layer + 3 * page] = 8
    assert second[3 * page] == 8
    assert home.take_lost(page) == set()


def test_other_bus_errors_end_the_process():
    program = """
import mmap, tempfile
from vllm_kvretrieval.kernels.cpu import MappingGuard
from vllm_kvretrieval.storage.mapped import DiskHome
home = DiskHome(tempfile.gettempdir(), 1, 1 << 20, MappingGuard)
file = tempfile.TemporaryFile()
file.truncate(8192)
other = mmap.mmap(file.fileno(), 8192)
file.truncate(0)
print(other[0])
"""
    ended = programs.run(program)
    assert ended.returncode == -signal.SIGBUS


def test_too_small_a_disk(tmp_path):
    with pytest.raises(RetrievalConfigError, match=r"the home needs 2048.0 GiB, but .* free"):
        DiskHome(str(tmp_path), 2, 1 << 40, MappingGuard)


def test_nothing_is_left_of_a_killed_process(tmp_path):
    """Nor does its space stay taken."""
    program = f"""
import os, signal
from vllm_kvretrieval.kernels.cpu import MappingGuard
from vllm_kvretrieval.storage.mapped import DiskHome
home = DiskHome({str(tmp_path)!r}, 2, 100 << 20, MappingGuard)
home.memory.fill_(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    free = lambda: os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize  # noqa: E731
    before = free()
    killed = programs.run(program)
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert before - free() < 100 * MIB
    assert DiskHome(str(tmp_path), 2, MIB, MappingGuard).memory.numel() == 2 * MIB
