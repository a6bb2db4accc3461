"""``vllm-kvretrieval calibrate``: find the layers of a model that select for others."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.calibration.abilities import (
    DENSE_SHARE,
    TOLERANCE,
    FilterAbility,
    abilities,
    always_attended,
    choose_filters,
)
from vllm_kvretrieval.calibration.plot import plot
from vllm_kvretrieval.command_inputs import (
    add_inputs,
    count,
    read_text,
    require_plot,
    share,
    versions,
    write,
)
from vllm_kvretrieval.retrieval.filters import FORMAT
from vllm_kvretrieval.retrieval.model_files import name_of, shape_of
from vllm_kvretrieval.retrieval.roles import MOST_FILTERS, roles_of

if TYPE_CHECKING:
    import torch

DEFAULT_TOKENS = 8192
DEFAULT_QUERIES = 64
SELECTED_SHARE = 16
"""A layer selects one token in this many of the text, unless the user says otherwise."""


def add_calibrate(commands: Any) -> None:
    """Add the subcommand to a parser's."""
    parser = commands.add_parser(
        "calibrate",
        help="measure which layers of a model can select tokens for the layers after them",
        description="Measures the filter ability of every layer of a model: how much of the "
        "attention of later layers falls on the tokens that it gives most attention to, beside the "
        "first and last tokens, which are attended to anyway. Writes a file for "
        "--kv-retrieval.filters, and draws a plot.",
    )
    add_inputs(parser)
    parser.add_argument(
        "--out", type=Path, help="file to write (default: MODEL's name and -filters.json)"
    )
    parser.add_argument("--plot", type=Path, help="PNG to draw (default: as --out, but .png)")
    parser.add_argument("--no-plot", action="store_true", help="draw none")
    parser.add_argument(
        "--tokens", type=count, default=DEFAULT_TOKENS, help="of the text (default: %(default)s)"
    )
    parser.add_argument(
        "--queries",
        type=count,
        default=DEFAULT_QUERIES,
        help="taken from the second half of the text (default: %(default)s)",
    )
    parser.add_argument(
        "--selected",
        type=count,
        help=f"tokens that a layer selects (default: one in {SELECTED_SHARE})",
    )
    parser.add_argument(
        "--most-filters",
        type=int,
        choices=range(1, MOST_FILTERS + 1),
        default=MOST_FILTERS,
        help="filters to choose (default: up to %(default)s)",
    )
    parser.add_argument(
        "--dense-share",
        type=share,
        default=DENSE_SHARE,
        help="most of the layers that may keep reading whole contexts (default: %(default)s)",
    )
    parser.set_defaults(run=calibrate)


def calibrate(given: argparse.Namespace) -> None:
    """Measure, choose, write and draw.

    Raises:
        ValueError: The model or the text cannot be measured, or options contradict each other.
    """
    if not given.no_plot:
        require_plot()
    selected = given.selected or max(given.tokens // SELECTED_SHARE, 1)
    half = given.tokens // 2
    always = always_attended(selected)
    if selected + 2 * always > half:
        raise ValueError(
            f"--selected {selected} and twice {always} tokens that are attended to anyway must be "
            f"at most half of --tokens {given.tokens}: queries of shorter contexts would attend to "
            "all of them"
        )
    if given.queries > given.tokens - half:
        raise ValueError(
            f"--queries {given.queries} must be at most half of --tokens {given.tokens}"
        )
    text = read_text(given.text)
    out = given.out or Path(f"{name_of(given.model)}-filters.json")
    picture = None if given.no_plot else given.plot or out.with_suffix(".png")

    import torch

    from vllm_kvretrieval.observed_model import ObservedModel

    model = ObservedModel(given.model, getattr(torch, given.dtype))
    tokens = model.tokens_of(text, given.tokens)
    # The last token of each of equal stretches of the second half.
    places = torch.arange(1, given.queries + 1) * (given.tokens - half) // given.queries
    ability = FilterAbility(model.config.num_hidden_layers, selected)
    model.read(tokens, half + places - 1, ability.observe)
    if (seen := len(model.layers)) < 2:
        raise ValueError(
            f"{given.model} has {seen} layer with full attention that transformers shows: filters "
            "are of no use"
        )
    settings = {
        "text": given.text.name,
        "tokens": given.tokens,
        "queries": given.queries,
        "selected": selected,
        "sink": always,
        "window": always,
        "most_filters": given.most_filters,
        "dense_share": given.dense_share,
        "tolerance": TOLERANCE,
        "dtype": given.dtype,
    }
    result = report(given.model, model.config, model.layers, ability.similarity(), settings)
    write(out, result, ("kept",))
    print(_summary(result))
    print(f"filters: {out} (--kv-retrieval.filters {out})")
    if picture is not None:
        plot(picture, result)
        print(f"plot:    {picture}")


def report(
    model: str,
    config: Any,
    layers: list[int],
    similarity: "torch.Tensor",
    settings: dict[str, Any],
) -> dict[str, Any]:
    """The contents of the file.

    Raises:
        ValueError: No filters are possible.
    """
    choice = choose_filters(similarity, layers, settings["most_filters"], settings["dense_share"])
    roles_of(choice.filters, layers)  # fails if the file could not be read later
    ability = abilities(similarity, layers)
    return {
        "format": FORMAT,
        "model": name_of(model),
        "shape": shape_of(config),
        "filters": list(choice.filters),
        "kept_by_filters": round(choice.kept, 4),
        "dense_layers": choice.dense,
        "layers": layers,
        "abilities": {str(layer): round(share, 4) for layer, share in ability.items()},
        "kept": [
            [round(share, 4) for share in row] for row in similarity[layers][:, layers].tolist()
        ],
        "settings": settings,
        "versions": versions(),
    }


def _summary(result: dict[str, Any]) -> str:
    lines = [f"Filter ability of {result['model']}, % of later layers' attention:"]
    lines += [
        f"  layer {layer:>3}  {100 * share:5.1f}  {'#' * round(50 * share)}"
        + ("  <- filter" if int(layer) in result["filters"] else "")
        for layer, share in result["abilities"].items()
    ]
    lines.append(
        f"With filters {result['filters']}, {result['dense_layers']} of {len(result['layers'])} "
        "layers with full attention stay dense; the layers keep "
        f"{100 * result['kept_by_filters']:.1f} % of their attention on average."
    )
    return "\n".join(lines)
