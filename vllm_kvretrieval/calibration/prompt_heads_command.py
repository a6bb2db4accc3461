"""``vllm-kvretrieval prompt-heads``: find the KV heads that should read prompts in full."""

import argparse
from pathlib import Path
from typing import Any

from vllm_kvretrieval.calibration.inputs import (
    add_inputs,
    count,
    read_text,
    share,
    versions,
    write,
)
from vllm_kvretrieval.retrieval.head_sets import places_of
from vllm_kvretrieval.retrieval.model_files import name_of, shape_of
from vllm_kvretrieval.retrieval.prompt_heads import FORMAT, SHARE, PromptHeadFile

DEFAULT_TOKENS = 4096
SELECTED_PART = 8
"""Heads select one in so many tokens of the text."""


def add_prompt_heads(commands: Any) -> None:
    """Add the subcommand to a parser's."""
    parser = commands.add_parser(
        "prompt-heads",
        help="measure which KV heads of a model should read prompts in full",
        description="Runs a model over texts, and measures how much each KV head changes its "
        "layer's output if it selects pages for chunks of them. Writes a file for "
        "--kv-retrieval.prefill_heads.",
    )
    add_inputs(parser, text=False)
    parser.add_argument(
        "texts",
        metavar="TEXT",
        type=Path,
        nargs="+",
        help="plain text files (UTF-8), best of several kinds",
    )
    parser.add_argument(
        "--out", type=Path, help="file to write (default: MODEL's name and -prompt-heads.json)"
    )
    parser.add_argument(
        "--tokens",
        type=count,
        default=DEFAULT_TOKENS,
        help="of each text to read (default: %(default)s)",
    )
    parser.add_argument(
        "--select",
        type=count,
        help=f"tokens that heads select (default: one in {SELECTED_PART} of those that are read)",
    )
    parser.add_argument(
        "--share",
        type=share,
        default=SHARE,
        help="of the KV heads to show; the file has the changes of all (default: %(default)s)",
    )
    parser.set_defaults(run=measure)


def measure(given: argparse.Namespace) -> None:
    """Measure, write, and show.

    Raises:
        ValueError: The model or the text cannot be measured.
    """
    texts = [read_text(path) for path in given.texts]

    import torch

    from vllm_kvretrieval.calibration.prompts import CHUNK, PAGE, QUERIES, WINDOW, PromptHeads

    select = given.select or given.tokens // SELECTED_PART
    least = 2 * (select + WINDOW + CHUNK)
    if select < PAGE:
        raise ValueError(f"{select} tokens are less than a page of {PAGE}: use a larger --select")
    if given.tokens < least:
        raise ValueError(
            f"heads that select {select} of {given.tokens} tokens leave hardly any out: use "
            f"--tokens {least} or more, or a smaller --select"
        )
    measurement = PromptHeads(given.model, select // PAGE, getattr(torch, given.dtype))
    for tokens in [measurement.tokens_of(text, given.tokens) for text in texts]:
        measurement.measure(tokens)
    changes = measurement.changes
    result = {
        "format": FORMAT,
        "model": name_of(given.model),
        "shape": shape_of(measurement.config),
        "layers": [*changes],
        "change": [[round(c.square / c.tokens, 9) for c in row] for row in changes.values()],
        "settings": {
            "texts": [path.name for path in given.texts],
            "tokens": given.tokens,
            "selected": select // PAGE * PAGE,
            "page": PAGE,
            "chunk": CHUNK,
            "window": WINDOW,
            "queries": QUERIES,
            "dtype": given.dtype,
        },
        "versions": versions(),
    }
    out = given.out or Path(f"{name_of(given.model)}-prompt-heads.json")
    write(out, result, ("change",))
    print(_summary(result, out, given.share))
    print(f"heads: {out} (--kv-retrieval.prefill_heads {out})")


def _summary(result: dict[str, Any], out: Path, of_all: float) -> str:
    change = tuple(map(tuple, result["change"]))
    made = result["model"], result["shape"], out, tuple(result["layers"]), change
    retrieve = [number for number in result["layers"] if number > 0]  # with one dense layer
    flags = PromptHeadFile(*made).choose(of_all, retrieve)
    places = places_of(flags)
    places.sort(key=lambda place: -change[place[0]][place[1]])
    heads, total = sum(map(len, flags)), sum(map(sum, change))
    lines = [f"{len(places)} of {heads} KV heads of {result['model']} should read prompts in full:"]
    lines += [
        f"  layer {result['layers'][layer]:>3}  KV head {head:>2}  "
        f"{change[layer][head] / total:6.1%} of all change"
        for layer, head in places
    ]
    return "\n".join(lines)
