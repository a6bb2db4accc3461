"""Host memory that the GPU reads and writes in place, over the bus."""

import contextlib
import ctypes
import mmap
import resource
import weakref
from typing import Any

import torch

from vllm_kvretrieval.kernels.triton.pages import node_of, populate, prefer_node
from vllm_kvretrieval.system_limits import available_memory

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister's flags
_GIB = 2**30


def map_host(nbytes: int, device: torch.device | str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """Page-locked host memory, seen from both sides.

    Unlike ``torch.empty(..., pin_memory=True)``, which rounds up to a power of two, this takes what
    was asked for, and gives a tensor that counts as being on the device, so Triton, FlashAttention
    and torch itself take it as an argument. The memory starts zeroed, and stays locked and mapped
    as long as the device's tensor, or a view of it, lives. Work that uses it must have ended by
    then. It is this process's own and of no file, so it goes with the process, however that ends,
    and is in huge pages where the system has them, on the GPU's own NUMA node as far as that has
    room.

    Args:
        nbytes: Size of the memory in bytes.
        device: The GPU that maps it.

    Returns:
        The same uint8 [nbytes] as a tensor on the CPU and as one on the device.

    Raises:
        MemoryError: The system does not have, or does not lock, that much memory; says how much
            was asked for, how much there is, and what to do.
        RuntimeError: The GPU cannot map it.
    """
    available = available_memory()
    if nbytes > available:
        raise MemoryError(
            f"{nbytes / _GIB:.1f} GiB of host memory are to be locked, and {available / _GIB:.1f} "
            "GiB are available: ask for less, or end what else takes memory"
        )
    mapping = _Mapping(nbytes, torch.device(device))
    return mapping.host, mapping.view()


class _Mapping:
    """One registration with CUDA, kept by the tensors that torch makes of it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)  # a child's copy would not be what the GPU writes
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.host = torch.frombuffer(memory, dtype=torch.uint8)
        self._device = device
        address = self.host.data_ptr()
        if (node := node_of(device)) is not None:
            prefer_node(address, nbytes, node)
        populate(address, nbytes)
        with torch.cuda.device(device):
            cudart = torch.cuda.cudart()
            status = int(cudart.cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED))
            if status:
                limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
                words = "unlimited" if limit < 0 else f"{limit / _GIB:.1f} GiB"
                raise MemoryError(
                    f"CUDA cannot lock {nbytes / _GIB:.1f} GiB of host memory (error {status}); "
                    f"{available_memory() / _GIB:.1f} GiB are available, and the limit of locked "
                    f"memory (ulimit -l) is {words}: ask for less, or raise that limit (in a "
                    "container: --ulimit memlock=-1)"
                )
            unregister = weakref.finalize(self, cudart.cudaHostUnregister, address)
            unregister.atexit = False  # the process's end does it, and CUDA may be gone before
            self._address = _device_address(address)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": tuple(self.host.shape),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
        }

    def view(self) -> torch.Tensor:
        """The memory as a tensor on the device; the tensor keeps ``self``."""
        with torch.cuda.device(self._device):
            view = torch.as_tensor(self, device=self._device)
        if view.data_ptr() != self._address:
            raise RuntimeError(f"{self._device} sees a copy of the host memory, not the memory")
        return view


def _device_address(host_address: int) -> int:
    """Where the GPU sees registered host memory: on most systems at the same address."""
    driver = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_uint64()
    status = driver.cuMemHostGetDevicePointer_v2(
        ctypes.byref(address), ctypes.c_void_p(host_address), ctypes.c_uint(0)
    )
    if status:
        raise RuntimeError(f"the GPU does not map the host memory (CUDA driver error {status})")
    return address.value
