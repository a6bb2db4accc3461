"""The ops of a decode step on a GPU, and of a cache in two tiers, in Triton.

See :class:`vllm_kvretrieval.kernels.device.DeviceOps`,
:class:`vllm_kvretrieval.kernels.slots.SlotOps` and
:class:`vllm_kvretrieval.kernels.encoded.EncodedOps`.
"""

from vllm_kvretrieval.kernels.triton.decode import count_splits, sparse_decode
from vllm_kvretrieval.kernels.triton.dropping import drop_tokens, receive_tokens
from vllm_kvretrieval.kernels.triton.encoded import (
    keep_open,
    recall_encoded,
    stage_encoded,
    write_open,
)
from vllm_kvretrieval.kernels.triton.index import KINDS, index_pages
from vllm_kvretrieval.kernels.triton.kept import list_kept
from vllm_kvretrieval.kernels.triton.open_index import index_open
from vllm_kvretrieval.kernels.triton.recall import recall_units
from vllm_kvretrieval.kernels.triton.resolve import resolve, resolve_ahead
from vllm_kvretrieval.kernels.triton.rows import prepare_rows
from vllm_kvretrieval.kernels.triton.select import plan_decode, select_ahead
from vllm_kvretrieval.kernels.triton.stage import stage_context
from vllm_kvretrieval.kernels.triton.tokens import filter_tokens, plan_tokens
from vllm_kvretrieval.kernels.triton.write import update_index, write_kv

__all__ = [
    "KINDS",
    "count_splits",
    "drop_tokens",
    "filter_tokens",
    "index_open",
    "index_pages",
    "keep_open",
    "list_kept",
    "plan_decode",
    "plan_tokens",
    "prepare_rows",
    "recall_encoded",
    "recall_units",
    "receive_tokens",
    "resolve",
    "resolve_ahead",
    "select_ahead",
    "sparse_decode",
    "stage_context",
    "stage_encoded",
    "update_index",
    "write_kv",
    "write_open",
]
