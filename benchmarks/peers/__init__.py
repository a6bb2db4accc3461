"""Other engines, each behind a small driver in a process of its own: `benchmarks.serving peers`."""
