"""The guard of a mapped file; what a home makes of it is in test_mapped_home.py."""

import mmap
import os
import tempfile
from pathlib import Path

import pytest
import torch

from tests.support import programs
from vllm_kvretrieval.kernels import cpu

PAGE = mmap.PAGESIZE
MOST_MAPPINGS = int(Path("/proc/sys/vm/max_map_count").read_text())


def pages(*numbers):
    """The report of a guard on single pages."""
    return [(number * PAGE, (number + 1) * PAGE) for number in numbers]


def test_what_cannot_be_mapped_again_is_told_until_it_is():
    with tempfile.TemporaryFile() as file:
        file.truncate(8 * PAGE)
        fd = os.dup(file.fileno())
        memory = torch.frombuffer(mmap.mmap(fd, 8 * PAGE), dtype=torch.int8)
        memory.fill_(1)
        guard = cpu.MappingGuard(memory, fd)
        os.ftruncate(fd, 2 * PAGE)
        assert memory[3 * PAGE] == memory[6 * PAGE] == 0
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, fd)
        assert guard.take() == pages(3, 6)
        assert memory[3 * PAGE] == memory[4 * PAGE] == 0, "the others are still guarded"
        assert guard.take() == [(3 * PAGE, 5 * PAGE), (6 * PAGE, 7 * PAGE)]
        os.dup2(file.fileno(), fd)
        assert guard.take() == [(3 * PAGE, 5 * PAGE), (6 * PAGE, 7 * PAGE)]
        assert guard.take() == []
        file.truncate(8 * PAGE)
        memory[3 * PAGE :] = 2
        os.lseek(fd, 3 * PAGE, os.SEEK_SET)
        assert os.read(fd, PAGE) == bytes([2]) * PAGE, "the file is mapped again"
        del guard
        os.close(nothing)
        os.close(fd)


LOST_EVERYWHERE = """
import mmap, os, tempfile, torch
from pathlib import Path
from vllm_kvretrieval.storage.mapped import DiskHome
from vllm_kvretrieval.kernels.cpu import MappingGuard

PAGE = mmap.PAGESIZE
most = int(Path("/proc/sys/vm/max_map_count").read_text())
count = 2 * most + 2000  # every second one of them is lost, so each is a mapping of its own
home = DiskHome(tempfile.gettempdir(), 1, PAGE, MappingGuard)  # another one, which is whole
home.memory.fill_(7)
file = tempfile.TemporaryFile()
file.truncate(count * PAGE)
mapping = mmap.mmap(file.fileno(), count * PAGE)
SCATTERED and mapping.madvise(mmap.MADV_RANDOM)
memory = torch.frombuffer(mapping, dtype=torch.int8)
guard = MappingGuard(memory, file.fileno(), SCATTERED)
mappings = lambda: len(Path("/proc/self/maps").read_text().splitlines())
before = mappings()

file.truncate(0)
some = range(0, 2000, 2)
assert not any(memory[page * PAGE] for page in some)
assert guard.take() == [(page * PAGE, (page + 1) * PAGE) for page in some]
assert mappings() <= before + 1, "what is mapped again is a mapping with its neighbours"

for page in range(0, count, 2):
    memory[page * PAGE] = 1
told = guard.take()
assert told == [(0, count * PAGE)], "too many places: all of it is lost"
assert mappings() <= before + 1
file.truncate(count * PAGE)
memory[5 * PAGE] = 3
assert os.pread(file.fileno(), 1, 5 * PAGE) == bytes([3])
assert guard.take() == [] and home.take_lost(PAGE) == set() and home.memory.eq(7).all()
"""


@pytest.mark.skipif(not MOST_MAPPINGS <= 1 << 17, reason="the system allows very many mappings")
@pytest.mark.parametrize(
    "scattered",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["read as it comes", "read in pieces"],
)
def test_more_lost_places_than_the_system_has_mappings_for(scattered):
    """The process lives, and nothing is taken for read that is not."""
    program = LOST_EVERYWHERE.replace("SCATTERED", str(scattered))
    ended = programs.run(program)
    assert ended.returncode == 0, ended.stderr
