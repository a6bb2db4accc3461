"""All ops in plain torch: their specification. Slow, and meant to be read."""

from tests.spec.attend import (
    attend,
    attend_prompt,
    drop_tokens,
    stage_pages,
    stage_tokens,
    write_cache,
)
from tests.spec.context import (
    context_ratings,
    context_scores,
    list_context,
    select_context,
)
from tests.spec.decoding import decode_layer
from tests.spec.recall import RecallCache, decode_units, encode_units
from vllm_kvretrieval.kernels.reference import (
    build,
    entry_count,
    find_outliers,
    index_pages,
    keys_of,
    keys_of_entries,
    plan_decode,
    score_entries,
    tokens_of,
    update_index,
    values_of_entries,
)

__all__ = [
    "RecallCache",
    "attend",
    "attend_prompt",
    "build",
    "context_ratings",
    "context_scores",
    "decode_layer",
    "decode_units",
    "drop_tokens",
    "encode_units",
    "entry_count",
    "find_outliers",
    "index_pages",
    "keys_of",
    "keys_of_entries",
    "list_context",
    "plan_decode",
    "score_entries",
    "select_context",
    "stage_pages",
    "stage_tokens",
    "tokens_of",
    "update_index",
    "values_of_entries",
    "write_cache",
]
