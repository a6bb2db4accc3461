"""Programs that measure speed and accuracy on real models: ``python -m benchmarks.NAME``."""
