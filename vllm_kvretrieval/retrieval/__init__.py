"""Retrieval methods, without vLLM and without devices."""
