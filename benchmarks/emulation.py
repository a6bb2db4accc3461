"""Processes that run what a machine with fewer instruction sets runs."""

import torch


def avx2_only() -> None:
    """Let vLLM and our kernels find a CPU with AVX2 only; call it before vLLM is imported.

    vLLM then loads its library for such CPUs, and our kernels are those for it.
    """
    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, name, lambda: False)
    from vllm_kvretrieval.kernels import cpu  # asks torch

    cpu.use_isa("avx2")
