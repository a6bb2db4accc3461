"""vLLM's CPU platforms with retrieval."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.platforms.shared import RetrievalPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CpuRetrieval(RetrievalPlatform):
    """In front of one of vLLM's CPU platforms: lets it accept the backends of this plug-in."""

    worker = "vllm_kvretrieval.engine.cpu.worker.RetrievalCPUWorker"
    refusals = "vllm_kvretrieval.attention.cpu.refusals"

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        parallel = vllm_config.parallel_config
        executor = parallel.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        if parallel.worker_cls == cls.worker:
            from vllm_kvretrieval.engine.cpu import processes

            processes.check_cores(vllm_config)
            if executor == processes.ALONE:
                processes.share_process(vllm_config)

    @classmethod
    def retrieval_backend(cls, backend: Any, selector: Any, num_heads: int | None) -> str:
        return str(backend.get_path())

    @classmethod
    def finer_options(cls, vllm_config: "VllmConfig", method: str) -> Mapping[str, Any]:
        from vllm_kvretrieval.platforms.finer import finer_options  # which loads the kernels

        return finer_options(vllm_config, method)

    @classmethod
    def facts_of(
        cls, vllm_config: "VllmConfig", config: RetrievalConfig
    ) -> Mapping[str, Any] | None:
        from vllm_kvretrieval.platforms.measured import facts_of  # which loads the kernels

        return facts_of(vllm_config, config)

    @classmethod
    def add_drafter(cls, vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
        from vllm_kvretrieval.engine.cpu.drafting import add_drafter

        add_drafter(vllm_config, config)

    @classmethod
    def attending_kernels(cls, vllm_config: "VllmConfig", config: RetrievalConfig) -> str:
        from vllm_kvretrieval.attention.cpu.refusals import choose_attention

        model = vllm_config.model_config
        own = choose_attention(config, model.dtype, model.get_head_size()).own
        return "own" if own else "vllm"
