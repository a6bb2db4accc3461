"""How close answers come to those of full attention: ``python -m benchmarks.quality``."""
