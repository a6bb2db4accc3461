"""A CPU with AVX2 only, for every Python process that has this folder in ``PYTHONPATH``.

Python reads this file when it starts. ``benchmarks.engines.AVX2`` holds oneDNN and PyTorch to it,
too.
"""

from benchmarks.emulation import avx2_only

avx2_only()
