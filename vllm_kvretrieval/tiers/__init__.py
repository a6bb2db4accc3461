"""Places of KV pages: the home of the whole cache, and the division of memory."""
