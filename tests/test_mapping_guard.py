"""The guard of a mapped file; what a home makes of it is in test_tiers.py."""

import mmap
import os
import tempfile

import torch

from vllm_kvretrieval.kernels import cpu

PAGE = mmap.PAGESIZE


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
        assert guard.take() == [3 * PAGE, 6 * PAGE]
        assert memory[3 * PAGE] == memory[4 * PAGE] == 0, "the others are still guarded"
        assert guard.take() == [3 * PAGE, 4 * PAGE, 6 * PAGE]
        os.dup2(file.fileno(), fd)
        assert guard.take() == [3 * PAGE, 4 * PAGE, 6 * PAGE]
        assert guard.take() == []
        file.truncate(8 * PAGE)
        memory[3 * PAGE :] = 2
        os.lseek(fd, 3 * PAGE, os.SEEK_SET)
        assert os.read(fd, PAGE) == bytes([2]) * PAGE, "the file is mapped again"
        del guard
        os.close(nothing)
        os.close(fd)
