"""The ops of retrieval: one signature each, several implementations.

``cpu`` binds the compiled CPU kernels; ``tests/spec/ops.py`` (plain torch) is the specification,
whose indexes and decode steps are in ``reference``. Both offer the functions of :class:`Ops`. The
ops of a GPU are apart: :class:`~vllm_kvretrieval.kernels.device.DeviceOps` in ``device``, and
:class:`~vllm_kvretrieval.kernels.slots.SlotOps` of a cache in two tiers in ``slots``, with kernels
in ``triton``; and so is :class:`TokenRecall`, in ``tokens``.
"""

from vllm_kvretrieval.kernels.ops import Ops
from vllm_kvretrieval.kernels.recall import RecallCache
from vllm_kvretrieval.kernels.rows import (
    Contexts,
    DecodeRows,
    Mode,
    PromptLists,
    Remainder,
    TokenLists,
)
from vllm_kvretrieval.kernels.tokens import TokenRecall
from vllm_kvretrieval.kernels.types import (
    Chooser,
    ContextSelector,
    DecodeLayer,
    IndexRecords,
    KeptTokens,
    Merge,
    Selection,
)

__all__ = [
    "Chooser",
    "ContextSelector",
    "Contexts",
    "DecodeLayer",
    "DecodeRows",
    "IndexRecords",
    "KeptTokens",
    "Merge",
    "Mode",
    "Ops",
    "PromptLists",
    "RecallCache",
    "Remainder",
    "Selection",
    "TokenLists",
    "TokenRecall",
]
