"""The ``--kv-retrieval`` command-line option."""

import argparse
import json
import sys
from typing import Any

from vllm_kvretrieval.command_line import OPTION, TARGET
from vllm_kvretrieval.options.help import help_texts
from vllm_kvretrieval.options.table import CONFIG_KEY
from vllm_kvretrieval.retrieval.presets import presets

REQUEST_CHECK = "vllm_kvretrieval.platforms.http.RequestCheck"
"""The layer in front of the routes of vLLM's server that checks options of requests."""
MIDDLEWARE = "--middleware"
WITHOUT_MIDDLEWARE = "snapshot"
"""A command of vLLM that takes the options of its server, and refuses ``--middleware``."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--kv-retrieval`` to a parser of engine arguments, and the check of requests to it.

    vLLM folds ``--kv-retrieval.budget 1024`` into ``--kv-retrieval '{"budget": 1024}'``. What is
    given ends up in ``additional_config["kv_retrieval"]``, beside what ``--additional-config``
    has there. Of one option that is given twice, by either, the later value counts; files of
    options come before the command line.
    """
    target = parser._option_string_actions.get(TARGET)
    if target is None or OPTION in parser._option_string_actions:
        return
    routes = parser._option_string_actions.get(MIDDLEWARE)
    if routes is not None and WITHOUT_MIDDLEWARE not in sys.argv[1:2]:
        routes.default = [*routes.default, REQUEST_CHECK]
    dest, target_class = target.dest, type(target)

    class Store(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            additional = getattr(namespace, dest, None) or {}
            earlier = _options(self, additional)
            setattr(namespace, dest, {**additional, CONFIG_KEY: {**earlier, **values}})

    class KeepStored(target_class):  # type: ignore[misc, valid-type]
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            earlier = _options(self, getattr(namespace, dest, None) or {})
            if earlier:
                values = {**values, CONFIG_KEY: {**earlier, **_options(self, values)}}
            super().__call__(parser, namespace, values, option)

    target.__class__ = KeepStored
    options = "\n".join(f"- {OPTION}.{key}: {text}" for key, text in help_texts().items())
    methods = ", ".join(f"{name} ({m.summary})" for name, m in presets().items())
    group = parser.add_argument_group(
        "kv-retrieval",
        f"KV-cache retrieval; needs --attention-backend with one of: {methods}.",
    )
    group.add_argument(
        OPTION,
        action=Store,
        type=_json_mapping,
        default=argparse.SUPPRESS,
        metavar="JSON",
        help="Options of KV-cache retrieval, as JSON or one by one "
        "(--kv-retrieval.budget 1024):\n\n" + options.replace("%", "%%"),
    )


def _options(action: argparse.Action, additional: Any) -> dict[str, Any]:
    """The options in a value of ``--additional-config``, which may be none."""
    options = additional.get(CONFIG_KEY, {}) if isinstance(additional, dict) else additional
    if not isinstance(options, dict):
        raise argparse.ArgumentError(
            action,
            f"{CONFIG_KEY} must be a JSON object such as {{'budget': 1024}}, got {options!r}",
        )
    return options


def _json_mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"expected a JSON object such as '{{\"budget\": 1024}}', got {text!r}"
        )
    return value
