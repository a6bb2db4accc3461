"""Weights of 8 and 4 bits on CPUs: of checkpoints, or of 16-bit weights as they are loaded.

``packing`` lays weights out for the kernel, ``rounding`` finds their numbers, and ``product`` is
the op. ``methods`` has what vLLM registers, and ``layers`` the methods of single layers.
``kernels`` and ``gptq`` serve checkpoints.
"""
