"""Compare methods on one document: how near to full attention, and how fast.

    python examples/compare.py MODEL TEXT --methods kvretrieval freekv --budget 512 --plot FILE

The text is read once, with full attention. Then each method continues it from the same KV cache.
The table says for how many tokens a method's continuation is that of full attention, how far its
log-probabilities of these tokens are from those of full attention, and how long a token takes. The
plot needs matplotlib, which the extra [plot] brings.

One engine serves all methods, so pages and dense layers of the first method are those of the
others, too. To see a method as its paper has it, run it alone. Options of the engine go along:

    python examples/compare.py MODEL TEXT --methods razor --options '{"heads": "heads.json"}'
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMError

from vllm_kvretrieval.chat.documents import read_document
from vllm_kvretrieval.command_inputs import require_plot
from vllm_kvretrieval.doctor.options import refusal
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.model_files import check_model

FULL = "full attention"
METHODS = ("kvretrieval", "freekv", "quest", "streamingllm")
MARKERS = "os^DvPX<>*d"
"""Shapes of the points of a plot: one more than there are colours, so that no two are alike."""
OF_ITSELF = ("streamingllm",)
"""Methods that every server offers."""


@dataclass(frozen=True)
class Row:
    """What is found about a method.

    Attributes:
        method: Its name; ``FULL`` for full attention.
        same: Tokens of the continuation before the first that differs from full attention's.
        gap: Mean distance of the log-probabilities of these tokens, in nats; NaN: there are none.
        ms: Milliseconds per token.
    """

    method: str
    same: int
    gap: float
    ms: float


@dataclass(frozen=True)
class Drawing:
    """A plot in a file, which a notebook shows.

    Attributes:
        file: A PNG.
    """

    file: Path

    def _repr_png_(self) -> bytes:
        return self.file.read_bytes()


def open_engine(
    model: str,
    methods: Sequence[str],
    budget: int,
    retrieval: Mapping[str, Any] | None = None,
    **options: Any,
) -> LLM:
    """An engine that offers the methods, the first of which is its own.

    Args:
        model: Path or name.
        methods: Names of presets.
        budget: Tokens that a decode step attends to.
        retrieval: Further options of retrieval; they win over those that follow from the others.
        options: Further options of ``LLM``.
    """
    also = [name for name in methods[1:] if name not in OF_ITSELF]
    return LLM(
        model,
        attention_backend=methods[0],
        additional_config={"kv_retrieval": {"budget": budget, "also": also, **(retrieval or {})}},
        **options,
    )


def compare(llm: LLM, text: str, methods: Sequence[str], tokens: int = 64) -> list[Row]:
    """Let full attention and then each method continue a text.

    Args:
        llm: See :func:`open_engine`.
        text: More than a budget of tokens.
        methods: Those of the engine.
        tokens: Length of the continuation.

    Raises:
        ValueError: The text fits in the budget.
        VLLMError: It is longer than the longest context.
    """
    _check_length(llm, text)
    _continue(llm, text, {"exact": True}, 1)  # reads the text
    expected, ms = _timed(llm, text, {"exact": True}, tokens)
    rows = [Row(FULL, tokens, 0.0, ms)]
    for method in methods:
        found, ms = _timed(llm, text, {"method": method}, tokens)
        pairs = list(zip(found, expected, strict=True))
        same = next((n for n, (ours, full) in enumerate(pairs) if ours[0] != full[0]), tokens)
        gaps = [abs(ours[1] - full[1]) for ours, full in pairs[:same]]
        rows.append(Row(method, same, sum(gaps) / same if same else float("nan"), ms))
    return rows


def _check_length(llm: LLM, text: str) -> None:
    """Refuse a text of which all methods attend to all tokens."""
    config = RetrievalConfig.from_vllm(llm.llm_engine.vllm_config)
    assert config is not None
    length = len(llm.get_tokenizer().encode(text))
    if config.memory_fraction is None and length <= config.budget:
        raise ValueError(
            f"the text has {length} tokens and the budget is {config.budget}, so all methods would "
            "attend to the whole text; take a longer text or a smaller budget"
        )


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [f"{'method':16} {'same tokens':>11} {'gap, nats':>10} {'ms/token':>9}"]
    lines += [f"{row.method:16} {row.same:11} {row.gap:10.4f} {row.ms:9.1f}" for row in rows]
    return "\n".join(lines)


def plot(rows: Sequence[Row], file: Path) -> Drawing:
    """Draw time against agreement, one point for each method, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for row, marker in zip(rows, itertools.cycle(MARKERS)):
        axes.scatter(row.ms, row.same, marker=marker, label=row.method, clip_on=False)
    axes.set(xlabel="milliseconds per token", ylabel="tokens as with full attention")
    axes.set_xlim(0, 1.1 * max(row.ms for row in rows))
    axes.set_ylim(0, 1.1 * max(row.same for row in rows))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(file, format="png")
    return Drawing(file)


def _timed(
    llm: LLM, text: str, options: dict[str, Any], tokens: int
) -> tuple[list[tuple[int, float]], float]:
    """A continuation, and its milliseconds per token after the first."""
    times = []
    for count in (1, tokens):
        began = time.perf_counter()
        found = _continue(llm, text, options, count)
        times.append(time.perf_counter() - began)
    return found, 1000 * (times[1] - times[0]) / (tokens - 1)


def _continue(llm: LLM, text: str, options: dict[str, Any], tokens: int) -> list[tuple[int, float]]:
    """Tokens of a greedy continuation, each with its log-probability."""
    params = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=0,
        extra_args={"kv_retrieval": options},
    )
    output = llm.generate(text, params, use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    return [
        (token, at[token].logprob)
        for token, at in zip(output.token_ids, output.logprobs, strict=True)
    ]


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error})") from None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object such as {{"sink": 128}}')
    return options


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="path or name")
    parser.add_argument("text", type=Path, help="a text file, longer than the budget")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="NAME")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument(
        "--options", type=_options, default={}, metavar="JSON", help="further ones of retrieval"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of each continuation")
    parser.add_argument("--max-model-len", type=int, help="tokens of the longest context")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a plot, too")
    given = parser.parse_args()
    if given.tokens < 2:
        parser.error("--tokens: a time per token needs 2 tokens or more")
    try:
        if given.plot is not None:
            require_plot("leave --plot out")
        text = read_document(given.text).text
        check_model(given.model)
        llm = open_engine(
            given.model,
            given.methods,
            given.budget,
            retrieval=given.options,
            max_model_len=given.max_model_len,
        )
        rows = compare(llm, text, given.methods, given.tokens)
    except (ValueError, OSError, VLLMError) as error:
        print(f"compare: {refusal(error)}", file=sys.stderr)
        return 1
    print(table(rows))
    if given.plot is not None:
        plot(rows, given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
