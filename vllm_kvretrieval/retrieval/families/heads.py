"""Methods by which some KV heads attend to everything, others to sink and window (razor)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from vllm_kvretrieval.retrieval.families.base import Method
from vllm_kvretrieval.retrieval.head_sets import HeadSet
from vllm_kvretrieval.retrieval.heads import EVERYTHING, OPTION
from vllm_kvretrieval.retrieval.needs import Need
from vllm_kvretrieval.retrieval.presets import Preset


@dataclass(frozen=True, kw_only=True)
class HeadMethod(Method):
    """One method of this family; see :class:`Method`.

    Attributes:
        heads: The KV heads that attend to whole contexts.
    """

    methods: ClassVar = "methods by which some heads attend to everything"
    trait: ClassVar = "which selects nothing"
    schedules: ClassVar = {
        "by_head": "retrieval heads attend to everything, others to sink and window"
    }
    options: ClassVar = frozenset({"sink", "dense_layers", "exact_below", "heads", "lossless"})
    of_requests: ClassVar = frozenset({"budget", "lossless"})

    heads: HeadSet
    selects: ClassVar = False

    @classmethod
    def make(
        cls, name: str, preset: Preset, schedule: str, given: Mapping[str, Any], page_size: int
    ) -> Self:
        """See :meth:`Method.make`."""
        return cls(
            name=name,
            page_size=page_size,
            schedule=schedule,
            sink_pages=preset.sink_pages,
            heads=OPTION.make(given.get("heads")),
        )

    @property
    def needs(self) -> frozenset[Need]:
        """See :attr:`Method.needs`."""
        return frozenset({Need.HEADS, Need.LAYER_NUMBERS})

    def check_model(self, model: Any, layers: Sequence[int]) -> None:
        """Refuse models whose heads are not known; see :meth:`Method.check_model`."""
        self.heads.of(model, layers)

    def fixed_counts(self, model: Any, layers: Sequence[int]) -> np.ndarray:
        """Retrieval heads attend to everything; see :meth:`Method.fixed_counts`."""
        return self.heads.of(model, layers).flatten().astype(np.int32) * EVERYTHING
