"""The ops of retrieval: one signature each, several implementations.

``reference`` (plain torch) is the specification, ``cpu`` binds the compiled CPU kernels. Every
implementation offers the functions of :class:`Ops`. The ops of a cache in two tiers are apart:
:class:`~vllm_kvretrieval.kernels.slots.SlotOps` in ``slots``, their specification in
``slots_reference``, the kernels in ``triton``; and so is :class:`TokenRecall`, in ``tokens`` and
``tokens_reference``.
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
    IndexRecords,
    KeptTokens,
    Merge,
    Selection,
)

__all__ = [
    "Chooser",
    "ContextSelector",
    "Contexts",
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
