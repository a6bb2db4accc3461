"""Times and sizes of whole engines: ``python -m benchmarks.serving``."""
