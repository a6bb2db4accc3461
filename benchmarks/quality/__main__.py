"""Quality of answers under KV-cache retrieval, compared with full attention, on real models.

`make models` builds the checkpoints. `python -m benchmarks.quality COMMAND --help` shows the
options of a command.
"""

import sys
from collections.abc import Sequence

from benchmarks import cli

COMMANDS = {
    "accuracy": "answers of every method, on texts and pass keys, beside full attention",
    "ruler": "scores of RULER's 13 tasks, of some that need whole prompts, and of your own",
    "table": "one table of result files, with confidence intervals",
    "prefill": "answers and times after sparse prefill, beside exact prefill",
    "recall": "share of the most attended tokens that each index finds",
    "key-ranks": "what low-rank factors of keys hold, before and after rotary embedding",
    "drafts": "rows that verify drafts, by the query that selects for them",
    "query-similarity": "how alike the queries of adjacent steps are, head by head",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status. See `cli.main`."""
    return cli.main("benchmarks.quality", __doc__, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
