"""The options of one request, checked against those of its engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import CONFIG_KEY, RetrievalConfig
from vllm_kvretrieval.options.values import (
    check_digits,
    reject_misspelt,
    reject_unknown,
    require_bool,
    require_int,
    require_number,
)
from vllm_kvretrieval.retrieval.budget import PageBudget
from vllm_kvretrieval.retrieval.method import Method


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request; the engine's values where the request names none.

    Attributes:
        method: Name in :attr:`RetrievalConfig.methods`.
        budget: Pages to attend to.
        correction_threshold: See :class:`RetrievalConfig`.
        exact: Full attention at every step.
        own_budget: Whether the request names its budget.
        exact_prefix: Share with other requests only keys and values that full attention has
            computed, whatever the request itself attends to.
        prefill_budget: Pages before a part of the prompt that it attends to; None: all of them.
    """

    method: str
    budget: PageBudget
    correction_threshold: float
    exact: bool = False
    own_budget: bool = False
    exact_prefix: bool = False
    prefill_budget: PageBudget | None = None

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
        options = _request_options(extra_args or {})
        reject_unknown(
            options,
            ["budget", "correction_threshold", "exact", "exact_prefix", "method", "prefill_budget"],
            f"{CONFIG_KEY} of a request",
        )
        method = options.get("method", config.method)
        served = config.methods.get(method) if isinstance(method, str) else None
        if served is None:
            raise RetrievalConfigError(
                f"kv_retrieval.method={method!r} cannot be served by this engine, which runs "
                f"{config.method}; use one of {', '.join(config.methods)}, or start the server "
                "with --kv-retrieval.also."
            )
        budget = require_int("kv_retrieval.budget", options.get("budget", config.budget))
        if budget > config.budget_limit:
            raise RetrievalConfigError(
                f"kv_retrieval.budget={budget} exceeds the server's limit of "
                f"{config.budget_limit}. Ask for less, or start the server with "
                f"--kv-retrieval.max_budget {budget}."
            )
        threshold = require_number(
            "kv_retrieval.correction_threshold",
            options.get("correction_threshold", served.correction_threshold),
        )
        if "correction_threshold" in options and not served.schedule.speculates:
            why = "does so at every step" if served.selects else "selects nothing"
            raise RetrievalConfigError(
                f"kv_retrieval.correction_threshold={threshold} has no effect with {method}, which "
                f"{why}; leave it out."
            )
        whole = served.schedule.whole
        if whole and "budget" in options:
            raise RetrievalConfigError(
                f"kv_retrieval.budget={budget} has no effect with {method}, which attends to "
                "everything; leave it out."
            )
        exact = require_bool("kv_retrieval.exact", options.get("exact", whole))
        if whole and not exact:
            raise RetrievalConfigError(
                f"kv_retrieval.exact=False cannot be had with {method}, which attends to "
                "everything; leave it out, or name another method."
            )
        if exact and not (config.allow_exact or whole):
            raise RetrievalConfigError(
                "kv_retrieval.exact=True is not allowed by this server (--kv-retrieval.allow_exact "
                f"false); ask for a budget of up to {config.budget_limit} instead."
            )
        exact_only = config.reuse == "exact"
        exact_prefix = require_bool(
            "kv_retrieval.exact_prefix", options.get("exact_prefix", exact_only)
        )
        if exact_only and not exact_prefix:
            raise RetrievalConfigError(
                "kv_retrieval.exact_prefix=False is not allowed by this server "
                "(--kv-retrieval.reuse exact), whose requests share exact prefixes only; leave it "
                "out."
            )
        try:
            pages = config.page_budget(budget, served.name)
        except RetrievalConfigError as e:
            raise RetrievalConfigError(f"kv_retrieval.{e}") from None
        named, prefill = "budget" in options, options.get("prefill_budget")
        by_page = _prefill_budget(prefill, served, exact, config)
        return cls(served.name, pages, threshold, exact, named, exact_prefix, by_page)


def _prefill_budget(
    given: Any, method: Method, exact: bool, config: RetrievalConfig
) -> PageBudget | None:
    """The pages before a part of the prompt that it attends to; None: all of them.

    Args:
        given: ``prefill_budget`` of the request, in tokens; None: the engine's.
        method: The method of the request.
        exact: Whether the request asks for full attention.
        config: Options of the engine.
    """
    key, most = "kv_retrieval.prefill_budget", config.prefill_budget
    sparse = config.prefills_sparsely(method) and not exact
    if given is None:
        return config.page_budget(most, method.name) if sparse else None
    tokens = require_int(key, given)
    if tokens == 0:
        return None
    if most is None:
        raise RetrievalConfigError(
            f"{key}={tokens} is not served, since all prompts attend to everything here; leave it "
            "out, or start the server with --kv-retrieval.prefill_budget."
        )
    if not sparse:
        why = "a request with exact=True" if exact else method.name
        raise RetrievalConfigError(
            f"{key}={tokens} has no effect with {why}, whose prompt attends to everything; leave "
            "it out."
        )
    if method.shares and tokens != most:
        raise RetrievalConfigError(
            f"{key}={tokens} must be {most} or 0 with {method.name}, whose filters select as much "
            "for all requests."
        )
    if tokens > most:
        raise RetrievalConfigError(
            f"{key}={tokens} exceeds the server's {most}. Ask for less, or for 0: full attention; "
            f"or start the server with --kv-retrieval.prefill_budget {tokens}."
        )
    try:
        return config.page_budget(tokens, method.name, key="prefill_budget")
    except RetrievalConfigError as e:
        raise RetrievalConfigError(f"kv_retrieval.{e}") from None


def _request_options(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    nested = extra_args.get(CONFIG_KEY, {})
    check_digits(CONFIG_KEY, nested)
    if not isinstance(nested, Mapping):
        raise RetrievalConfigError(
            f"{CONFIG_KEY}={nested!r} must be a mapping of options; over HTTP use flat keys "
            f'such as "{CONFIG_KEY}_budget".'
        )
    prefix = CONFIG_KEY + "_"
    flat = {k.removeprefix(prefix): v for k, v in extra_args.items() if k.startswith(prefix)}
    others = {k: v for k, v in extra_args.items() if not k.startswith(prefix)}
    right = f'{CONFIG_KEY}={{"budget": 512}} or {prefix}budget=512'
    reject_misspelt(others, CONFIG_KEY, "options of a request", right)
    check_digits(CONFIG_KEY, flat)
    return {**nested, **flat}
