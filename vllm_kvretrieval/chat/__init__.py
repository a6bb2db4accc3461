"""``vllm-kvretrieval chat``: questions about documents, by a server that it starts."""
