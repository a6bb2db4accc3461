"""The ops in plain torch: their specification. Slow, and meant to be read."""

from vllm_kvretrieval.kernels.reference.attend import (
    attend,
    attend_prompt,
    drop_tokens,
    stage_pages,
    stage_tokens,
    write_token_major,
)
from vllm_kvretrieval.kernels.reference.context import (
    context_ratings,
    context_scores,
    list_context,
    select_context,
)
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
from vllm_kvretrieval.kernels.reference.recall import RecallCache, decode_units, encode_units

__all__ = [
    "RecallCache",
    "attend",
    "attend_prompt",
    "build",
    "context_ratings",
    "context_scores",
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
    "write_token_major",
]
