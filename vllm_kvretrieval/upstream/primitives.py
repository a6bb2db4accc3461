"""What oneDNN keeps of products: a kernel for each number of tokens that a step has had.

vLLM keeps the kernels of 32 numbers for each shape of weights. Beside them oneDNN keeps up to 1,024
kernels, so that none is made twice; but prompts have any number of tokens. The kernels for one
number take 3 MiB in SmolLM2-135M, whose weights have four shapes, and 8 MiB in a model of 8B.
"""

import os

CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")
"""Environment variables from which oneDNN takes how many kernels it keeps; both mean the same."""
FEW = 128
"""As many as vLLM keeps itself of a model whose weights have four shapes."""


def keep_few_primitives() -> None:
    """Let oneDNN keep few kernels in this process, unless the user has said how many.

    It reads the number when it makes its first kernel, which is when weights are packed.
    """
    if not any(name in os.environ for name in CAPACITIES):
        os.environ[CAPACITIES[0]] = str(FEW)
