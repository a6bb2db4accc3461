"""vLLM's platforms with retrieval: one file each, of which a process imports its own."""
