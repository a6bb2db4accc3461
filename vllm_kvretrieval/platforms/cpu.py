"""vLLM's CPU platforms with retrieval."""

from typing import Any

from vllm_kvretrieval.platforms.shared import RetrievalPlatform


class CpuRetrieval(RetrievalPlatform):
    """In front of one of vLLM's CPU platforms: lets it accept the backends of this plug-in."""

    worker = "vllm_kvretrieval.engine.cpu.worker.RetrievalCPUWorker"
    support = "vllm_kvretrieval.attention.cpu.support"

    @classmethod
    def retrieval_backend(cls, backend: Any, selector: Any, num_heads: int | None) -> str:
        return str(backend.get_path())
