"""The options of one request, checked against those of its engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvretrieval.config import CONFIG_KEY, RetrievalConfig
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.parsing import (
    check_digits,
    reject_misspelt,
    reject_unknown,
    require_bool,
    require_int,
    require_number,
)
from vllm_kvretrieval.retrieval.budget import PageBudget


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
    """

    method: str
    budget: PageBudget
    correction_threshold: float
    exact: bool = False
    own_budget: bool = False
    exact_prefix: bool = False

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
            ["budget", "correction_threshold", "exact", "exact_prefix", "method"],
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
        named = "budget" in options
        return cls(served.name, pages, threshold, exact, named, exact_prefix)


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
