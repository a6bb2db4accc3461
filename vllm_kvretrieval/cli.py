"""The ``--kv-retrieval`` command-line option."""

import argparse
import json
from typing import Any

from vllm_kvretrieval.config import CONFIG_KEY, HELP
from vllm_kvretrieval.retrieval.methods import METHODS

OPTION = "--kv-retrieval"
TARGET = "--additional-config"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--kv-retrieval`` to a parser of engine arguments.

    vLLM folds ``--kv-retrieval.budget 1024`` into ``--kv-retrieval '{"budget": 1024}'``. What is
    given ends up in ``additional_config["kv_retrieval"]``, beside whatever ``--additional-config``
    itself brings, whichever comes first on the command line.
    """
    target = parser._option_string_actions.get(TARGET)
    if target is None or OPTION in parser._option_string_actions:
        return
    given: dict[str, Any] = {}
    dest, parse_target = target.dest, target.type
    assert callable(parse_target), "vLLM parses --additional-config with a function"

    class Store(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            given.update(values)
            current = getattr(namespace, dest, None) or {}
            setattr(namespace, dest, _merge(current, given))

    target.type = lambda text: _merge(parse_target(text), given)
    methods = ", ".join(f"{name} ({m.summary})" for name, m in METHODS.items())
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
        "(--kv-retrieval.budget 1024):\n\n"
        + "\n".join(f"- {OPTION}.{key}: {text}" for key, text in HELP.items()).replace("%", "%%"),
    )


def _merge(additional: Any, given: dict[str, Any]) -> Any:
    if not given or not isinstance(additional, dict):
        return additional
    return {**additional, CONFIG_KEY: {**additional.get(CONFIG_KEY, {}), **given}}


def _json_mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"expected a JSON object such as '{{\"budget\": 1024}}', got {text!r}"
        )
    return value
