"""The CUDA platform with retrieval."""

from typing import Any

from vllm.platforms.cuda import CudaPlatform

from vllm_kvretrieval.platforms.shared import RetrievalPlatform


class CudaRetrievalPlatform(RetrievalPlatform, CudaPlatform):
    """vLLM's CUDA platform, extended by a backend of its own for layers that retrieve."""

    worker = "vllm_kvretrieval.engine.cuda.worker.RetrievalGPUWorker"
    support = "vllm_kvretrieval.attention.cuda.support"

    @classmethod
    def retrieval_backend(cls, backend: Any, selector: Any, num_heads: int | None) -> str:
        return super(RetrievalPlatform, cls).get_attn_backend_cls(backend, selector, num_heads)
