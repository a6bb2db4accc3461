"""What vLLM's CUDA platform calls."""
