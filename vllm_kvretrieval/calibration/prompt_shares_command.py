"""``vllm-kvretrieval prompt-shares``: find how KV heads should share the budget of prompts."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvretrieval.command_inputs import add_inputs, count, read_text, versions, write
from vllm_kvretrieval.retrieval.model_files import name_of, shape_of
from vllm_kvretrieval.retrieval.prompt_shares import (
    FORMAT,
    NAME,
    PromptShareFile,
    read_prompt_shares,
)

DEFAULT_TOKENS, LEAST_TOKENS = 4096, 1024
MEAN = 8
"""Heads that select one in so many tokens on average are in the middle of the measurements."""
SHOWN = 8
"""How many of the heads with the largest shares are shown."""


def add_prompt_shares(commands: Any) -> None:
    """Add the subcommand to a parser's."""
    parser = commands.add_parser(
        "prompt-shares",
        help="measure how the KV heads of a model should share the budget of prompts",
        description="Runs a model over texts, and measures how much each KV head changes its "
        "layer's output if it selects few or many pages for chunks of them. Writes a file for "
        f"--kv-retrieval.{NAME}.",
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
        "--out", type=Path, help="file to write (default: MODEL's name and -prompt-shares.json)"
    )
    parser.add_argument(
        "--tokens",
        type=count,
        default=DEFAULT_TOKENS,
        help="of each text to read (default: %(default)s)",
    )
    parser.set_defaults(run=measure)


def measure(given: argparse.Namespace) -> None:
    """Measure, write, and show.

    Raises:
        ValueError: The model or the text cannot be measured.
    """
    texts = [read_text(path) for path in given.texts]

    import torch

    from vllm_kvretrieval.calibration.prompt_changes import (
        CHUNK,
        PAGE,
        QUERIES,
        WINDOW,
        PromptChanges,
    )
    from vllm_kvretrieval.observed_model import ObservedModel

    mean = given.tokens // MEAN // PAGE
    if given.tokens < LEAST_TOKENS:
        raise ValueError(
            f"heads that select {mean * PAGE} of {given.tokens} tokens leave hardly any out: use "
            f"--tokens {LEAST_TOKENS} or more"
        )
    # None, an eighth of the mean, and so on by twos, up to half of the text.
    pages = sorted({0, *(mean * 2**power // 8 for power in range(6))})
    model = ObservedModel(given.model, getattr(torch, given.dtype))
    measured = PromptChanges(model, pages)
    for tokens in [model.tokens_of(text, given.tokens) for text in texts]:
        measured.measure(tokens)
    changes = measured.changes
    result = {
        "format": FORMAT,
        "model": name_of(given.model),
        "shape": shape_of(model.config),
        "layers": [*changes],
        "tokens": given.tokens,
        "selected": [number * PAGE for number in pages],
        "change": [
            [[float(f"{c.square / c.tokens:.4g}") for c in head] for head in row]
            for row in changes.values()
        ],
        "settings": {
            "texts": [path.name for path in given.texts],
            "page": PAGE,
            "chunk": CHUNK,
            "window": WINDOW,
            "queries": QUERIES,
            "dtype": given.dtype,
        },
        "versions": versions(),
    }
    out = given.out or Path(f"{name_of(given.model)}-prompt-shares.json")
    write(out, result, ("change",))
    print(_summary(read_prompt_shares(out)))
    print(f"shares: {out} (--kv-retrieval.{NAME} {out})")


def _summary(file: PromptShareFile) -> str:
    retrieve = [number for number in file.layers if number > 0]  # with one dense layer
    shares = dict(zip(file.layers, file.choose(retrieve, MEAN), strict=True))
    ranked = sorted(
        ((share, n, head) for n in retrieve for head, share in enumerate(shares[n].tolist())),
        reverse=True,
    )
    least = np.array([share for share, *_ in ranked]) < 0.5
    lines = [
        f"Of {len(ranked)} KV heads of {file.model} {least.sum()} should read less than half of "
        f"the mean where that is one token in {MEAN}; most should be read by these:"
    ]
    lines += [
        f"  layer {layer:>3}  KV head {head:>2}  {share:5.2f} times the mean"
        for share, layer, head in ranked[:SHOWN]
    ]
    return "\n".join(lines)
