"""The values among which options choose, their bounds, and some of their defaults."""

from typing import NamedTuple

PAGE_SIZES = (16, 32, 64, 128, 256)
REUSES = {
    "all": "as far as their options allow",
    "exact": "only those that full attention has computed",
}


class Home(NamedTuple):
    """What the option ``home`` names.

    Attributes:
        meaning: What it is, for users.
        slow: Whether not all KV has to be in fast memory.
        on_disk: Whether it takes space on a disk.
    """

    meaning: str
    slow: bool = True
    on_disk: bool = False


HOMES = {
    "auto": Home(
        "`device` if `max_num_seqs` requests of `max_model_len` fit there, else `disk` on a CPU, "
        "`host` on a GPU"
    ),
    "device": Home("vLLM's own memory", slow=False),
    "host": Home("host memory; on a GPU"),
    "disk": Home("a file; fast memory then holds recalled pages only; on a CPU", on_disk=True),
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
