"""Tables and plots of README and docs, from result files: ``python -m benchmarks.tables``."""
