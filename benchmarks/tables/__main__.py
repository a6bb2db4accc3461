"""Write tables and plots of README, docs and the journal from result files, or check them.

A page asks for a table by a comment, and this program writes the table below it::

    <!-- table: steps decode-fill.json -->
    | context | ... |
    <!-- end of table -->

The words after ``table:`` are a kind of table, files of ``benchmarks/results``, and options such
as ``budgets=256,1024``. ``--list`` prints the kinds. Tables of the options of an engine or a
request, and of metrics, take no file: they come from ``vllm_kvretrieval``.

A page asks for a plot by a link to ``plots/KIND/NAME.svg``, drawn from ``NAME.json``.

A sentence binds a figure to a cell of a table: see ``figures.py``. With ``--check`` a figure that
differs from its cell is found like a table that does.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.build import newer_commits
from benchmarks.common import RESULTS, ROOT, write_text
from benchmarks.tables import (
    certificates,
    figures,
    fits,
    gpu,
    indexes,
    load,
    metrics,
    options,
    peers,
    places,
    plots,
    presets,
    prompts,
    quality,
    speculative,
    steps,
)
from benchmarks.tables.markdown import CELL, Options, Results, read_results, source

KINDS: Mapping[str, Callable[[Results, Options], str]] = {
    "attention": indexes.attention,
    "capacity": places.capacity,
    "certificates": certificates.certificates,
    "decode": prompts.decode,
    "dense_layers": gpu.dense_layers,
    "disk": places.disk,
    "drafters": speculative.drafters,
    "first": steps.first,
    "fits": fits.contexts,
    "key_ranks": quality.key_ranks,
    "bus": gpu.bus,
    "launches": gpu.launches,
    "layers": prompts.layers,
    "levels": indexes.levels,
    "linear": indexes.linear,
    "load": load.load,
    "machines": fits.machines,
    "methods": steps.methods,
    "metrics": metrics.metrics,
    "observation": prompts.observation,
    "options": options.engine,
    "parts": steps.parts,
    "peers": peers.peers,
    "planning": indexes.planning,
    "predicted": gpu.predicted,
    "price": places.price,
    "prompts": prompts.kernels,
    "quality": quality.quality,
    "quantised": indexes.quantised,
    "queries": quality.query_similarity,
    "ratios": prompts.ratios,
    "recall": quality.recall,
    "request": options.request,
    "presets": presets.presets,
    "served": presets.served,
    "served_on_gpu": presets.served_on_gpu,
    "restarts": places.restarts,
    "ruler": quality.ruler,
    "sparse": prompts.sparse,
    "speculative": speculative.table,
    "verifying": speculative.verifying,
    "within": load.within,
    "steps": steps.steps,
    "tokens": steps.tokens,
    "turns": quality.turns,
}
"""Every kind of table, and the function that makes it of result files."""

BLOCK = re.compile(
    r"(?P<begin><!-- table: (?P<words>[^\n]*?) -->\n)(?P<table>.*?)(?P<end><!-- end of table -->)",
    re.DOTALL,
)


JOURNAL = ROOT / "benchmarks" / "journal"


class TableError(ValueError):
    """A page asks for a table that cannot be made."""


def pages() -> list[Path]:
    """Return the pages that may hold tables: README, docs, and the journal of measurements."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted(JOURNAL.glob("*.md")),
    ]


def rendered(text: str, directory: Path = RESULTS) -> str:
    """Return a page's text with every table and figure made anew from result files.

    Args:
        text: The page.
        directory: That of the result files.

    Raises:
        TableError: an unknown kind, an absent file, a block without its end, or rows that differ in
            their number of cells.
        FigureError: see :func:`figures.rendered`.
    """
    if text.count("<!-- table: ") != len(BLOCK.findall(text)):
        raise TableError("a table has no line <!-- end of table -->")
    made = functools.cache(functools.partial(_table, directory))
    text = BLOCK.sub(lambda block: f"{block['begin']}{made(block['words'])}{block['end']}", text)
    return figures.rendered(text, made)


def _table(directory: Path, asked: str) -> str:
    """The table that some words ask for, and its sources below it."""
    kind, *words = asked.split()
    if kind not in KINDS:
        raise TableError(f"unknown kind of table {kind!r}: one of {', '.join(KINDS)}")
    options = dict(word.split("=", 1) for word in words if "=" in word)
    files = [word for word in words if "=" not in word]
    try:
        results = read_results(files, directory)
        table = KINDS[kind](results, options)
    except (OSError, KeyError, LookupError) as error:
        raise TableError(f"table {asked!r}: {error!r}") from error
    if len({len(CELL.findall(line)) for line in table.splitlines()}) > 1:
        raise TableError(f"table {asked!r}: rows have not as many cells as the heading")
    sources = "".join(f"- {source(store)}\n" for store in results.values())
    return f"{table}\n{sources}"


def ages() -> list[tuple[int | None, str]]:
    """Return for each result file how many commits changed the code after it; None: unknown."""
    stores = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    builds = {name: store.get("build") for name, store in stores.items()}
    return [(build and newer_commits(build["commit"]), name) for name, build in builds.items()]


def main() -> int:
    """Write tables and plots; with ``--check`` write nothing, and return 1 where a page differs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="say which files differ, write none")
    parser.add_argument("--list", action="store_true", help="print the kinds of tables")
    parser.add_argument("--ages", action="store_true", help="print how old the result files are")
    args = parser.parse_args()
    if args.list:
        for name, make in KINDS.items():
            print(f"{name:<12} {(make.__doc__ or '').splitlines()[0]}")
        return 0
    if args.ages:
        print("commits to csrc and vllm_kvretrieval since")
        for age, name in sorted(ages(), key=lambda each: each[0] or 0, reverse=True):
            print(f"{'unknown' if age is None else age:>7} {name}")
        return 0
    written = {page: rendered(page.read_text()) for page in pages()}
    for page in pages():
        written |= plots.drawn(page)
    stale = []
    for path, new in written.items():
        if not path.exists() or path.read_text() != new:
            stale.append(path.relative_to(ROOT))
            if not args.check:
                write_text(path, new)
    for place in stale:
        print(f"{place}: {'differs from the result files' if args.check else 'written'}")
    if stale and args.check:
        print("write them: python -m benchmarks.tables", file=sys.stderr)
    return int(bool(stale and args.check))


if __name__ == "__main__":
    sys.exit(main())
