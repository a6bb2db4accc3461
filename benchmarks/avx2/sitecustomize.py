"""A CPU with AVX2 only, for every Python process that has this folder in ``PYTHONPATH``.

Python reads this file when it starts. vLLM then loads its library for such CPUs, and our kernels
are those for it; ``benchmarks.engines.AVX2`` holds oneDNN and PyTorch to it, too.
"""

import torch

for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
    setattr(torch.cpu, name, lambda: False)

from vllm_kvretrieval.kernels import cpu  # noqa: E402  # asks torch

cpu.use_isa("avx2")
