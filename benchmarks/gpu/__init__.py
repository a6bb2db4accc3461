"""Benchmarks that need a GPU, and the one that compiles for GPUs that are not there."""
