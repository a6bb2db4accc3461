"""Rules: functions of other packages that choose pages themselves."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.index.base import Field, Index

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass
class RuleState:
    """What a rule is told of a decode step, for one KV head of one request in one layer.

    Attributes:
        first, last: The rule may choose of pages [first, last) of the context. The sink is before
            them, the window behind them; both are attended to anyway.
        count: How many pages it has to choose; 1 or more.
        scale: Softmax scale of the layer.
        query: float32 [group, head_size]; the query of the request's previous step, None: no pages
            were chosen then.
        pages: int64 [n], rising; the pages that were chosen at the previous step; None as above.
        memory: Notes of the rule, which the next step of the request has again. They are empty
            where there is no previous step.
    """

    first: int
    last: int
    count: int
    scale: float
    query: torch.Tensor | None
    pages: torch.Tensor | None
    memory: dict[str, Any]


class Rule(Index):
    """A rule chooses pages by a function in plain torch: :meth:`select`. It is slow.

    A subclass is a frozen dataclass of its parameters with a ``name``, as that of an index. It
    reads the keys of the whole context at each step. A rule that keeps something smaller of each
    page instead says ``reads_keys = False`` and has ``fields`` and ``build``, as an index has.
    """

    reads_keys: ClassVar[bool] = True

    @abstractmethod
    def select(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], state: RuleState
    ) -> torch.Tensor:
        """Choose pages for the query heads of a KV head.

        Args:
            query: float32 [group, head_size]. For a block of a prompt, which selects by several
                tokens, their queries are side by side.
            record: The ``n`` complete pages of the context, in order: with ``reads_keys`` their
                ``keys``, float32 [n, page_size, head_size]; the fields, [n, *shape] each, in their
                dtypes.
            state: The step.

        Returns:
            Whole numbers [state.count]; different pages from ``state.first`` on and before
            ``state.last``, in any order.
        """

    def fields(self, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
        """See :meth:`Index.fields`; nothing is kept."""
        return ()

    def build(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """See :meth:`Index.build`; nothing is kept."""
        return {}

    def score(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], scale: float
    ) -> torch.Tensor:
        """A rule has no scores."""
        raise NotImplementedError("a rule chooses pages, and scores none")

    def choose(
        self, query: torch.Tensor, record: dict[str, torch.Tensor], state: RuleState
    ) -> torch.Tensor:
        """Choose pages by :meth:`select`, and check them.

        Returns:
            int64 [state.count], rising.

        Raises:
            ValueError: They are not what :meth:`select` has to return.
        """
        found = self.select(query, record, state)
        wanted = f"{state.count} different pages from {state.first} to {state.last - 1}"
        if not isinstance(found, torch.Tensor):
            got = repr(found)
        elif found.dtype not in WHOLE or found.shape != (state.count,):
            got = f"{found.dtype} {list(found.shape)}"
        else:
            pages = found.long().sort().values
            outside = pages[(pages < state.first) | (pages >= state.last)]
            if not len(outside) and (pages[1:] > pages[:-1]).all():
                return pages
            got = f"page {int(outside[0])}" if len(outside) else "a page twice"
        raise ValueError(f"rule {self.name}: select gives {got}, where {wanted} are wanted")


def check_rule(index: Index, page_size: int, options: Mapping[str, Any]) -> None:
    """Refuse options that say how an index scores where it is a rule.

    Args:
        index: The index.
        page_size: Tokens per page.
        options: What a user or a preset says; None and 0 count as not said.

    Raises:
        RetrievalConfigError: The index is a rule, and there is such an option.
    """
    if not isinstance(index, Rule):
        return
    said = {name: options.get(name) for name in ("pooling", "rerank", "summary_size")}
    if said["summary_size"] == page_size:
        del said["summary_size"]
    for name, value in said.items():
        if value:
            raise RetrievalConfigError(
                f"{name}={value} has no effect with index={index.name}, a rule, which chooses "
                "whole pages itself; leave it out."
            )
