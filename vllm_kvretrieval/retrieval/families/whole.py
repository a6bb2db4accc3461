"""Full attention and retrieval of all pages: baselines (full, KIVI, KVQuant)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm_kvretrieval.retrieval.budget import Budgets
from vllm_kvretrieval.retrieval.families.base import Method
from vllm_kvretrieval.retrieval.needs import Need
from vllm_kvretrieval.retrieval.presets import Preset


@dataclass(frozen=True, kw_only=True)
class WholeMethod(Method):
    """One method of this family; see :class:`Method`."""

    methods: ClassVar = "full attention and retrieval"
    trait: ClassVar = "which attends to everything"
    schedules: ClassVar = {"whole": "no retrieval: full attention at each step"}
    options: ClassVar = frozenset({"dense_layers"})
    of_requests: ClassVar = frozenset[str]()

    selects: ClassVar = False
    whole: ClassVar = True

    @classmethod
    def make(
        cls, name: str, preset: Preset, schedule: str, given: Mapping[str, Any], page_size: int
    ) -> Self:
        """See :meth:`Method.make`."""
        window = preset.window_pages
        return cls(name=name, page_size=page_size, schedule=schedule, window_pages=window)

    @property
    def needs(self) -> frozenset[Need]:
        """See :attr:`Method.needs`."""
        return frozenset({Need.EVERYTHING})

    def open_pages(self, budgets: Budgets, raw_window: bool) -> int:
        """The window is the preset's, whatever the budget; see :meth:`Method.open_pages`."""
        return (self.window_pages or 0) if raw_window else 0
