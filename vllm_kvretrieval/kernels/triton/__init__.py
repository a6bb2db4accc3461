"""The ops over slots in Triton (see :class:`vllm_kvretrieval.kernels.slots.SlotOps`)."""

from vllm_kvretrieval.kernels.triton.decode import count_splits, sparse_decode
from vllm_kvretrieval.kernels.triton.recall import recall_units
from vllm_kvretrieval.kernels.triton.write import write_kv

__all__ = ["count_splits", "recall_units", "sparse_decode", "write_kv"]
