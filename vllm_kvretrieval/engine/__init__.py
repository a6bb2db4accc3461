"""vLLM subclasses and what they keep: the worker and the table of running requests."""
