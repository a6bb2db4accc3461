"""Options on a command line, or in its YAML file, that vLLM's parser would lose or misread.

The parser drops a line ``name: false`` of the file that ``--config`` names, and separates ``true``
and lists from their option. vLLM calls plug-ins before it parses, so all of this can be refused,
with the right spelling in the message.
"""

import contextlib
import difflib
import json
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.table import CONFIG_KEY
from vllm_kvretrieval.retrieval.presets import backend_names

OPTION = "--kv-retrieval"
TARGET = "--additional-config"
BACKEND = "--attention-backend"
LIKE = 0.8
"""How like two names are, of which one is the other misspelt; of difflib's ratio."""

_NAME = re.compile(r"(no-)?(?:kv[-_]retrieval|additional[-_]config\.kv_retrieval)(?:\.(.+))?")

WITHOUT_PLUGINS = (
    ("bench", "latency"),
    ("bench", "startup"),
    ("bench", "mm-processor"),
    ("preload",),
)
"""Commands of vLLM whose parsers plug-ins cannot add options to."""
CLIENTS = (("bench", "serve"), ("chat",), ("complete",))
"""Commands of vLLM that ask a server."""


def check_command_line(arguments: Sequence[str]) -> None:
    """Refuse options that vLLM's parser would misunderstand.

    Args:
        arguments: The command line as in ``sys.argv``, the program first.

    Raises:
        RetrievalConfigError: Names the option and says how to write it.
    """
    given = list(_options(arguments))
    _check_command(arguments, given)
    for name, key, value in given:
        if name.startswith("--no-"):
            raise RetrievalConfigError(
                f"{name} is no option; write {OPTION}.{key or 'allow_exact'} false."
            )
        if key and (value is None or value.startswith("--")):
            raise RetrievalConfigError(
                f"{name} has no value; write {OPTION}.{key} true, or another value."
            )
    _check_spelling(arguments)
    _check_overrides(arguments)
    for place, argument in enumerate(arguments):
        name, equals, path = argument.partition("=")
        if name == "--config":
            path = path if equals else next(iter(arguments[place + 1 :]), "")
            whole = any(not key and name.startswith("--kv") for name, key, _ in given)
            _check_file(path, bool(equals), whole)


def serve_arguments(arguments: Sequence[str]) -> Namespace:
    """The arguments of ``vllm serve``, as it parses them.

    Args:
        arguments: The arguments behind ``vllm serve``.

    Raises:
        RetrievalConfigError: See :func:`check_command_line`.
        SystemExit: An argument is unknown or has no value.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    check_command_line(["vllm", "serve", *arguments])
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers())
    given: Namespace = parser.parse_args(["serve", *arguments])
    if given.model_tag is not None:
        given.model = given.model_tag
    return given


def _check_overrides(arguments: Sequence[str]) -> None:
    """Refuse overridden rotations that a retrieval backend would never be asked about."""
    backend, overrides = "", dict[str, Any]()
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        value = value if equals else next(iter(arguments[place + 1 :]), "")
        first, *path = name.split(".")
        if name == BACKEND:
            backend = value.lower()
        elif first in ("--hf-overrides", "--hf_overrides"):
            with contextlib.suppress(yaml.YAMLError, AttributeError, TypeError):
                place_in: Any = overrides
                for key in path[:-1]:
                    place_in = place_in.setdefault(key, {})
                given = yaml.safe_load(value)  # JSON is YAML
                place_in |= {path[-1]: given} if path else given if isinstance(given, dict) else {}
    if backend in backend_names():
        from vllm_kvretrieval.upstream.rotations import check_override

        check_override(overrides)


def _check_spelling(arguments: Sequence[str]) -> None:
    """Refuse names that are nearly ours: vLLM would call them unknown, and list all of its own."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        name, dot, key = name.partition(".")
        if name.startswith("--") and LIKE <= _likeness(name) < 1:
            raise RetrievalConfigError(f"there is no {name}{dot}{key}; write {OPTION}{dot}{key}.")
        if name == BACKEND and not dot:
            named = value if equals else next(iter(arguments[place + 1 :]), "")
            _check_method(named)


