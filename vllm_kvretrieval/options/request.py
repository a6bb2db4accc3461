"""The options of one request, checked against those of its engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.of_requests import REQUEST
from vllm_kvretrieval.options.of_sessions import NO_HINTS, SessionHints, hints_of
from vllm_kvretrieval.options.option import refuse_without_effect
from vllm_kvretrieval.options.table import CONFIG_KEY
from vllm_kvretrieval.retrieval.budget import PageBudget
from vllm_kvretrieval.retrieval.families import Method, having
from vllm_kvretrieval.retrieval.seats import SEAT_FIELDS
from vllm_kvretrieval.values import (
    check_digits,
    meant,
    reject_misspelt,
    reject_unknown,
    shortened,
)

MOST_READ = 1024
"""The number of different requests that a :class:`RequestReader` remembers."""


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request; the engine's values where the request names none.

    Attributes:
        method: Name in :attr:`RetrievalConfig.methods`.
        budget: Pages to attend to.
        numbers: The :data:`SEAT_FIELDS` by name.
        exact: Full attention at every step.
        own_budget: Whether the request names its budget.
        prefill_budget: Pages before a chunk of the prompt that it attends to; None: all.
        prefill_share: The share of the tokens before it that a chunk attends to, where that is
            more; 0 if chunks attend to all of them.
        drafts: The most draft tokens at a step.
        lossless: Whether the model drafts over the budget's pages, for steps that are ``exact``.
        exact_prefix: Share with other requests only keys and values that full attention has
            computed, whatever the request itself attends to.
        sources: Note the pages that the answer attends to.
        hints: What becomes of the context, and what is read ahead.
    """

    method: str
    budget: PageBudget
    numbers: Mapping[str, float]
    exact: bool = False
    own_budget: bool = False
    exact_prefix: bool = False
    sources: bool = False
    prefill_budget: PageBudget | None = None
    prefill_share: float = 0.0
    drafts: int = 0
    lossless: bool = False
    hints: SessionHints = NO_HINTS

    @classmethod
    def parse(
        cls, extra_args: Mapping[str, Any] | None, config: RetrievalConfig
    ) -> "RequestOptions":
        """Validate ``SamplingParams.extra_args`` of one request.

        Options are given as ``{"kv_retrieval": {"budget": 512}}`` or, over HTTP, as flat
        ``vllm_xargs`` such as ``{"kv_retrieval_budget": 512}``.

        Raises:
            RetrievalConfigError: An unknown key, a wrong type, something that the engine does not
                serve or allow.
        """
        given = _given(extra_args)
        reject_unknown(given, REQUEST, f"{CONFIG_KEY} of a request")
        try:
            _check_allowed(given, config)
            return cls._checked(given, config)
        except RetrievalConfigError as e:
            raise RetrievalConfigError(f"{CONFIG_KEY}.{e}") from None

    @classmethod
    def _checked(cls, given: Mapping[str, Any], config: RetrievalConfig) -> "RequestOptions":
        """Options of which each is known; see :meth:`parse`."""
        name = given.get("method", config.method)
        method = config.methods.get(name) if isinstance(name, str) else None
        if method is None:
            raise RetrievalConfigError(
                f"method={shortened(name)} cannot be served by this engine, which runs "
                f"{config.method}; use "
                f"one of {', '.join(config.methods)}, or start the server with "
                f"--kv-retrieval.also.{meant(name, config.methods)}"
            )
        refuse_without_effect(given, type(method), method.name, REQUEST, of_request=True)
        value = {key: REQUEST[key].kind.check(key, given[key]) for key in given}
        budget = value.get("budget", config.budget)
        if budget > config.budget_limit:
            raise RetrievalConfigError(
                f"budget={budget} exceeds the server's limit of {config.budget_limit}. Ask for "
                f"less, or start the server with --kv-retrieval.max_budget {budget}."
            )
        numbers = {}
        for known in SEAT_FIELDS:
            numbers[known.name] = value.get(known.name, known.of(method))
            if known.name in value:
                known.check(value[known.name], method)
        drafts = _drafts(value.get("drafts"), config)
        lossless = _lossless(value, method, drafts, config)
        exact = value.get("exact", method.whole or lossless)
        if method.whole and not exact:
            raise RetrievalConfigError(
                f"exact=False cannot be had with {name}, which attends to everything; leave it "
                "out, or name another method."
            )
        if exact and not (config.allow_exact or method.whole or config.lossless):
            raise RetrievalConfigError(
                "exact=True is not allowed by this server (--kv-retrieval.allow_exact false); ask "
                f"for a budget of up to {config.budget_limit} instead."
            )
        exact_prefix = value.get("exact_prefix", config.reuse == "exact")
        if config.reuse == "exact" and not exact_prefix:
            raise RetrievalConfigError(
                "exact_prefix=False is not allowed by this server (--kv-retrieval.reuse exact), "
                "whose requests share exact prefixes only; leave it out."
            )
        sources = value.get("sources", False)
        if sources and not config.sources:
            raise RetrievalConfigError(
                "sources=True is not served here; leave it out, or start the server with "
                "--kv-retrieval.sources true."
            )
        prefill_budget = _prefill_budget(value.get("prefill_budget"), method, exact, config)
        return cls(
            method.name,
            config.page_budget(budget, method.name),
            numbers,
            exact,
            "budget" in given,
            exact_prefix,
            sources,
            prefill_budget,
            _prefill_share(value.get("prefill_share"), prefill_budget, method, exact, config),
            drafts,
            lossless,
            hints_of(value, config),
        )

    def certain_budget(self, config: RetrievalConfig) -> int:
        """Tokens of a context that decode steps attend to whole, whatever the prompt is.

        Budgets may be a share of the prompt, and methods that drop tokens may have dropped some at
        the first step.
        """
        method = config.methods[self.method]
        if not method.attends_within_budget:
            return 0
        budget = self.budget.total * config.page_size
        if config.memory_fraction is not None and not self.own_budget:
            budget = config.budgets.least(method)
        return max(budget, config.whole_beyond_budget(method))

    def wants_exact_prefix(self, config: RetrievalConfig) -> bool:
        """Whether the request may only share keys and values that full attention has computed.

        It has promised exact answers, or its method rates tokens of the prompt by attention.
        """
        observes = config.methods[self.method].observes
        return self.exact or self.exact_prefix or observes or config.reuse == "exact"

    def observes_all(self, config: RetrievalConfig) -> bool:
        """Whether all queries of the prompt count, those of a prefix in the cache, too."""
        return config.methods[self.method].observes_all and not self.exact


