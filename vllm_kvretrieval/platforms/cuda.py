"""The CUDA platform with retrieval."""

from typing import TYPE_CHECKING, Any

from vllm.platforms.cuda import CudaPlatform

from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.platforms.shared import RetrievalPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CudaRetrievalPlatform(RetrievalPlatform, CudaPlatform):
    """vLLM's CUDA platform, which by itself has one backend for all layers, windowed or not."""

    worker = "vllm_kvretrieval.engine.cuda.worker.RetrievalGPUWorker"

    @classmethod
    def check_engine(cls, vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
        from vllm_kvretrieval.attention.cuda import support

        support.check_engine(vllm_config, config)

    @classmethod
    def check_layer(cls, selector: Any) -> None:
        from vllm_kvretrieval.attention.cuda import support

        support.check_layer(selector)

    @classmethod
    def retrieval_backend(cls, backend: Any, selector: Any, num_heads: int | None) -> str:
        return super(RetrievalPlatform, cls).get_attn_backend_cls(backend, selector, num_heads)
