"""The record of a request's seat, its place in all state that is kept per request."""

import numpy as np

from vllm_kvretrieval.retrieval.families import FAMILIES

SEAT_FIELDS = tuple(known for family in FAMILIES for known in family.numbers)
"""The numbers of all families that requests may set."""

SEAT = np.dtype(
    [
        *((name, np.int32) for name in ("sink", "window", "select", "total", "method")),
        ("exact", np.bool_),
        *((known.column, np.float32) for known in SEAT_FIELDS),
        ("prefill", np.int32, 3),
        ("prefill_share", np.float64),
    ],
    align=True,
)
"""The options of a request, as numbers; the same on every device.

``sink``, ``window``, ``select``, ``total``: pages of its budget. ``method``: the place of its
method in :attr:`RetrievalConfig.methods`. ``exact``: whether it attends to its whole context at
each step. ``prefill``: pages of sink, window and selection of a chunk of its prompt; zeros: chunks
attend to all before them. ``prefill_share``: the least share of the tokens before a chunk that the
chunk attends to. The others are the :data:`SEAT_FIELDS`.
"""


def even(records: np.ndarray) -> bool:
    """Whether no number of requests makes their KV heads attend to different numbers of units.

    Args:
        records: :data:`SEAT` [n].
    """
    uneven = (known for known in SEAT_FIELDS if known.uneven)
    return all((records[known.column] == known.plain).all() for known in uneven)
