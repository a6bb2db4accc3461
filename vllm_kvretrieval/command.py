"""The ``vllm-kvretrieval`` command."""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence

from vllm_kvretrieval import __version__
from vllm_kvretrieval.doctor.command import add_doctor
from vllm_kvretrieval.errors import RetrievalConfigError

NEED_VLLM = {
    "calibration.command": "add_calibrate",
    "explain.command": "add_explain",
    "calibration.heads_command": "add_heads",
    "store.command": "add_store",
}
"""Modules of subcommands that import vLLM, each with the function that adds its subcommand."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="vllm-kvretrieval", description="Tools for KV-cache retrieval with vLLM."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_doctor(commands)
    if importlib.util.find_spec("vllm") is not None:
        for module, add in NEED_VLLM.items():
            getattr(importlib.import_module(f"vllm_kvretrieval.{module}"), add)(commands)
    else:
        parser.epilog = "vLLM is not installed here: `vllm-kvretrieval doctor` says what to do."
        parser.usage = f"%(prog)s [-h] [--version] COMMAND ...\n\n{parser.epilog}"
    own = list(sys.argv[1:] if arguments is None else arguments)
    end = own.index("--") if "--" in own else len(own)
    given, engine = parser.parse_args(own[:end]), own[end + 1 :]
    if hasattr(given, "engine"):
        given.engine = engine
    elif engine:
        parser.error("options of an engine, behind --, are for `store add` alone")
    try:
        return given.run(given) or 0
    except (RetrievalConfigError, ValueError, OSError) as error:
        print(f"vllm-kvretrieval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
