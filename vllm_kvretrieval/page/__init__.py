"""The page for browsers, and the endpoints behind it."""
