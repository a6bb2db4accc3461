"""The parts of a worker of vLLM's CPU platform."""
