"""The tables of README and docs, made of result files: ``python -m benchmarks.tables``."""
