"""Pages of host memory before a GPU maps them: all there, and on the GPU's own node."""

import contextlib
import ctypes
import errno
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

PIECE = 1 << 28
"""Bytes that a thread asks the system for at once; a multiple of huge pages."""
MOST_THREADS = 16
MADV_POPULATE_WRITE = 23  # Linux 5.14; not named by Python 3.11
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call


def populate(address: int, nbytes: int, threads: int | None = None) -> None:
    """Have the system provide a mapping's memory, by several threads at once.

    Otherwise one thread of CUDA's does so when the memory is locked, for minutes where there is
    much of it. A system that does not know how is left to do it then.

    Args:
        address: Where the mapping begins, on a page's border.
        nbytes: The mapping's size.
        threads: How many; by default as many as there are cores, up to ``MOST_THREADS``.

    Raises:
        MemoryError: The system has not that much memory.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def provide(begin: int) -> None:
        size = min(PIECE, nbytes - begin)
        while madvise(address + begin, size, MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                return
            if code != errno.EINTR:
                raise MemoryError(
                    f"the system does not provide {nbytes / 2**30:.1f} GiB of host memory "
                    f"({os.strerror(code)}): ask for less, or end what else takes memory"
                )

    count = threads or min(len(os.sched_getaffinity(0)), MOST_THREADS)
    with ThreadPoolExecutor(count) as pool:
        for _ in pool.map(provide, range(0, nbytes, PIECE)):
            pass


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Ask for a mapping's memory to come from a NUMA node as long as that has some.

    Args:
        address: Where the mapping begins, on a page's border; none of it is there yet.
        nbytes: The mapping's size.
        node: Number of the node.

    Returns:
        Whether the system agrees; containers often forbid it.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    of, size = ctypes.c_void_p(address), ctypes.c_ulong(nbytes)
    most = ctypes.c_ulong(len(mask) * bits + 1)
    mode, flags = ctypes.c_int(_MPOL_PREFERRED), ctypes.c_uint(0)
    call = ctypes.CDLL(None).syscall
    return bool(call(ctypes.c_long(number), of, size, mode, mask, most, flags) == 0)


def node_of(device: torch.device) -> int | None:
    """The NUMA node that a GPU is attached to; None where the system does not say."""
    driver, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    name = ctypes.create_string_buffer(32)  # such as 0000:3B:00.0
    index = torch.cuda.current_device() if device.index is None else device.index
    if driver.cuDeviceGet(ctypes.byref(number), index):
        return None
    if driver.cuDeviceGetPCIBusId(name, len(name), number):
        return None
    return node_of_pci(Path("/sys/bus/pci/devices") / name.value.decode().lower())


def node_of_pci(device: Path) -> int | None:
    """The NUMA node of a device by its directory in ``/sys``; None where it says none."""
    with contextlib.suppress(OSError, ValueError):
        node = int((device / "numa_node").read_text())
        return node if node >= 0 else None
    return None
