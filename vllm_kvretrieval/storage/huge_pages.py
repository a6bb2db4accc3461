"""Huge pages for memory that is read in scattered pieces."""

import ctypes
import mmap
from collections.abc import Iterable

import torch

HUGE_PAGE = 2 << 20
COLLAPSE = 25
"""``MADV_COLLAPSE`` of Linux 6.1 and later, which Python does not name: at once, not by and by."""


def use_huge_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Ask the system to hold memory in huge pages, and to make these of what is there already.

    A decode step reads pages or tokens from all over the KV cache: in ordinary pages of 4 KiB, most
    of these reads begin with a miss in the processor's table of addresses.

    Args:
        tensors: Views of memory that this process has allocated.

    Returns:
        Bytes for which the system has done so; fewer than asked for where it does not have huge
        pages, or not enough memory in one piece. What is not in huge pages serves as well.
    """
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    done = 0
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for address, size in storages.items():
        begin = -(-address // HUGE_PAGE) * HUGE_PAGE
        length = (address + size - begin) // HUGE_PAGE * HUGE_PAGE
        if length <= 0 or advise(begin, length, mmap.MADV_HUGEPAGE) != 0:
            continue
        if advise(begin, length, COLLAPSE) == 0:
            done += length
    return done
