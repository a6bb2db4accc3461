"""The KV cache on disk that outlives the server."""
