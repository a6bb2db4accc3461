"""Methods that select nothing: sink and window only (StreamingLLM, arXiv 2309.17453)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vllm_kvretrieval.retrieval.families.base import Method

if TYPE_CHECKING:
    from vllm_kvretrieval.retrieval.presets import Preset


@dataclass(frozen=True, kw_only=True)
class FixedMethod(Method):
    """One method of this family; see :class:`Method`."""

    methods: ClassVar = "methods that select nothing"
    trait: ClassVar = "which selects nothing"
    schedules: ClassVar = {"never": "no selection: sink and window only"}
    options: ClassVar = frozenset({"sink", "dense_layers"})

    name: str
    page_size: int
    schedule: str
    selects = False

    @classmethod
    def make(
        cls, name: str, preset: "Preset", schedule: str, given: Mapping[str, Any], page_size: int
    ) -> Self:
        """See :meth:`Method.make`."""
        return cls(name=name, page_size=page_size, schedule=schedule)
