"""The ``vllm-kvretrieval`` command."""

import argparse
import sys
from collections.abc import Sequence

from vllm_kvretrieval import __version__
from vllm_kvretrieval.calibration.command import add_calibrate
from vllm_kvretrieval.calibration.heads_command import add_heads
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.explain.command import add_explain
from vllm_kvretrieval.store.command import add_store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="vllm-kvretrieval", description="Tools for KV-cache retrieval with vLLM."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_calibrate(commands)
    add_explain(commands)
    add_heads(commands)
    add_store(commands)
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except (RetrievalConfigError, ValueError, OSError) as error:
        print(f"vllm-kvretrieval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
