"""The platform of tests/support/device_engine.py; imported while vLLM finds out where it is."""

from vllm.platforms.cpu import CpuPlatform

from vllm_kvretrieval.platforms.shared import RetrievalPlatform
from vllm_kvretrieval.retrieval.needs import GPU


class GraphPlatform(CpuPlatform):
    """The CPU as a device with graphs, whose steps are scheduled while others run."""

    @classmethod
    def support_static_graph_mode(cls):
        return True

    @classmethod
    def num_compute_units(cls, device_id=0):
        return 2  # so that the programs of a row depend on how many rows there are

    @classmethod
    def graph_pool_handle(cls):
        return 0, 0

    @classmethod
    def check_and_update_config(cls, vllm_config):
        sizes = vllm_config.compilation_config.cudagraph_capture_sizes
        super().check_and_update_config(vllm_config)
        # The CPU has no graphs, and no step that is scheduled while the last one runs.
        vllm_config.compilation_config.cudagraph_capture_sizes = sizes
        vllm_config.scheduler_config.async_scheduling = True

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return "tests.support.device_dense.Dense"  # vLLM's own backend for the CPU has no graphs


class DevicePlatform(RetrievalPlatform, GraphPlatform):
    """It with what the CUDA platform checks, and its backends over a dense half in torch."""

    worker = "tests.support.device_worker.DeviceWorker"
    refusals = "vllm_kvretrieval.attention.cuda.refusals"
    setting = GPU

    @classmethod
    def finer_options(cls, vllm_config, method):
        from vllm_kvretrieval.platforms.cuda import CudaRetrieval

        return CudaRetrieval.finer_options(vllm_config, method)

    @classmethod
    def add_drafter(cls, vllm_config, config):
        from vllm_kvretrieval.engine.cuda.drafting import add_drafter

        add_drafter(vllm_config, config)

    @classmethod
    def retrieval_backend(cls, backend, selector, num_heads):
        return backend.get_path()
