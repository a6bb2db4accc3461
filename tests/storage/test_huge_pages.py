"""Memory in huge pages, as the system counts them."""

import re
from pathlib import Path

import pytest
import torch

from vllm_kvretrieval.storage.huge_pages import HUGE_PAGE, new_memory_in_huge_pages, use_huge_pages

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def in_huge_pages(tensor):
    """Bytes, of the mapping that holds the tensor's memory."""
    address = tensor.data_ptr() + tensor.nbytes // 2
    found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found


def test_memory_that_is_in_use():
    """The contents stay. Views of one piece of memory count once."""
    if not MODE.exists() or "[never]" in MODE.read_text():
        pytest.skip("the system has no huge pages")
    memory = torch.arange(12 * HUGE_PAGE // 8)
    before = in_huge_pages(memory)
    done = use_huge_pages([memory, memory[5:]])
    assert done % HUGE_PAGE == 0
    assert done <= memory.nbytes
    if done:  # kernels before 6.1 do so by and by
        assert in_huge_pages(memory) >= max(before, done)
    assert torch.equal(memory, torch.arange(12 * HUGE_PAGE // 8))


def test_too_little_for_one():
    assert use_huge_pages([torch.zeros(100), torch.zeros(0)]) == 0


def test_memory_that_a_block_of_code_fills():
    """Older memory stays as it is, and so does what is reserved and not filled."""
    if not MODE.exists() or "[never]" in MODE.read_text():
        pytest.skip("the system has no huge pages")
    older = torch.ones(12 * HUGE_PAGE // 8)
    before = in_huge_pages(older)
    with new_memory_in_huge_pages() as found:
        newer, reserved = torch.arange(24 * HUGE_PAGE // 8), torch.empty(200 * HUGE_PAGE)
    assert found.in_huge_pages < 100 * HUGE_PAGE
    if found.in_huge_pages:  # kernels before 6.1 do so by and by
        assert in_huge_pages(newer) >= 20 * HUGE_PAGE
    assert in_huge_pages(older) <= max(before, found.in_huge_pages)
    assert torch.equal(newer, torch.arange(24 * HUGE_PAGE // 8))
    assert len(reserved)
