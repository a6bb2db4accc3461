"""Time of kernels and of the scheduler alone, over random data, without an engine or a model.

`python -m benchmarks.ops COMMAND --help` shows the options of a command.
"""

import sys
from collections.abc import Sequence

from benchmarks import cli

COMMANDS = {
    "attention": "attention of a decode step over selected pages, beside vLLM's kernel",
    "prompt-attention": "attention of prompts and over whole contexts, beside vLLM's kernel",
    "prefill-layer": "a layer's attention with sparse prefill, beside exact prefill",
    "linear": "linear layers in 16 bits on a CPU with AVX2 only, beside PyTorch's",
    "quantised": "linear layers with weights of 8 and 4 bits, beside PyTorch's and 16 bits",
    "planning": "choosing pages or tokens by each index, and building the index",
    "token-reads": "reading single tokens from a file, or the pages that hold them",
    "drafters": "tokens per step with drafts from the context, ours beside others",
    "scheduler": "a step of the scheduler, and looking up a prefix, beside vLLM's",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status. See `cli.main`."""
    return cli.main("benchmarks.ops", __doc__, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
