"""The plot of an explanation; needs matplotlib, which the package does not."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_kvretrieval.explain.report import HeadAttention, borders, sums

BINS = 600
"""Parts of a prompt that are told apart."""


def plot(path: Path, result: dict[str, Any], heads: Sequence[HeadAttention]) -> None:
    """Write a PNG: entropies and budgets by layer, then per head where it looks and what is left.

    Args:
        path: Where the PNG is written.
        result: What ``explain`` writes as JSON.
        heads: The KV heads that are shown.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = 1 + 2 * len(heads)
    figure, axes = pyplot.subplots(
        rows,
        1,
        figsize=(11, 3.6 + 2.8 * len(heads)),
        height_ratios=[3, *(2, 0.6) * len(heads)],
        layout="constrained",
    )
    _draw_layers(axes[0] if rows > 1 else axes, result)
    for place, head in enumerate(heads):
        _draw_head(axes[1 + 2 * place], axes[2 + 2 * place], head, result)
    figure.suptitle(
        f"{result['model']}, {result['text']}: {result['tokens']} tokens; {result['method']}, "
        f"budget {result['budget']}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_layers(axes: Any, result: dict[str, Any]) -> None:
    """Budgets as bars, tokens kept or selected as marks, entropies as a line."""
    layers = [row["layer"] for row in result["layers"]]

    def mean(key: str) -> list[float]:
        return [sum(row[key]) / len(row[key]) for row in result["layers"]]

    axes.bar(layers, mean("entropy_budgets"), color="0.8", label="budget by entropy")
    verb = "kept" if result["drops"] else "selected"
    axes.plot(layers, mean("attended"), "_", color="C0", markersize=9, label=f"tokens {verb}")
    axes.set_xlabel("layer")
    axes.set_ylabel("tokens per KV head")
    axes.set_xticks(layers, layers, fontsize=7)
    right = axes.twinx()
    entropies = [row["entropy"] for row in result["layers"]]
    right.plot(layers, entropies, "o-", color="C3", markersize=3, label="entropy")
    right.set_ylabel("entropy of attention, nats")
    right.set_ylim(bottom=0)
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    right.legend(handles, [handle.get_label() for handle in handles], fontsize=7)


def _draw_head(upper: Any, lower: Any, head: HeadAttention, result: dict[str, Any]) -> None:
    """Attention along the prompt, and below it what is attended to."""
    ends = borders(len(head.attention), BINS)
    sizes = [end - begin for begin, end in pairwise(ends)]

    def per_token(values: Any) -> list[float]:
        return [value / size for value, size in zip(sums(values, ends), sizes, strict=True)]

    upper.stairs(per_token(head.attention), ends, fill=True, color="0.35")
    upper.set_yscale("log")
    upper.set_ylabel("attention per token")
    upper.set_xlim(0, ends[-1])
    upper.set_xticks([])
    verb, left = ("kept", "dropped") if result["drops"] else ("selected", "left out")
    upper.set_title(
        f"layer {head.layer}, KV head {head.head}: the last {result['latest']} queries; "
        f"{100 * head.share:.1f} % of the last one's attention is on what is {verb}",
        fontsize=9,
    )
    always = per_token(head.always)
    attended = per_token(head.tokens)
    lower.stairs([1.0] * len(sizes), ends, fill=True, color="0.92", label=left)
    lower.stairs(attended, ends, fill=True, color="C0", label=f"{verb} by attention")
    lower.stairs(always, ends, fill=True, color="C2", label="always")
    lower.set_xlim(0, ends[-1])
    lower.set_ylim(0, 1)
    lower.set_yticks([])
    lower.set_xlabel("position in the prompt")
    lower.legend(fontsize=7, ncols=3, loc="upper right", bbox_to_anchor=(1, -0.4))
