"""The KV cache on disk that outlives the server: its directory, files, records and checks."""
