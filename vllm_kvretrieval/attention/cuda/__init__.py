"""The classes that vLLM's CUDA platform calls."""
