"""The questions that may be asked of any method; a family of methods is a subclass.

A family is a file here, which knows its options, its refusals and its sizes, and neither vLLM nor
where the KV is; and a file of :mod:`vllm_kvretrieval.methods`, which runs it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from vllm_kvretrieval.retrieval.budget import Budgets, PageBudget
from vllm_kvretrieval.retrieval.families.numbers import SeatField
from vllm_kvretrieval.retrieval.index import Index
from vllm_kvretrieval.retrieval.needs import Need
from vllm_kvretrieval.retrieval.pooling import Pooling
from vllm_kvretrieval.retrieval.presets import Preset
from vllm_kvretrieval.retrieval.roles import Role
from vllm_kvretrieval.retrieval.shares import UNIFORM, Shares


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method: its options, sizes and needs. A family overrides the answers that differ with it.

    Attributes:
        methods: The name of the family's methods in messages and documentation.
        trait: Why options of other families have no effect. It follows a method's name.
        schedules: The values of the option ``schedule``, with a line for ``vllm serve --help``.
        options: The options of an engine that have an effect with the family, beside those that
            have one with every family.
        of_requests: The options of a request that have an effect with the family.
        numbers: The numbers of its methods that a request may set for itself.

        name: The name of the method in requests.
        page_size: Tokens per page.
        schedule: When pages or tokens are selected; one of ``schedules``.
        sink_pages, window_pages: Pages always attended to, where the user names none; None: a share
            of the budget each.
        budget_shares: How layers and KV heads share what is selected.
        selects: Whether a part of the budget is selected. Otherwise the window takes all the rest.
        per_token: Whether single tokens are selected; else pages are.
        selects_for_others: Whether a layer's selection is for the layers after it.
        whole: Whether each step attends to the whole context.
        least_chosen: The fewest units that a KV head chooses, whatever its share.

        index: It scores pages or tokens; None: the method has no index.
        summary_size: Tokens per entry of the index; None: those of a page.
        entry_pages: Pages per entry if there are several; otherwise 1.
        pooling: Over the query heads of a KV head.
        rerank: Candidates per page selected, scored again by their keys; 0: none.
        outliers: The share of the selected pages that are outliers (:class:`Chooser`).
        remainder: The share of the estimated attention below which the mean value of an entry
            stands for it, if it is not selected; 0: what is not selected is left out.
    """

    methods: ClassVar[str]
    trait: ClassVar[str]
    schedules: ClassVar[Mapping[str, str]]
    options: ClassVar[frozenset[str]]
    of_requests: ClassVar[frozenset[str]] = frozenset({"budget"})
    numbers: ClassVar[tuple[SeatField, ...]] = ()

    name: str
    page_size: int
    schedule: str
    sink_pages: int | None = None
    window_pages: int | None = None
    budget_shares: Shares = UNIFORM

    selects: ClassVar[bool] = True
    selects_for_others: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    least_chosen: ClassVar[int] = 0

    per_token: bool = False
    index: Index | None = None
    summary_size: int | None = None
    entry_pages: int = 1
    pooling: Pooling = Pooling.MEAN_SOFTMAX
    rerank: int = 0
    outliers: float = 0.0
    remainder: float = 0.0

    @classmethod
    def make(
        cls, name: str, preset: Preset, schedule: str, given: Mapping[str, Any], page_size: int
    ) -> Self:
        """The method that results from a preset and options of a method.

        Args:
            name: Its name in requests.
            preset: The values of the options that are not given.
            schedule: One of ``schedules``.
            given: Options as the user wrote them, each of which has an effect with the family and
                a value of its kind.
            page_size: Tokens per page.

        Raises:
            RetrievalConfigError: They cannot go together; says why.
        """
        return cls(name=name, page_size=page_size, schedule=schedule)

    @property
    def entry_tokens(self) -> int:
        """Tokens per entry of the index."""
        return self.summary_size or self.page_size

    @property
    def speculates(self) -> bool:
        """Whether a step may attend to the selection of an earlier one."""
        return False

    @property
    def prompts_select(self) -> str:
        """The units that chunks of a prompt can select: ``pages``, ``tokens``; empty: none."""
        return ""

    def why_not_beside(self, own: "Method") -> str | None:
        """Why an engine whose own method is another cannot serve it, too; None: it can."""
        return None

    @property
    def observes(self) -> bool:
        """Whether the attention of a prompt's queries decides which tokens are kept of it."""
        return False

    @property
    def observes_all(self) -> bool:
        """Whether all queries of the prompt count, those of a prefix in the cache, too."""
        return False

    @property
    def attends_within_budget(self) -> bool:
        """Whether a context within the budget is attended to whole."""
        return True

    @property
    def together(self) -> bool:
        """Whether all KV heads of a layer get the same number of tokens, rounding included."""
        return False

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of the method that not every device, home and model serves."""
        changing = [known for known in self.numbers if known.of(self) != known.plain]
        needs = {known.need for known in changing if known.need is not None}
        if self.per_token:
            needs.add(Need.TOKENS)
        if not self.budget_shares.uniform:
            needs.add(Need.UNEVEN_SHARES)
            if not self.per_token:
                needs.add(Need.UNEVEN_PAGES)
        if self.budget_shares.numbers is not None:
            needs.add(Need.LAYER_NUMBERS)
        return frozenset(needs)

    def divide(self, budget: PageBudget) -> tuple[int, int]:
        """Pages that a KV head always attends to, and that it chooses on average."""
        return budget.total - budget.select, budget.select

    def open_pages(self, budgets: Budgets, raw_window: bool) -> int:
        """The number of full pages at the end of a context that are not encoded.

        It is all pages of an entry of the index but one, whose record is built from their keys with
        the last of them, and the most that a window has.

        Args:
            budgets: The engine's budgets.
            raw_window: Whether the window stays as the model made it.
        """
        windows = [budget.window for budget in budgets.largest(self)] if raw_window else []
        return max([self.entry_pages - 1, *windows])

    def check_model(self, model: Any, layers: Sequence[int]) -> None:
        """Refuse a model that has another shape than options say, or that too little is known of.

        Args:
            model: vLLM's configuration of the model.
            layers: Numbers of the layers that attend to parts of long contexts.

        Raises:
            RetrievalConfigError: Says what is missing.
        """
        if not self.budget_shares.uniform:
            self.budget_shares.of([model.get_total_num_kv_heads()] * len(layers))

    def fixed_counts(self, model: Any, layers: Sequence[int]) -> np.ndarray | None:
        """How many pages each KV head selects, whatever the budget; None: the budget says it.

        Args:
            model, layers: See :meth:`check_model`.

        Returns:
            int32 [KV heads of the model in these layers, layer after layer].
        """
        return None

    def roles(self, filters: Any, model: Any, layers: Collection[int]) -> dict[int, Role]:
        """The role of each layer, by its number; empty: every layer selects for itself.

        Args:
            filters: The engine's option.
            model: vLLM's configuration of the model.
            layers: Numbers of the model's layers with plain full attention.

        Raises:
            RetrievalConfigError: They are not known, or cannot be served.
        """
        return {}

    @property
    def rule(self) -> "Method":
        """The method without the numbers that a request may set and that are measured."""
        plain: dict[str, Any] = {known.name: known.plain for known in self.numbers}
        return replace(self, **plain)
