"""Methods by which filter layers select tokens for the layers after them (omnikv)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm_kvretrieval.retrieval.families.base import Method
from vllm_kvretrieval.retrieval.filters import KIND, filters_for, read_filters
from vllm_kvretrieval.retrieval.needs import Need
from vllm_kvretrieval.retrieval.presets import Preset
from vllm_kvretrieval.retrieval.roles import OBSERVATIONS, Role, roles_of
from vllm_kvretrieval.values import require_name


@dataclass(frozen=True, kw_only=True)
class FilterMethod(Method):
    """One method of this family; see :class:`Method`.

    Attributes:
        observation: The queries by whose attention filters select; a name of ``OBSERVATIONS``.
    """

    methods: ClassVar = "layers that share a selection"
    trait: ClassVar = (
        "which selects by all keys, in layers of its own, one set for all heads and layers after"
    )
    schedules: ClassVar = {"shared_layers": "filter layers select for others"}
    options: ClassVar = frozenset(
        "sink window exact_below filters filter_heads observation prefill_budget "
        "prefill_chunk".split()
    )

    observation: str
    per_token: bool = True
    selects_for_others: ClassVar = True

    @classmethod
    def make(
        cls, name: str, preset: Preset, schedule: str, given: Mapping[str, Any], page_size: int
    ) -> Self:
        """See :meth:`Method.make`."""
        observation = require_name("observation", given.get("observation", "last"), OBSERVATIONS)
        return cls(name=name, page_size=page_size, schedule=schedule, observation=observation)

    @property
    def prompts_select(self) -> str:
        """See :attr:`Method.prompts_select`."""
        return "tokens"

    def why_not_beside(self, own: Method) -> str:
        """Layers have one role for all requests; see :meth:`Method.why_not_beside`."""
        if isinstance(own, FilterMethod):
            return (
                f"its layers would select as {own.name} does, without a choice of its own; leave "
                "it out."
            )
        return (
            f"which layers are dense is the server's affair, and {self.name} needs others than "
            f"{own.name}. Use --attention-backend {self.name}."
        )

    @property
    def needs(self) -> frozenset[Need]:
        """See :attr:`Method.needs`."""
        several = {Need.LATEST_QUERIES} if len(OBSERVATIONS[self.observation]) > 1 else set()
        return super().needs | several | {Need.LAYERS_SHARE, Need.READS, Need.LAYER_NUMBERS}

    def roles(self, filters: Any, model: Any, layers: Collection[int]) -> dict[int, Role]:
        """See :meth:`Method.roles`."""
        if isinstance(filters, tuple):
            return roles_of(filters, layers)
        name, config = model.model, model.hf_text_config
        if filters is None:
            return roles_of(filters_for(name, config).filters, layers)
        file = read_filters(filters)
        KIND.check_model(file, name, config)
        return roles_of(file.filters, layers)
