"""Huge pages for memory of which a step reads a lot, or scattered pieces.

In ordinary pages of 4 KiB most reads of scattered pieces begin with a miss in the processor's table
of addresses, and reads of whole weights stop at the end of each page to be foreseen anew.
"""

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

HUGE_PAGE = 2 << 20
COLLAPSE = 25
"""``MADV_COLLAPSE`` of Linux 6.1 and later, which Python does not name: at once, not by and by."""
MAPS = Path("/proc/self/maps")
HEAP = "[heap]"


def use_huge_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Ask the system to hold tensors in huge pages, and to make these of what is there already.

    Args:
        tensors: Views of memory that this process has allocated.

    Returns:
        Bytes for which the system has done so; fewer than asked for where it does not have huge
        pages, or not enough memory in one piece. What is not in huge pages serves as well.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    done = 0
    for address, size in storages.items():
        begin = -(-address // HUGE_PAGE) * HUGE_PAGE
        done += _collapse(begin, (address + size - begin) // HUGE_PAGE * HUGE_PAGE)
    return done


class NewMemory:
    """Memory that a block of code has allocated, and filled.

    Attributes:
        in_huge_pages: Bytes of it that are in huge pages.
    """

    def __init__(self) -> None:
        self.in_huge_pages = 0


@contextmanager
def new_memory_in_huge_pages() -> Iterator[NewMemory]:
    """Hold memory in huge pages that the block allocates and fills, in whatever way.

    It finds memory that no tensor shows, such as weights as oneDNN has packed them.
    """
    new, before = NewMemory(), _filled()
    yield new
    begin = end = 0
    for address in [*sorted(_filled() - before), 0]:
        if address != end:
            new.in_huge_pages += _collapse(begin, end - begin)
            begin = address
        end = address + HUGE_PAGE


def _filled() -> set[int]:
    """The addresses of huge pages that this process's own memory could have: all of it is there."""
    libc = _libc()
    pages = HUGE_PAGE // mmap.PAGESIZE
    found = set[int]()
    for begin, end in _own_memory():
        first = -(-begin // HUGE_PAGE) * HUGE_PAGE
        count = (end - first) // HUGE_PAGE
        if count <= 0:
            continue
        there = torch.empty(count, pages, dtype=torch.uint8)
        if libc.mincore(first, count * HUGE_PAGE, there.data_ptr()) == 0:
            whole = (there & 1).all(1).nonzero()[:, 0]
            found.update((first + HUGE_PAGE * whole).tolist())
    return found


def _own_memory() -> Iterator[tuple[int, int]]:
    """Begin and end of each mapping without a file that only this process writes."""
    for line in MAPS.read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if access.startswith("rw-p") and inode == "0" and (not name or name[0] == HEAP):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            yield begin, end


def _collapse(begin: int, length: int) -> int:
    """Make huge pages of so many bytes; returns how many are in huge pages: all or none."""
    if length <= 0 or _libc().madvise(begin, length, mmap.MADV_HUGEPAGE) != 0:
        return 0
    return length if _libc().madvise(begin, length, COLLAPSE) == 0 else 0


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    return libc
