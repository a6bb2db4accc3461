"""The classes that vLLM calls: backend, metadata builder and implementation."""