def _likeness(name: str) -> float:
    """How like a name is to that of our option; 1: it is its name."""
    return difflib.SequenceMatcher(None, name.replace("_", "-"), OPTION).ratio()


def _check_method(named: str) -> None:
    """Refuse the name of a backend that is none, and is nearly one of ours."""
    near = difflib.get_close_matches(named.lower(), backend_names(), 1, LIKE)
    if not near or near[0] == named.lower():
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if named.upper() not in AttentionBackendEnum.__members__:
        raise RetrievalConfigError(f"{BACKEND} {named}: there is none; write {near[0]}.")


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str | None, str | None]]:
    """Our options: the name as written, the key after the first dot, and the value, if any."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.startswith("--") and (match := _NAME.fullmatch(name[2:])):
            following = next(iter(arguments[place + 1 :]), None)
            yield name, match[2], value if equals else following


def _check_command(
    arguments: Sequence[str], given: Sequence[tuple[str, str | None, str | None]]
) -> None:
    """Refuse ``--kv-retrieval`` with a command that does not know it."""
    written = [(name, key) for name, key, _ in given if not name.startswith(TARGET)]
    if not written:
        return
    name, key = written[0]
    for command in WITHOUT_PLUGINS:
        if tuple(arguments[1 : 1 + len(command)]) == command:
            right = f"{TARGET}.{CONFIG_KEY}" + (f".{key}" if key else "")
            raise RetrievalConfigError(
                f"vllm {' '.join(command)} does not know {name}: vLLM lets no plug-in add options "
                f"to it. Write {right}, which all of vLLM's commands with an engine know."
            )
    for command in CLIENTS:
        if tuple(arguments[1 : 1 + len(command)]) == command:
            raise RetrievalConfigError(
                f"vllm {' '.join(command)} has no engine: give {name} to the server (vllm serve). "
                "What a request may choose goes into its body; of vllm bench serve, for instance: "
                f"""--extra-body '{{"vllm_xargs": {{"{CONFIG_KEY}_budget": 512}}}}'."""
            )


def _check_file(path: str, equals: bool, whole: bool) -> None:
    """Refuse lines of a YAML file that vLLM would lose, misread, or prefer to the command line.

    Args:
        path: The path of the file.
        equals: Whether the path follows ``--config=``, a spelling that vLLM ignores.
        whole: Whether the command line has options in one JSON object.
    """
    lines = _lines(path)
    ours = {str(name): match[2] for name in lines if (match := _NAME.fullmatch(str(name)))}
    if ours and equals:
        raise RetrievalConfigError(
            f"vLLM does not read --config={path}, which has options of KV retrieval; write "
            f"--config {path}."
        )
    for name, key in ours.items():
        value = lines[name]
        if value is None or isinstance(value, bool | list):
            raise RetrievalConfigError(
                f"{path}: vLLM would lose or misread '{name}: {_yaml(value)}', as it does with "
                "true, false, lists and nothing at the top of a file. Write "
                f"'{_nested(key, value)}'."
            )
        if key and whole:
            raise RetrievalConfigError(
                f"{path}: '{name}: {_yaml(value)}' would win over {OPTION} of the command line, "
                f"since vLLM reads names with a dot last. Write '{_nested(key, value)}'."
            )


def _nested(key: str | None, value: Any) -> str:
    """The spelling of an option in a file that vLLM understands."""
    text, keys = (_yaml(value), key.split(".")) if key else ("1024", ["budget"])
    for part in reversed(keys):
        text = f"{{{part}: {text}}}"
    return f"kv-retrieval: {text}"


def _lines(path: str) -> Mapping[str, Any]:
    """The top level of a YAML file; empty if there is no file, which vLLM reports itself."""
    try:
        lines = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return lines if isinstance(lines, Mapping) else {}


def _yaml(value: Any) -> str:
    """A value as it is written in a file."""
    return json.dumps(value, default=str)
