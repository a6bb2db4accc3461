"""What vLLM's CPU platform calls."""
