"""Time and memory of whole engines that serve a model, beside vLLM alone.

Every command but `fits` starts engines on this machine's CPU, so a quiet machine is needed.
`make models` builds the checkpoints. `python -m benchmarks.serving COMMAND --help` shows the
options.
"""

import sys
from collections.abc import Sequence

from benchmarks import cli

COMMANDS = {
    "decode": "decode steps and times to the first token, beside vLLM alone",
    "speculative": "answers with drafts that steps verify, beside those without",
    "verifying": "steps that verify drafts, beside those that do not",
    "load": "a server under load: first token and further ones, by requests at once",
    "disk": "decode steps with the KV cache on disk",
    "capacity": "tokens of context that fit into the same memory, with the KV cache on disk",
    "fits": "what contexts of widely used models fit in a machine, by arithmetic alone",
    "soak": "memory and answers of a server over hours, with clients that come and go",
    "store": "time to the first token after a restart, with a store of KV caches",
    "peers": "other engines on this machine: times, memory, a pass key",
    "observation": "time for watching a prompt, by methods that drop tokens",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status. See `cli.main`."""
    return cli.main("benchmarks.serving", __doc__, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
