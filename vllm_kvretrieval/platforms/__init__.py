"""vLLM's platforms with retrieval: one file each; a process imports only its own."""

PLATFORMS = {
    "cpu": "vllm_kvretrieval.platforms.cpu.CpuRetrieval",
    "cuda": "vllm_kvretrieval.platforms.cuda.CudaRetrieval",
}
"""What comes in front of vLLM's platform, per device."""


def composed_name(base: str) -> str:
    """The name of the class that is one of vLLM's platforms with retrieval."""
    return f"Retrieval{base}"
