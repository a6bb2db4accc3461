"""The command lines of the three drivers `benchmarks.serving`, `ops` and `quality`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.common import MODELS, RESULTS
from benchmarks.engines import EngineError

SMOLLM2 = MODELS / "SmolLM2-135M-Instruct"
SMOLLM2_32K = MODELS / "SmolLM2-135M-Instruct-32K"
QWEN = MODELS / "Qwen2.5-Coder-0.5B-Instruct"
GEMMA3 = MODELS / "gemma-3-270m"


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the lines of a description, and adds defaults to the options' help."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.default is None or action.default in (False, [], {}, ())
        return action.help if nothing else super()._get_help_string(action)


def main(
    driver: str,
    about: str | None,
    commands: Mapping[str, str],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a command of a driver.

    The module of a command has its name, with ``_`` for ``-``, and lies in the driver's package. It
    is imported if the command is called. Its docstring is the command's description,
    ``add_arguments(parser)`` adds the options, and ``run(args)`` returns the exit status.

    Args:
        driver: the driver's package, such as ``benchmarks.serving``.
        about: what the driver measures.
        commands: a line of help for each command.
        arguments: the words of the command line; those of the process by default.

    Returns:
        The exit status: that of the command; 2 if it could not run, 130 if it was interrupted.
    """
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog=f"python -m {driver}", description=about, formatter_class=Formatter
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, line in commands.items():
        command = subparsers.add_parser(name, help=line, formatter_class=Formatter)
        if name in words[:1]:
            module = import_module(f"{driver}.{name.replace('-', '_')}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run, usage_error=command.error)
    args = parser.parse_args(words)
    try:
        status: int = args.run(args)
    except (EngineError, FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        print(f"\n{parser.prog} {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return status


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """Add ``--output``, the result file; ``name`` is its name in `RESULTS` by default."""
    add = parser.add_argument
    add("--output", type=Path, default=RESULTS / name, metavar="FILE", help="result file (JSON)")


def add_model(parser: argparse.ArgumentParser, default: Path) -> None:
    """Add ``--model``, the directory of a checkpoint."""
    parser.add_argument("--model", type=Path, default=default, metavar="PATH", help="checkpoint")


def add_tokens(
    parser: argparse.ArgumentParser, name: str, default: Sequence[int] | None, text: str
) -> None:
    """Add an option that takes numbers of tokens, or of requests."""
    parser.add_argument(name, type=int, nargs="+", default=default, metavar="N", help=text)
