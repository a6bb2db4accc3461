"""Methods that keep tokens by the attention that they receive, and drop the others for good."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.budget import PageBudget
from vllm_kvretrieval.retrieval.families.base import Method
from vllm_kvretrieval.retrieval.keeping import Keeping, observation_of
from vllm_kvretrieval.retrieval.needs import Need
from vllm_kvretrieval.retrieval.presets import Preset
from vllm_kvretrieval.retrieval.shares import make_shares

ONCE, RUNNING, SLIDING = "once", "running", "sliding"


@dataclass(frozen=True, kw_only=True)
class DroppingMethod(Method):
    """One method of this family; see :class:`Method`.

    Attributes:
        keeping: Which tokens of a prompt are kept.
    """

    methods: ClassVar = "methods that drop tokens"
    trait: ClassVar = "which keeps tokens by the attention that they receive"
    schedules: ClassVar = {
        ONCE: "once a prompt has been read, by its attention",
        RUNNING: "the same, then each step drops a token",
        SLIDING: "once, then recent tokens slide: the earliest of them goes at each step",
    }
    options: ClassVar = frozenset("sink window dense_layers budget_shares observation".split())

    keeping: Keeping
    per_token: bool = True
    least_chosen: ClassVar = 1

    @classmethod
    def make(
        cls, name: str, preset: Preset, schedule: str, given: Mapping[str, Any], page_size: int
    ) -> Self:
        """See :meth:`Method.make`."""
        if preset.keeping is None:
            raise RetrievalConfigError(
                f"schedule={schedule!r} keeps tokens by a rule, and the preset of {name} has none: "
                "give it a Keeping."
            )
        observation = observation_of(given.get("observation"), preset.keeping.observation)
        keeping = replace(preset.keeping, observation=observation)
        shares = make_shares(given.get("budget_shares", preset.budget_shares))
        if keeping.page > 1 and not shares.uniform:
            raise RetrievalConfigError(
                f"budget_shares={shares.given} cannot be used with {name}, which keeps pages of "
                f"{keeping.page} tokens; leave it out."
            )
        if schedule == SLIDING and not keeping.slides:
            raise RetrievalConfigError(
                f"schedule='sliding' cannot be used with {name}, which keeps no window of recent "
                "tokens; use a method that does, such as snapkv or h2o."
            )
        made = cls(
            name=name,
            page_size=page_size,
            schedule=schedule,
            sink_pages=preset.sink_pages,
            window_pages=preset.window_pages,
            budget_shares=shares,
            keeping=keeping,
        )
        if keeping.per_layer and made.drops and shares.by_head:
            raise RetrievalConfigError(
                f"budget_shares={shares.given} gives KV heads of a layer different shares, and "
                f"with {name} they keep the same tokens as they drop others step by step; give one "
                "number per layer, or use schedule=once."
            )
        return made

    @property
    def drops(self) -> bool:
        """Whether each step drops a token for the one that it adds."""
        return self.schedule in (RUNNING, SLIDING)

    @property
    def slides(self) -> bool:
        """Whether it drops the earliest of the recent tokens, and else the worst rated one."""
        return self.schedule == SLIDING

    @property
    def observes(self) -> bool:
        """See :attr:`Method.observes`."""
        return True

    @property
    def observes_all(self) -> bool:
        """See :attr:`Method.observes_all`."""
        return self.keeping.observation is None

    @property
    def attends_within_budget(self) -> bool:
        """Tokens may have been dropped at the first step; see :class:`Method`."""
        return not self.drops

    @property
    def together(self) -> bool:
        """All heads of a layer keep the same tokens, unless their shares differ."""
        return self.keeping.per_layer and not self.budget_shares.by_head

    @property
    def needs(self) -> frozenset[Need]:
        """See :attr:`Method.needs`. Shares by entropy are those of layers; as heads drop tokens
        step by step, they come to differ."""
        needs = super().needs | {Need.DROPS, Need.PROMPTS}
        if self.drops:
            needs |= {Need.DROPS_ALWAYS}
        uneven = self.drops or self.budget_shares.entropy is None
        if not self.budget_shares.uniform and uneven:
            needs |= {Need.UNEVEN_TOKENS}
        return needs

    def divide(self, budget: PageBudget) -> tuple[int, int]:
        """Sink and window are among the kept tokens; see :meth:`Method.divide`."""
        return 0, budget.total