class RequestReader:
    """Reads the options of an engine's requests, and reads equal ones once.

    The front end, the scheduler and each worker have a reader of their own, because no process
    takes from a client, or from another process, that something is checked.

    Attributes:
        config: Options of the engine.
    """

    def __init__(self, config: RetrievalConfig) -> None:
        self.config = config
        self._read: dict[str, RequestOptions] = {}

    def read(self, extra_args: Mapping[str, Any] | None) -> RequestOptions:
        """The options of a request; see :meth:`RequestOptions.parse`, also for its errors."""
        text = repr(_given(extra_args))  # tells True from 1 and 1.0, of which some are refused
        if text not in self._read:
            options = RequestOptions.parse(extra_args, self.config)
            if len(self._read) == MOST_READ:  # clients may ask for anything
                self._read.clear()
            self._read[text] = options
        return self._read[text]


def _check_allowed(given: Mapping[str, Any], config: RetrievalConfig) -> None:
    """Refuse options that the server keeps for itself (``client_options``)."""
    for key in given:
        if not config.lets_set(key):
            allowed = config.client_options
            instead = f"requests may set {', '.join(allowed)}" if allowed else "requests set none"
            raise RetrievalConfigError(
                f"{key} cannot be set by a request to this server (--kv-retrieval.client_options): "
                f"{instead}. Leave it out."
            )


def _prefill_budget(
    tokens: int | None, method: Method, exact: bool, config: RetrievalConfig
) -> PageBudget | None:
    """The pages before a chunk of the prompt that it attends to; None: all of them.

    Args:
        tokens: ``prefill_budget`` of the request; None: it names none.
        method: The method of the request.
        exact: Whether the request asks for full attention.
        config: Options of the engine.
    """
    most = config.prefill_budget
    sparse = config.prefills_sparsely(method) and not exact
    if tokens is None:
        return config.page_budget(most, method.name) if sparse else None
    if tokens == 0:
        return None
    if most is None:
        raise RetrievalConfigError(
            f"prefill_budget={tokens} is not served, since all prompts attend to everything here; "
            "leave it out, or start the server with --kv-retrieval.prefill_budget."
        )
    if not sparse:
        why = "a request with exact=True" if exact else method.name
        raise RetrievalConfigError(
            f"prefill_budget={tokens} has no effect with {why}, whose prompt attends to "
            "everything; leave it out."
        )
    if method.selects_for_others and tokens != most:
        raise RetrievalConfigError(
            f"prefill_budget={tokens} must be {most} or 0 with {method.name}, whose filters select "
            "as much for all requests."
        )
    if tokens > most:
        raise RetrievalConfigError(
            f"prefill_budget={tokens} exceeds the server's {most}. Ask for less, or for 0: full "
            f"attention; or start the server with --kv-retrieval.prefill_budget {tokens}."
        )
    return config.page_budget(tokens, method.name, key="prefill_budget")


