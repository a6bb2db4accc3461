"""vLLM's KV hints (0.33) as options of a request.

vLLM carries an envelope of actions from its front ends to the scheduler, and leaves it to others
what the actions are. Ours are called ``kvretrieval.pin``, ``kvretrieval.unpin``,
``kvretrieval.retain`` and ``kvretrieval.prefetch``.
"""

from collections.abc import Mapping
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.table import CONFIG_KEY
from vllm_kvretrieval.values import check_digits, resembles, shortened

OURS = "kvretrieval"
VERSION = "1"
ACTIONS: Mapping[str, tuple[Mapping[str, str], Mapping[str, Any]]] = {
    f"{OURS}.pin": ({"session": "session"}, {"pin": True}),
    f"{OURS}.unpin": ({"session": "session"}, {"pin": False}),
    f"{OURS}.retain": ({"seconds": "retain"}, {}),
    f"{OURS}.prefetch": ({"session": "prefetch"}, {}),
}
"""Each action's options by the fields of its payload, all of which it has to have, and the options
that it stands for itself."""


def with_hints(extra_args: Mapping[str, Any] | None, hints: Any) -> Mapping[str, Any] | None:
    """The options of a request together with what its hints ask for.

    Args:
        extra_args: ``SamplingParams.extra_args`` of the request.
        hints: vLLM's ``KvHintsEnvelope``, or None. Actions of others are left to them.

    Raises:
        RetrievalConfigError: An action is not one of ours, though it is called so; or its options
            are given twice.
    """
    given: dict[str, Any] = {}
    for action in () if hints is None else hints.actions:
        if not resembles(action.action_type, OURS):
            continue
        for key, value in _options(action).items():
            if key in given and given[key] != value:
                raise RetrievalConfigError(
                    f"kv_hints: {key} is {shortened(given[key])} and {shortened(value)}; send one."
                )
            given[key] = value
    if not given:
        return extra_args
    options = dict(extra_args or {})
    nested = options.get(CONFIG_KEY)
    for key, value in given.items():
        twice = isinstance(nested, Mapping) and key in nested
        if twice or f"{CONFIG_KEY}_{key}" in options:
            raise RetrievalConfigError(
                f"kv_hints: {key} is also an option of the request; leave one out."
            )
        options[f"{CONFIG_KEY}_{key}"] = value
    return options


def _options(action: Any) -> dict[str, Any]:
    """The options that an action of ours stands for."""
    name, payload = action.action_type, action.payload
    check_digits("kv_hints", payload)
    if not isinstance(name, str) or name not in ACTIONS:
        raise RetrievalConfigError(
            f"kv_hints: there is no action {shortened(name)}; use one of {', '.join(ACTIONS)}."
        )
    if action.action_version != VERSION:
        raise RetrievalConfigError(
            f"kv_hints: {name} has version {shortened(action.action_version)}, and here it is "
            f"{VERSION!r}."
        )
    fields, own = ACTIONS[name]
    if not isinstance(payload, Mapping) or payload.keys() != fields.keys():
        raise RetrievalConfigError(
            f"kv_hints: the payload of {name} is {shortened(payload)}; it must have "
            f"{', '.join(fields)} and nothing else."
        )
    return {option: payload[field] for field, option in fields.items()} | dict(own)
