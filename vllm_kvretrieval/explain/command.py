"""``vllm-kvretrieval explain``: what a prompt's attention looks like, and what a method leaves."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError

from vllm_kvretrieval.command_inputs import (
    add_inputs,
    count,
    number,
    read_text,
    require_plot,
    versions,
    write,
)
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.families import DroppingMethod
from vllm_kvretrieval.retrieval.heads import MEASURE
from vllm_kvretrieval.retrieval.keeping import ALL
from vllm_kvretrieval.retrieval.model_files import name_of
from vllm_kvretrieval.retrieval.presets import EXPLAINED, preset_names
from vllm_kvretrieval.retrieval.prompt_shares import MEASURE as MEASURE_PROMPT_SHARES

if TYPE_CHECKING:
    from vllm_kvretrieval.explain.explanation import Explanation

FORMAT = "vllm-kvretrieval explanation, version 1"
DEFAULT_BUDGET = 1024
DEFAULT_OBSERVATION = 32
DEFAULT_ANSWER = 32
"""Tokens that a server is asked for."""


def add_explain(commands: Any) -> None:
    """Add the subcommand to a parser's."""
    parser = commands.add_parser(
        "explain",
        help="show what a model attends to in a prompt, and what a method leaves of it",
        description="Reads a text as a prompt. Shows how widely each layer looks (the entropy of "
        "its attention) and the budgets that follow, and for some KV heads where they look, and "
        "which tokens a method keeps or selects.",
    )
    add_inputs(parser)
    parser.add_argument(
        "--method",
        choices=preset_names(),
        default=EXPLAINED,
        metavar="METHOD",
        help="as --attention-backend calls it (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=count,
        default=DEFAULT_BUDGET,
        help="tokens per KV head on average (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill-budget",
        type=count,
        metavar="TOKENS",
        help="show what sparse prefill with this prefill_budget would leave of the attention of "
        "the prompt's last chunk, too",
    )
    parser.add_argument(
        "--prefill-share",
        type=float,
        metavar="SHARE",
        help="with --prefill-budget: the prefill_share beside it",
    )
    parser.add_argument(
        "--prefill-budget-shares",
        metavar="FILE",
        help=f"with --prefill-budget: what '{MEASURE_PROMPT_SHARES}' wrote, or uniform (default: "
        "what is known of the model)",
    )
    parser.add_argument(
        "--prefill-depth",
        type=float,
        metavar="SHARE",
        help="with --prefill-budget: the prefill_depth beside it",
    )
    parser.add_argument(
        "--observation",
        type=_observation,
        help=f"queries at the prompt's end whose attention counts, or {ALL} (default: the "
        f"method's; {DEFAULT_OBSERVATION} where it has none)",
    )
    parser.add_argument(
        "--heads",
        metavar="FILE",
        help=f"for methods that have retrieval heads: what '{MEASURE}' wrote (default: what is "
        "known of the model)",
    )
    parser.add_argument(
        "--layer",
        type=number,
        nargs="+",
        metavar="N",
        help="to be shown (default: the one that looks widest)",
    )
    parser.add_argument(
        "--head",
        type=number,
        nargs="+",
        metavar="N",
        help="KV heads of these to be shown (default: of each layer the one whose last query "
        "misses most)",
    )
    parser.add_argument("--tokens", type=count, help="of the text (default: all)")
    parser.add_argument("--plot", type=Path, help="PNG to draw (default: MODEL's name-explain.png)")
    parser.add_argument("--no-plot", action="store_true", help="draw none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="to write the numbers to")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="to write a page for browsers to: every layer and KV head, the passages of the text, "
        "and the last tokens as steps",
    )
    parser.add_argument(
        "--url",
        help="with --html: a running server, which continues the text; the page shows what its "
        "answer attended to (MODEL is what the server calls its model)",
    )
    parser.add_argument(
        "--answer-tokens",
        type=count,
        default=DEFAULT_ANSWER,
        metavar="N",
        help="with --url: tokens of the answer (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("VLLM_API_KEY"),
        help="with --url: of the server (default: VLLM_API_KEY of the environment)",
    )
    parser.set_defaults(run=explain)


