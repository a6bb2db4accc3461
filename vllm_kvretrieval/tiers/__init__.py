"""Where KV pages are: the home of the whole cache, and how much of what fits where."""
