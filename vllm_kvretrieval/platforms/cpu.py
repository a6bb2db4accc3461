"""The CPU platform with retrieval."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform

from vllm_kvretrieval.platforms.shared import RetrievalPlatform


class CpuRetrievalPlatform(RetrievalPlatform, CpuPlatform):
    """vLLM's CPU platform, extended so that it accepts the backends of this plug-in."""

    worker = "vllm_kvretrieval.engine.cpu.worker.RetrievalCPUWorker"
    support = "vllm_kvretrieval.attention.cpu.support"

    @classmethod
    def retrieval_backend(cls, backend: Any, selector: Any, num_heads: int | None) -> str:
        return backend.get_path()
