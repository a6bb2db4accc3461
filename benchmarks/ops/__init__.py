"""Times of kernels and of the scheduler, without an engine: ``python -m benchmarks.ops``."""
