"""The classes that vLLM's CPU platform calls."""
