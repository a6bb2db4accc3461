"""vLLM's platforms with retrieval: one file each; a process imports only its own."""