def _prefill_share(
    share: float | None,
    budget: PageBudget | None,
    method: Method,
    exact: bool,
    config: RetrievalConfig,
) -> float:
    """The share of the tokens before a chunk of the prompt that it attends to, at least.

    Args:
        share: ``prefill_share`` of the request; None: it names none.
        budget: See :func:`_prefill_budget`, which returns it.
        method, exact, config: See there.
    """
    most = config.prefill_share
    if share is None:
        return 0.0 if budget is None or most is None else most
    if share == 0:
        return 0.0
    if not most:
        why = "all prompts attend to everything here" if most is None else "the server has none"
        raise RetrievalConfigError(
            f"prefill_share={share} is not served, since {why}; leave it out, or start the server "
            f"with --kv-retrieval.prefill_budget and --kv-retrieval.prefill_share {share}."
        )
    if budget is None:
        why = "prefill_budget=0" if config.prefills_sparsely(method) else method.name
        why = "a request with exact=True" if exact else why
        raise RetrievalConfigError(
            f"prefill_share={share} has no effect with {why}, whose prompt attends to everything; "
            "leave it out."
        )
    if share > most:
        raise RetrievalConfigError(
            f"prefill_share={share} exceeds the server's {most}. Ask for less, or for 0: "
            f"prefill_budget alone; or start the server with --kv-retrieval.prefill_share {share}."
        )
    return share


def _drafts(tokens: int | None, config: RetrievalConfig) -> int:
    """The most draft tokens at a step of a request that names so many; None: it names none."""
    most = config.drafts
    if tokens is None:
        return most
    if tokens > most:
        raise RetrievalConfigError(
            f"drafts={tokens} exceeds the server's {most}. Ask for less, or start the server with "
            f"--kv-retrieval.drafts {tokens}."
        )
    return tokens


def _lossless(
    value: Mapping[str, Any], method: Method, drafts: int, config: RetrievalConfig
) -> bool:
    """Whether steps over the whole context verify what the model drafts over the budget's pages.

    Args:
        value: Checked options that the request names.
        method, config: See :func:`_prefill_budget`.
        drafts: The most draft tokens at a step.
    """
    drafting = type(method) in having("lossless", of_request=True) and drafts > 0
    if "lossless" not in value:
        return config.lossless and drafting and value.get("exact", True)
    if not value["lossless"]:
        return False
    if not config.drafts:
        raise RetrievalConfigError(
            "lossless=True needs a server that drafts; ask for exact=True, or start the server "
            "with --kv-retrieval.drafts 5."
        )
    if not drafts:
        raise RetrievalConfigError(
            "lossless=True drafts tokens, and drafts=0 allows none; leave one out."
        )
    if not value.get("exact", True):
        raise RetrievalConfigError(
            "lossless=True and exact=False contradict each other; leave one out."
        )
    return True


def _given(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that a request names, nested or flat; see :meth:`RequestOptions.parse`."""
    extra_args = extra_args or {}
    nested = extra_args.get(CONFIG_KEY, {})
    check_digits(CONFIG_KEY, nested)
    if not isinstance(nested, Mapping):
        raise RetrievalConfigError(
            f"{CONFIG_KEY}={shortened(nested)} must be a mapping of options; over HTTP use flat "
            "keys "
            f'such as "{CONFIG_KEY}_budget".'
        )
    prefix = CONFIG_KEY + "_"
    flat = {k.removeprefix(prefix): v for k, v in extra_args.items() if k.startswith(prefix)}
    others = {k: v for k, v in extra_args.items() if not k.startswith(prefix)}
    right = f'{CONFIG_KEY}={{"budget": 512}} or {prefix}budget=512'
    reject_misspelt(others, CONFIG_KEY, "options of a request", right)
    check_digits(CONFIG_KEY, flat)
    return {**nested, **flat}
