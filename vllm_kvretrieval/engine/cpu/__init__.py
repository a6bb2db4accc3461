"""What runs in a worker of vLLM's CPU platform."""
