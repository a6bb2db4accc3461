"""A model reads a novel in transformers, and shows its queries and keys to a program."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import texts
from benchmarks.cli import QWEN, SMOLLM2, add_output
from benchmarks.common import Stopwatch, result_header, settings, write_json
from vllm_kvretrieval.observed_model import CHUNK, ObservedModel, Seen

Row = dict[str, Any]


def read(model: ObservedModel, tokens: int, queries: int, observe: Callable[[Seen], None]) -> None:
    """Show queries that are evenly spaced among the last ``CHUNK`` tokens.

    Raises:
        ObservationError: The text cannot be measured.
    """
    text = model.tokens_of("\n\n".join(texts.paragraphs()), tokens)
    places = tokens - CHUNK + torch.arange(1, queries + 1) * CHUNK // queries - 1
    model.read(text, places, observe)


def add_arguments(
    parser: argparse.ArgumentParser,
    tokens: int,
    output: str,
    queries: int = 32,
    models: Sequence[Path] = (SMOLLM2, QWEN),
) -> None:
    """Add the options: models, tokens of the novel, queries, and the file of results."""
    add = parser.add_argument
    add("--model", type=Path, nargs="+", default=list(models), metavar="PATH", help="checkpoints")
    add("--tokens", type=int, default=tokens, help="tokens of the novel")
    add("--queries", type=int, default=queries, help=f"queries, among the last {CHUNK} tokens")
    add_output(parser, output)


def run(
    args: argparse.Namespace,
    least: int,
    measure: Callable[[Path, int, int], list[Row]],
    table: Callable[[Mapping[str, Any], Mapping[str, str]], str],
    **further: Any,
) -> int:
    """Measure each model, print a table, and store the rows.

    Args:
        args: See :func:`add_arguments`.
        least: The fewest tokens.
        measure: Makes the rows of a model, from its path, tokens and queries.
        table: Draws all rows.
        further: Settings of the program, beside the options.
    """
    if args.tokens < least or args.tokens % CHUNK:
        args.usage_error(f"--tokens must be a multiple of {CHUNK}, {least} or more")
    if not 1 <= args.queries <= CHUNK:
        args.usage_error(f"--queries must be from 1 to {CHUNK}")
    clock, rows = Stopwatch(), list[Row]()
    header = result_header("benchmarks.quality") | {"settings": settings(args) | further}
    for model in args.model:
        print(f"[{clock}] {model.name}", flush=True)
        rows += measure(model, args.tokens, args.queries)
        write_json(args.output, {**header, "rows": rows})
    print(f"{table({'': {'rows': rows}}, {})}\nresults: {args.output}\ntime:    {clock}")
    return 0
