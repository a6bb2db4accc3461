"""The ``vllm-kvretrieval`` command."""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from vllm_kvretrieval import __version__
from vllm_kvretrieval.command_inputs import printable
from vllm_kvretrieval.doctor.command import add_doctor
from vllm_kvretrieval.errors import RetrievalConfigError

NEED_VLLM = {
    "chat.command": "add_chat",
    "calibration.filters_command": "add_calibrate",
    "explain.command": "add_explain",
    "calibration.certify_command": "add_certify",
    "calibration.heads_command": "add_heads",
    "calibration.prompt_shares_command": "add_prompt_shares",
    "store.command": "add_store",
}
"""Modules of subcommands that import vLLM, each with the function that adds its subcommand."""


def _add_others(commands: Any) -> str:
    """Add the subcommands that import vLLM; returns why that is impossible, empty if it is not."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here"
    try:
        modules = {importlib.import_module(f"vllm_kvretrieval.{m}"): m for m in NEED_VLLM}
    except (ImportError, OSError) as error:  # a library of torch's may be missing, too
        return f"vLLM cannot be imported here ({error})"
    for module, name in modules.items():
        getattr(module, NEED_VLLM[name])(commands)
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # also while libraries are imported
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm-kvretrieval", description="Tools for KV-cache retrieval with vLLM."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_doctor(commands)
    if why := _add_others(commands):
        parser.epilog = f"{why}: `vllm-kvretrieval doctor` says what to do."
        parser.usage = f"%(prog)s [-h] [--version] COMMAND ...\n\n{parser.epilog}"
    own = list(sys.argv[1:] if arguments is None else arguments)
    end = own.index("--") if "--" in own else len(own)
    given, engine = parser.parse_args(own[:end]), own[end + 1 :]
    if hasattr(given, "engine"):
        given.engine = engine
    elif engine:
        parser.error(
            "options of an engine, behind --, are for `chat`, `certify` and `store add` alone"
        )
    try:
        return given.run(given) or 0
    except (RetrievalConfigError, ValueError, OSError, ImportError) as error:
        print(printable(f"vllm-kvretrieval: {error}"), file=sys.stderr)
        return 1
