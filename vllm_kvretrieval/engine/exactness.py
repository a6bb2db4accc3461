"""How exact the blocks are that a request may share and computes, by its options."""

import hashlib
from dataclasses import dataclass

from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.retrieval.exactness_levels import EXACT, NEVER, Level, Reading, Taint
from vllm_kvretrieval.retrieval.families import Method
from vllm_kvretrieval.retrieval.seats import SEAT_FIELDS


@dataclass(frozen=True)
class Exactness:
    """How exact the blocks are that a request may share, and those that it computes.

    Attributes:
        own: The level of blocks that its steps compute beyond what they attend to as a whole.
        tolerance: The level that the blocks have to serve that it shares.
        reads_cache: Whether the request may share blocks. It may not if its method rates tokens by
            all queries of the prompt, since all of them have to be computed then.
        decodes_exactly: Tokens of the longest context that a decode step attends to as a whole.
        prefills_exactly: Tokens at the start of a prompt that attend to all tokens before them.
    """

    own: Level
    tolerance: Level
    reads_cache: bool
    decodes_exactly: int
    prefills_exactly: int

    def decoding(self, start: int) -> Taint:
        """The taint that a step gives to a context which decodes a token behind ``start`` others.

        It is the worst case where only the worker knows more: if the budget is a share of the
        prompt, or if the method drops tokens.
        """
        if start < self.decodes_exactly:
            return Taint()
        return Taint(start, Level(decoded=self.own.decoded))

    def reading(self, start: int, tokens: int) -> Taint:
        """The taint that a step gives to a context by reading tokens of a prompt.

        Args:
            start: Tokens that were computed before the step.
            tokens: Tokens of the step.
        """
        if start + tokens <= self.prefills_exactly:
            return Taint()
        return Taint(max(start, self.prefills_exactly), Level(prefilled=self.own.prefilled))


class ExactnessRules:
    """Reads the exactness of requests from their options.

    Args:
        config: Options of the engine.
    """

    def __init__(self, config: RetrievalConfig) -> None:
        self._config = config
        self._decoding = {name: _decoding(config, m) for name, m in config.methods.items()}
        self._reading = {
            name: _reading(config, method)
            for name, method in config.methods.items()
            if config.prefills_sparsely(method)
        }

    def of(self, options: RequestOptions) -> Exactness:
        """The exactness of a request with these options."""
        config, decoded, prefilled = self._config, None, None
        if not options.exact:
            decoded = Reading(self._decoding[options.method], self._steps(options))
        if sparse := options.prefill_budget is not None:
            prefilled = Reading(self._reading[options.method], self._chunks(options))
        own = Level(decoded, prefilled)
        return Exactness(
            own,
            EXACT if options.wants_exact_prefix(config) else own,
            not options.observes_all(config),
            NEVER if options.exact else options.certain_budget(config),
            config.exact_prefill if sparse else NEVER,
        )

    def _steps(self, options: RequestOptions) -> tuple[float, ...]:
        """The measures of steps that decode; see :func:`_decoding`.

        A budget is the least, the share of a prompt, and the most that this may be.
        """
        config, share = self._config, 0.0
        least = most = options.budget.total * config.page_size
        if config.memory_fraction is not None and not options.own_budget:
            share, most = config.memory_fraction, config.budget_limit
            least = config.budgets.least(config.methods[options.method])
        budget = float(least), share, float(most)
        return *budget, *(float(options.numbers[known.name]) for known in SEAT_FIELDS)

    def _chunks(self, options: RequestOptions) -> tuple[float, ...]:
        """The measures of chunks of prompts; see :func:`_reading`."""
        assert options.prefill_budget is not None
        tokens = options.prefill_budget.total * self._config.page_size
        depth = self._config.prefill_depth
        return float(tokens), float(options.prefill_share), 1.0 if depth is None else float(depth)


def _decoding(config: RetrievalConfig, method: Method) -> str:
    """The rule by which steps of a method decode; all else is measured."""
    numbers = [known.name for known in SEAT_FIELDS]
    measures = ", ".join(["least budget", "memory_fraction", "largest budget", *numbers])
    return _rule(measures, config, method)


def _reading(config: RetrievalConfig, method: Method) -> str:
    """The rule by which chunks of prompts read; all else is measured."""
    return _rule(
        "prefill_budget, prefill_share, prefill_depth",
        config,
        method,
        config.prefill_chunk,
        config.prefill_queries,
        config.prefill_sampling,
        config.pools_chunks_by(method),
        config.prompt_shares,
    )


def _rule(measures: str, config: RetrievalConfig, method: Method, *others: object) -> str:
    """A rule, by the name of its method and a hash.

    Not in it is what the identity of a store has: page size, layers, weights, kernels.

    Args:
        measures: Names of what is measured.
        config: Options of the engine.
        method: The method.
        others: What the rule has beside.
    """
    options = config.sink, config.window, config.filters, config.filter_heads, config.observation
    text = repr((measures, method.rule, *options, *others))
    return f"{method.name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
