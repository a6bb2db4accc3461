"""How much the KV heads of a worker select, keep and attend to at most, whatever a request asks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_kvretrieval.retrieval.budget import PageBudget
from vllm_kvretrieval.retrieval.families import Method
from vllm_kvretrieval.retrieval.shares import Allotment, allot, own_heads

if TYPE_CHECKING:
    from vllm_kvretrieval.options.engine import RetrievalConfig


class Capacity:
    """What a request gets of each KV head of a worker, and the most that any request gets.

    State, lists and fast memory are made for the latter; requests are given the former, which is
    never more. Neither is more than the longest context.

    Args:
        config: Options of the engine.
        kv_heads: KV heads of each retrieval layer, of all workers together.
        longest: Tokens of the longest context.
        part: Which of how many equal parts of each layer's KV heads are this worker's.
        drafts: The most draft tokens that a step verifies of a request, which its window has.

    Attributes:
        allotments: Allotments of methods that give layers or KV heads unequal shares, by name.
        chosen: int64 [KV heads of the worker, layer after layer]; units (pages, or single tokens)
            that a request selects in the layer itself, or keeps.
        attended: int64, the same shape; what a step attends to, sink and window included: pages,
            or tokens where the engine has a method that selects these. Generated tokens of methods
            that choose once, and heads that read everything, are not counted.
        filtered: Tokens that filter layers select for others; 0 where there are none.
    """

    def __init__(
        self,
        config: "RetrievalConfig",
        kv_heads: Sequence[int],
        longest: int,
        part: tuple[int, int] = (0, 1),
        drafts: int = 0,
    ) -> None:
        self.drafts = drafts
        self._methods, self._page_size, self._longest = config.methods, config.page_size, longest
        self.allotments: dict[str, Allotment] = {}
        self.heads = len(own_heads(kv_heads, part))
        self.chosen = np.zeros(self.heads, dtype=np.int64)
        self.attended = np.zeros(self.heads, dtype=np.int64)
        self.filtered = 0
        per_page = config.page_size if config.token_major else 1  # of what is attended to
        for name, method in config.methods.items():
            if not method.budget_shares.uniform:
                self.allotments[name] = allot(
                    method.budget_shares, kv_heads, self._longest_of(method), part, method.together
                )
            for budget in config.budgets.largest(method):
                always, units = self._divide(method, budget)
                most = self._most(name, units)
                if method.selects_for_others:
                    self.filtered = max(self.filtered, min(units, longest))
                else:
                    np.maximum(self.chosen, most, out=self.chosen)
                attended = (always + most) * (per_page // self._per_page(method))
                np.maximum(self.attended, attended, out=self.attended)
        self.attended += -(-drafts // config.page_size) * per_page
        np.minimum(self.attended, longest if config.token_major else self._pages, out=self.attended)

    @property
    def listed(self) -> int:
        """Entries of the longest list of a step; see ``attended``."""
        return int(self.attended.max(initial=1))

    def most_chosen(self, heads: slice = slice(None)) -> int:
        """Units that any of some KV heads selects or keeps; one at least."""
        return int(self.chosen[heads].max(initial=1))

    def counts(
        self, method: str, budget: PageBudget, shares: np.ndarray | None = None
    ) -> np.ndarray:
        """Units that each KV head selects of a request's context, or keeps of its prompt.

        Args:
            method: The request's.
            budget: The request's.
            shares: float64 [retrieval layers of the model]; what each layer gets, 1 on average,
                where that is found in the prompt.

        Returns:
            int64 [KV heads of the worker]. What a head that keeps tokens attends to is one at
            least, its new token.
        """
        by = self._methods[method]
        _, units = self._divide(by, budget)
        allotment = self.allotments.get(method)
        if allotment is None:
            counts = np.full(self.heads, min(units, self._longest_of(by)))
        elif shares is None:
            counts = allotment.counts(units)
        else:
            counts = allotment.of_layers(shares).counts(units)
        return counts.clip(min=by.least_chosen)

    def _most(self, method: str, units: int) -> np.ndarray:
        """int64 [KV heads]; of requests with at most so many units on average."""
        by, allotment = self._methods[method], self.allotments.get(method)
        if allotment is None:
            return np.full(self.heads, max(min(units, self._longest_of(by)), by.least_chosen))
        return allotment.most(units).clip(min=by.least_chosen)

    def _divide(self, method: Method, budget: PageBudget) -> tuple[int, int]:
        """Units attended to beside what is chosen, and chosen on average."""
        always, chosen = method.divide(budget)
        units = self._per_page(method)
        return always * units, chosen * units

    def _per_page(self, method: Method) -> int:
        """Units of selection in a page."""
        return self._page_size if method.per_token else 1

    def _longest_of(self, method: Method) -> int:
        """Units of the longest context."""
        return self._longest if method.per_token else self._pages

    @property
    def _pages(self) -> int:
        """Pages of the longest context."""
        return -(-self._longest // self._page_size)
