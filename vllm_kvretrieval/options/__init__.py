"""The options of engines and requests: one table of them, and everything that comes from it."""
