"""Page indexes and decode steps in plain torch: their specification. Slow, and meant to be read.

``vllm-kvretrieval explain`` selects by it. ``tests/spec`` has the specification of all ops.
"""

from vllm_kvretrieval.kernels.reference.index import (
    build,
    index_pages,
    keys_of,
    keys_of_entries,
    tokens_of,
    update_index,
    values_of_entries,
)
from vllm_kvretrieval.kernels.reference.plan import (
    entry_count,
    find_outliers,
    plan_decode,
    score_entries,
)

__all__ = [
    "build",
    "entry_count",
    "find_outliers",
    "index_pages",
    "keys_of",
    "keys_of_entries",
    "plan_decode",
    "score_entries",
    "tokens_of",
    "update_index",
    "values_of_entries",
]
