"""Draft tokens from a request's own context: where they come from, and how many are worth it."""
