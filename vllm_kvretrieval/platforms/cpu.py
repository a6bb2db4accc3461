"""The CPU platform with retrieval."""

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.platforms.shared import RetrievalPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CpuRetrievalPlatform(RetrievalPlatform, CpuPlatform):
    """vLLM's CPU platform, which by itself ignores backends of others."""

    worker = "vllm_kvretrieval.engine.cpu.worker.RetrievalCPUWorker"

    @classmethod
    def check_engine(cls, vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
        from vllm_kvretrieval.attention.cpu import support

        support.check_engine(vllm_config, config)

    @classmethod
    def check_layer(cls, selector: Any) -> None:
        from vllm_kvretrieval.attention.cpu import support

        support.check_layer(selector)

    @classmethod
    def retrieval_backend(cls, backend: Any, selector: Any, num_heads: int | None) -> str:
        return backend.get_path()
