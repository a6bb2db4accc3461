"""The options of engines and requests: a table of each, and everything that comes from these."""
