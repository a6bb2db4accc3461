"""The values among which options choose, their bounds, and some of their defaults."""

PAGE_SIZES = (16, 32, 64, 128, 256)
REUSES = {
    "all": "as far as their options allow",
    "exact": "only those that full attention has computed",
}
HOMES = {
    "auto": "`device` if `max_num_seqs` requests of `max_model_len` fit there, else `disk` on a "
    "CPU, `host` on a GPU",
    "device": "vLLM's own memory",
    "host": "host memory; on a GPU",
    "disk": "a file; fast memory then holds recalled pages only; on a CPU",
}
ATTENTION = {"vllm": "bit by bit as vLLM alone", "own": "exact to rounding"}
UNITS = {"page": "whole pages", "token": "single tokens, by `one_bit` or `exact`"}
FILTER_HEADS = {
    "all": "the heads of all workers; results do not depend on the number of workers",
    "own": "each worker's own, without communication",
}
DEFAULT_TOKEN_CHUNK = 512
"""Tokens of a prompt that a filter selects for at once."""
DEFAULT_PAGE_CHUNK = 128
"""Tokens of a prompt that select pages at once."""
DEFAULT_QUERIES = 8
MOST_QUERIES = 64
SAMPLINGS = {
    "spread": "evenly spaced, the last one among them",
    "dissimilar": "per query head those least like the mean of the chunk's (QuoKA, section 3)",
}
NO_PAGES = "whose prompts select no pages by an index"
"""Why a share of the tokens before a chunk of a prompt has no effect."""
