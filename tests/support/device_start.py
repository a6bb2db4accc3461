"""The start of a GPU's worker, in an engine of tests/support/device_engine.py.

vLLM's worker for the CPU has methods of its own to measure memory and to warm up. Here those of its
GPU worker run, with the memory of a device that is not there, so that what the package's worker
adds to them is what a GPU will see: profiling, graphs, warm-up.
"""

import contextlib
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from vllm.config import set_current_vllm_config
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.cpu import model_runner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.workspace import init_workspace_manager

from tests.support import device_engine, device_launches
from tests.support.device_worker import DeviceRunner
from vllm_kvretrieval.engine.cuda.worker import RetrievalGPUWorker

TOTAL = 400 << 20
"""Bytes of the device's memory."""
USED = 5 << 20, 13 << 20
"""Bytes in use when the worker starts, and once it has a model."""
PEAK = 3 << 20
"""Bytes that a step takes beside these, at most."""


class Memory:
    """Stands for ``torch.accelerator``: a device whose memory does not change."""

    used = USED[0]

    def get_memory_info(self, device: Any = None) -> tuple[int, int]:
        return TOTAL - self.used, TOTAL

    def memory_reserved(self, device: Any = None) -> int:
        return self.used - USED[0]

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        held = self.memory_reserved()
        peak = PEAK if held else 0
        return {"allocated_bytes.all.current": held, "allocated_bytes.all.peak": held + peak}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        pass


memory = Memory()


class Cuda:
    """vLLM's platform, which says that it is one of a GPU."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True

    def get_device_name(self, *_: Any) -> str:
        return "a GPU"

    def get_device_total_memory(self, *_: Any) -> int:
        return TOTAL


@contextlib.contextmanager
def on_a_gpu():
    """While methods of vLLM's GPU worker run."""
    functions = [name for name in dir(Memory) if not name.startswith("_") and name != "used"]
    with contextlib.ExitStack() as stack:
        for name in functions:
            stack.enter_context(mock.patch.object(torch.accelerator, name, getattr(memory, name)))
        stood_in = Cuda(gpu_worker.current_platform)
        stack.enter_context(mock.patch.object(gpu_worker, "current_platform", stood_in))
        yield


class GpuMethods(gpu_worker.Worker):
    """Comes before vLLM's worker for the CPU, and has the methods of that for GPUs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        gpu_worker.Worker.__init__(self, *args, **options)
        self.parallel_config.disable_custom_all_reduce = True

    def init_device(self) -> None:
        with mock.patch.object(model_runner, "CPUModelRunner", DeviceRunner):
            super().init_device()
        init_workspace_manager(self.device)
        memory.used = USED[0]
        with on_a_gpu():
            self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        memory.used = USED[1]

    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> Any:
        return contextlib.nullcontext()

    def determine_available_memory(self) -> int:
        with on_a_gpu():
            return gpu_worker.Worker.determine_available_memory(self)

    def compile_or_warm_up_model(self) -> Any:
        # What it compiles of vLLM's kernels is for models of certain names.
        with on_a_gpu(), mock.patch.object(gpu_worker, "kernel_warmup"):
            times = gpu_worker.Worker.compile_or_warm_up_model(self)
        device_launches.serve()
        return times


class StartingWorker(RetrievalGPUWorker, GpuMethods, CPUWorker):
    """The package's worker over vLLM's methods for GPUs."""


def open_engine(model: str, options: dict[str, Any]) -> None:
    """Start the engine of this process, as :func:`tests.support.device_engine.open_engine` does."""
    from tests.support.device_platform import DevicePlatform

    DevicePlatform.worker = f"{__name__}.StartingWorker"
    device_engine.open_engine(model, {"kv_cache_memory_bytes": None} | options)


def worker() -> Any:
    core = device_engine._engine.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker


def describe() -> dict[str, int]:
    """The bytes that the worker has measured, and those that it has taken."""
    started = worker()
    runner = started.model_runner
    kept = runner.retrieval_layers
    caches = {cache.untyped_storage().data_ptr(): cache for cache in runner.kv_caches}
    spaces = {id(impl.workspace): impl.workspace for impl in kept.impls.values()}
    return {
        "available": started.available_kv_cache_memory_bytes,
        "graphs": started.cudagraph_memory_estimate,
        "caches": sum(cache.untyped_storage().nbytes() for cache in caches.values()),
        "workspaces": sum(space.nbytes for space in spaces.values()),
    }


def choose_backends(cases: list[tuple[tuple[int, int], bool, dict[str, Any]]]) -> list[str]:
    """The paths of the backends that the CUDA platform chooses, or why it chooses none.

    Args:
        cases: Capability of the GPU, whether FlashAttention is there, and fields of a layer that
            are other than usual.
    """
    for name in ("vllm._C_stable_libtorch", "vllm._C"):
        sys.modules.setdefault(name, ModuleType(name))
    from vllm.platforms.cuda import CudaPlatform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends import registry
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_kvretrieval.attention.cuda import backend
    from vllm_kvretrieval.platforms.composed import compose
    from vllm_kvretrieval.platforms.cuda import CudaRetrieval

    platform = compose(CudaRetrieval, CudaPlatform)
    preset = registry.AttentionBackendEnum["FREEKV"]
    ours = {preset: f"{backend.__name__}.FREEKV"}
    answers = []
    for capability, flash, changed in cases:
        vars(backend).pop("FREEKV", None)  # which an earlier case has made
        usual = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
        layer = AttentionSelectorConfig(**usual | {"block_size": 32} | changed)
        with (
            set_current_vllm_config(worker().vllm_config),
            mock.patch.dict(registry._ATTN_OVERRIDES, ours),
            mock.patch.object(platform, "get_device_capability") as asked,
            mock.patch.object(backend, "is_flash_attn_varlen_func_available", lambda f=flash: f),
            mock.patch.object(backend, "get_flash_attn_version", return_value=3),
        ):
            asked.return_value = DeviceCapability(*capability)
            try:
                chosen = platform.get_attn_backend_cls(preset, layer)
                answers.append(f"{chosen} over {backend.FREEKV.dense.get_name()}")
            except ValueError as error:
                answers.append(str(error))
    return answers
