"""vLLM's classes with retrieval: scheduler, workers, connector, metrics, and their state."""
