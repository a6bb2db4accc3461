"""The options of drafts, which a step verifies: fields of the table, defaults, and refusals."""

from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.option import option
from vllm_kvretrieval.values import SWITCH, Kind, require_int

if TYPE_CHECKING:
    from vllm_kvretrieval.options.engine import RetrievalConfig

MOST = 32
"""The most draft tokens of a request in a step."""
USUAL, USUAL_OF_SLOW_HOME = 5, 10
"""Draft tokens with ``lossless``, where ``drafts`` is not given: the more, the dearer an exact step
is beside one over the budget's pages."""


def _require_drafts(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        require_int(key, value)
        raise RetrievalConfigError(f"{key}={value} must be from 0 to {MOST}, e.g. {USUAL}.")
    return value


DRAFTS: Any = option(
    None,
    Kind(f"0 to {MOST} tokens", _require_drafts),
    "the most tokens that are drafted for a request at a step, for the next step to verify; they "
    "are what followed the context's last tokens where these stood before, and as many as are "
    "likely to be right (on a GPU always the most); 0: none",
    f"0; with `lossless` {USUAL}, with a slow home {USUAL_OF_SLOW_HOME}",
    neutral=0,
    more="speculative-decoding.md",
)
LOSSLESS_SWITCH: Any = option(
    False,
    SWITCH,
    "answers are full attention's: the model drafts over the budget's pages, and a step over the "
    "whole context verifies the drafts",
    why="with which the model cannot draft for itself over a part of the context",
    verdict="cannot be used with",
    neutral=False,
    on_gpu="name method full",
    more="speculative-decoding.md#lossless-mode",
)


def default(config: "RetrievalConfig") -> int:
    """The most draft tokens, where the user names no number."""
    if not config.lossless:
        return 0
    return USUAL_OF_SLOW_HOME if config.slow_home else USUAL


def check(config: "RetrievalConfig") -> None:
    """Refuse options of drafts that contradict each other.

    Raises:
        RetrievalConfigError: Says which, and what to do.
    """
    if config.lossless and config.drafts == 0:
        raise RetrievalConfigError(
            "lossless=True drafts tokens, and drafts=0 allows none; raise it, or leave one out."
        )
