"""A variant of the accuracy benchmark: a method, the engine that serves it, how it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.table import DEFAULT_METHOD
from vllm_kvretrieval.retrieval.presets import preset_names

OWN = DEFAULT_METHOD
"""The method that the engine itself is started with; others come by its option ``also``."""

FREEKV = "freekv"

PAGE = 32
"""Tokens per page of the engine, whatever methods it serves; budgets are multiples of it."""


@dataclass(frozen=True)
class Variant:
    """One way of decoding: a method that the retrieval engine serves, and how it is asked for."""

    name: str
    meaning: str
    method: str
    """The method's name in requests."""

    groups: tuple[str, ...]
    """``core``: always run; ``quick``: in the quick tier; others are run where asked for."""

    served: dict[str, Any] = field(default_factory=dict)
    """The method's entry in the engine's option ``also``."""

    asks: dict[str, Any] = field(default_factory=dict)
    """Further ``kv_retrieval`` options of a request."""

    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine that differ from the defaults, or its own ``method``. Such a variant
    needs an engine and a prefill of its own."""

    quantization: str = ""
    """The weights of the engine, as vLLM's option names them; empty: the checkpoint's."""

    index: str = ""
    """The index by which it selects; empty: not in the comparison of indexes."""

    style: str = ""
    """The style of its line in the plot, as in matplotlib; empty: it is not drawn."""

    @property
    def engine_config(self) -> RetrievalConfig:
        """Options of the engine that serves it, as far as all methods of the engine share them."""
        return RetrievalConfig(**{"method": OWN, **self.options_of_engine})

    @property
    def options_of_engine(self) -> dict[str, Any]:
        """What its engine is started with: pages of its own method, where it has one, else `PAGE`.

        The page is said even where it is the default, since an engine of one method may have
        smaller ones.
        """
        return self.engine if "method" in self.engine else {"page_size": PAGE, **self.engine}

    @property
    def started(self) -> dict[str, Any]:
        """What its engine is opened with: :attr:`options_of_engine`, and its weights."""
        weights = {"quantization": self.quantization} if self.quantization else {}
        return self.options_of_engine | weights

    @property
    def also(self) -> dict[str, Any]:
        """The engine's option ``also`` with which the method is served."""
        return {} if self.method == self.engine_config.method else {self.method: self.served}

    @property
    def config(self) -> RetrievalConfig:
        """Options of an engine whose own method is this one, to see what the method alone needs."""
        options = {**self.options_of_engine, **self.served}
        options.pop("method", None)
        preset = options.pop("preset", self.method if self.method in preset_names() else OWN)
        return RetrievalConfig(method=preset, **options)

    def refusal(self, budget: int) -> str:
        """Why it has no use for a budget; empty: it has."""
        try:
            self.config.page_budget(budget, key=f"--budgets for {self.name}")
        except RetrievalConfigError as error:
            return str(error)
        return ""

    @property
    def selects(self) -> bool:
        """Whether queries select pages or tokens."""
        return self.config.own.selects

    @property
    def speculates(self) -> bool:
        """Whether a step may attend to what an earlier one selected."""
        return self.config.own.speculates

    @property
    def whole(self) -> bool:
        """Whether steps attend to everything, whatever the budget."""
        return self.config.own.whole

    @property
    def watches(self) -> bool:
        """Whether the attention of a prompt's queries decides, so that none may be left out."""
        return self.config.own.observes
