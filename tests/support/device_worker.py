"""Worker, model runner and backends of support/device_engine.py: the package's, on the CPU."""

from typing import Any, ClassVar
from unittest import mock

import torch
from vllm.v1.worker.cpu import model_runner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import model_runner as gpu_model_runner

from tests.support import device_drafts, device_launches
from tests.support.device_dense import Dense
from tests.support.device_graphs import ReplayManager
from tests.support.side_work import Interleaved
from vllm_kvretrieval.attention.cuda.backend import backend_over
from vllm_kvretrieval.engine.cuda.runner import RetrievalModelRunner
from vllm_kvretrieval.engine.cuda.worker import RetrievalGPUWorker


class DeviceRunner(RetrievalModelRunner, model_runner.CPUModelRunner):
    """vLLM's V2 model runner as it is on the CPU, with graphs, and side work done in between."""

    side = Interleaved(RetrievalModelRunner.ops)
    ops: ClassVar[Any] = side.ops
    make_side = staticmethod(lambda device: DeviceRunner.side)
    map_home = staticmethod(lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8))
    graphs = ReplayManager

    def __init__(self, *args):
        with mock.patch.object(gpu_model_runner, "init_speculator", device_drafts.init):
            super().__init__(*args)

    def _attach_retrieval(self, *args):
        super()._attach_retrieval(*args)
        groups = [group for groups in self.attn_groups for group in groups]
        builders = [group.get_metadata_builder() for group in groups]
        self.cudagraph_manager.builders = [b for b in builders if getattr(b, "ops", None)]
        self.cudagraph_manager.taken = []


class DeviceWorker(RetrievalGPUWorker, CPUWorker):
    def init_device(self):
        with mock.patch.object(model_runner, "CPUModelRunner", DeviceRunner):
            super().init_device()

    def determine_available_memory(self):
        self.expect_tiers(self.cache_config.kv_cache_memory_bytes)
        self.model_runner.profile_cudagraph_memory()  # a first KV cache, as on a GPU
        return super().determine_available_memory()

    def compile_or_warm_up_model(self):
        times = super().compile_or_warm_up_model()
        self.model_runner.capture_model(profile_only=True)  # no workspaces to lock
        device_launches.serve()
        return times


def __getattr__(name):
    if not name.isupper():
        raise AttributeError(name)
    backend = globals()[name] = backend_over(Dense, name, __name__)
    return backend
