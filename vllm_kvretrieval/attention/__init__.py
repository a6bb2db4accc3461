"""What vLLM calls: backend, metadata builder and implementation."""
