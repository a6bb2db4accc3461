"""``vllm-kvretrieval heads``: find the KV heads of a model that need whole contexts."""

import argparse
from pathlib import Path
from typing import Any

from vllm_kvretrieval.command_inputs import add_inputs, count, seed, share, versions, write
from vllm_kvretrieval.retrieval.head_sets import places_of
from vllm_kvretrieval.retrieval.heads import FORMAT, SHARE, choose_heads
from vllm_kvretrieval.retrieval.model_files import name_of, shape_of

MOST_TOKENS = 2500
"""Random tokens of a repetition, as in the paper."""
DEFAULT_QUERIES = 512


def add_heads(commands: Any) -> None:
    """Add the subcommand to a parser's."""
    parser = commands.add_parser(
        "heads",
        help="measure which KV heads of a model look back for what they need",
        description="Runs a model over random tokens that repeat, and measures how much attention "
        "each KV head gives to the earlier occurrences of a token (echo) and to the tokens after "
        "these (induction). Writes a file for --kv-retrieval.heads.",
    )
    add_inputs(parser, text=False)
    parser.add_argument(
        "--out", type=Path, help="file to write (default: MODEL's name and -heads.json)"
    )
    parser.add_argument(
        "--tokens",
        type=count,
        help=f"of one repetition of four (default: {MOST_TOKENS}, or what the model takes)",
    )
    parser.add_argument(
        "--queries",
        type=count,
        default=DEFAULT_QUERIES,
        help="measured, of those after the first repetition (default: %(default)s)",
    )
    parser.add_argument(
        "--share",
        type=share,
        default=SHARE,
        help="of the KV heads to show as retrieval heads; the file has the scores of all "
        "(default: %(default)s)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the tokens (default: %(default)s)")
    parser.set_defaults(run=measure)


def measure(given: argparse.Namespace) -> None:
    """Measure, write, and show.

    Raises:
        ValueError: The model cannot be measured, or options contradict each other.
    """
    import torch

    from vllm_kvretrieval.calibration.head_scores import REPEATS, HeadScores, repeated_tokens
    from vllm_kvretrieval.observed_model import ObservedModel

    model = ObservedModel(given.model, getattr(torch, given.dtype))
    most = model.longest(REPEATS * MOST_TOKENS) // REPEATS
    period = given.tokens or min(most, MOST_TOKENS)
    if period > most:
        raise ValueError(
            f"{given.model} takes contexts of up to {REPEATS * most} tokens, {REPEATS} times "
            f"{most}: use --tokens {most} or less"
        )
    excluded = model.tokenizer.all_special_ids
    tokens = repeated_tokens(model.config.vocab_size, excluded, period, given.seed)
    later = len(tokens) - period
    queries = min(given.queries, later)
    scores = HeadScores(period)
    places = period + torch.arange(1, queries + 1) * later // queries - 1
    model.read(tokens, places, scores.observe)
    layers = model.layers
    result = {
        "format": FORMAT,
        "model": name_of(given.model),
        "shape": shape_of(model.config),
        "layers": layers,
        "induction": [scores.induction(layer) for layer in layers],
        "echo": [scores.echo(layer) for layer in layers],
        "settings": {
            "tokens": period,
            "repeats": REPEATS,
            "queries": queries,
            "seed": given.seed,
            "dtype": given.dtype,
        },
        "versions": versions(),
    }
    out = given.out or Path(f"{name_of(given.model)}-heads.json")
    write(out, result, ("induction", "echo"))
    print(_summary(result, given.share))
    print(f"heads: {out} (--kv-retrieval.heads {out})")


def _summary(result: dict[str, Any], of_all: float) -> str:
    induction, echo = result["induction"], result["echo"]
    chosen = choose_heads(induction, echo, of_all)
    places = places_of(chosen)
    places.sort(key=lambda place: -induction[place[0]][place[1]])
    heads = sum(map(len, chosen))
    lines = [f"Retrieval heads of {result['model']}, {len(places)} of {heads} KV heads:"]
    lines += [
        f"  layer {result['layers'][layer]:>3}  KV head {head:>2}  "
        f"induction {induction[layer][head]:.3f}  echo {echo[layer][head]:.3f}"
        for layer, head in places
    ]
    return "\n".join(lines)
