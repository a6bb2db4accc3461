"""Methods that select nothing: sink and window only (StreamingLLM, arXiv 2309.17453)."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvretrieval.retrieval.families.base import Method


@dataclass(frozen=True, kw_only=True)
class FixedMethod(Method):
    """One method of this family; see :class:`Method`."""

    methods: ClassVar = "methods that select nothing"
    trait: ClassVar = "which selects nothing"
    schedules: ClassVar = {"never": "no selection: sink and window only"}
    options: ClassVar = frozenset({"sink", "dense_layers", "exact_below", "lossless"})
    of_requests: ClassVar = frozenset({"budget", "lossless"})

    selects: ClassVar = False