def explain(given: argparse.Namespace) -> None:
    """Read, measure, print, write and draw.

    Raises:
        ValueError: The model or the text cannot be measured, or options contradict each other.
    """
    if given.url is not None:
        _explain_request(given)
        return
    if not given.no_plot:
        require_plot()
    parts = "budget", "share", "budget_shares", "depth"
    names = ["budget", "heads", *(f"prefill_{of}" for of in parts)]
    options = {name: getattr(given, name) for name in names}
    options = {name: value for name, value in options.items() if value is not None}

    from vllm_kvretrieval.explain.served import served_options

    options = served_options(given.model, given.method, options)
    config = RetrievalConfig.from_options(given.method, options)
    if config.own.selects_for_others:
        raise ValueError(
            f"--method {given.method}: its filters select for the layers after them, which is not "
            "shown here; vllm-kvretrieval calibrate measures them. Use another method"
        )
    if config.own.observes and given.observation is not None:
        options["observation"] = given.observation
        config = RetrievalConfig.from_options(given.method, options)
    own, observed = config.own, _observed(given.observation)
    if isinstance(own, DroppingMethod):
        observed = own.keeping.observation
    text = read_text(given.text)

    import torch

    from vllm_kvretrieval.explain.explanation import check_heads, explain_prompt
    from vllm_kvretrieval.explain.observed_attention import LATEST
    from vllm_kvretrieval.explain.output import head_row, table
    from vllm_kvretrieval.explain.plot import plot
    from vllm_kvretrieval.observed_model import ObservedModel

    model = ObservedModel(given.model, getattr(torch, given.dtype))
    tokens = model.tokens_of(text, given.tokens)
    if len(tokens) <= given.budget:
        raise ValueError(
            f"{len(tokens)} tokens fit in --budget {given.budget}: everything is attended to. "
            "Give a longer text, or a smaller budget"
        )
    check_heads(model, given.layer, given.head)
    explained = explain_prompt(model, tokens, config, observed, given.layer, given.head)
    shown = explained.heads

    def text_of(begin: int, end: int) -> str:
        return str(model.tokenizer.decode(tokens[begin:end]))

    by_page = own.index is not None and not own.per_token
    result = {
        "format": FORMAT,
        "model": name_of(given.model),
        "text": given.text.name,
        "tokens": len(tokens),
        "method": given.method,
        "drops": own.observes,
        "budget": given.budget,
        "page_size": config.page_size if by_page else None,
        "prefill_budget": given.prefill_budget,
        "prefill_share": config.prefill_share,
        "prefill_depth": config.prefill_depth,
        "observation": ALL if observed is None else observed,
        "latest": min(LATEST, len(tokens)),
        "dtype": given.dtype,
        "layers": explained.rows,
        "heads": [head_row(head, text_of) for head in shown],
        "versions": versions(),
    }
    print(table(result))
    if given.json is not None:
        write(given.json, result, ("layers", "heads"))
        print(f"numbers: {given.json}")
    if given.html is not None:
        _write_page(given.html, result, config, explained, text_of)
        print(f"page:    {given.html}")
    if not given.no_plot:
        picture = given.plot or Path(f"{name_of(given.model)}-explain.png")
        plot(picture, result, shown)
        print(f"plot:    {picture}")


def _explain_request(given: argparse.Namespace) -> None:
    """Show what a running server attends to.

    Raises:
        OSError: The page cannot be written.
        ValueError: There is no page to write, or the server does not tell.
    """
    from vllm_kvretrieval.doctor.server import Client
    from vllm_kvretrieval.explain.live import explain_request

    if given.html is None:
        raise ValueError("--url shows a request as a page: name its file by --html")
    client, text = Client(given.url, given.api_key), read_text(given.text)
    try:
        said = explain_request(
            client, given.model, given.text.name, text, given.answer_tokens, given.html
        )
    except URLError as error:
        raise ValueError(f"no server answers at {client.url} ({error})") from None
    print(f"answer:  {said}\npage:    {given.html}")


def _write_page(
    path: Path,
    result: dict[str, Any],
    config: RetrievalConfig,
    explained: "Explanation",
    text_of: Callable[[int, int], str],
) -> None:
    from vllm_kvretrieval.explain.page import Passages, prompt_borders, prompt_rows, write_page

    ends = prompt_borders(result["tokens"])
    rows, steps = prompt_rows(config, explained, ends)
    shares = {row["layer"]: row["attention"] for row in explained.rows}
    heads = [(number, head) for number, of in shares.items() for head in range(len(of))]
    first = (explained.heads[0].layer, explained.heads[0].head) if explained.heads else heads[0]
    write_page(
        path,
        f"{result['model']}, {result['text']}: {result['tokens']} tokens",
        f"{result['method']} at a budget of {result['budget']} tokens per KV head",
        Passages.of(ends, text_of),
        rows,
        steps,
        "kept" if result["drops"] else "selected",
        shares,
        heads.index(first),
    )


def _observed(observation: int | str | None) -> int | None:
    """The observed queries for a method that does not name them itself; None: all queries."""
    if observation is None:
        return DEFAULT_OBSERVATION
    return None if observation == ALL else int(observation)


def _observation(text: str) -> int | str:
    return text if text == ALL else count(text)
