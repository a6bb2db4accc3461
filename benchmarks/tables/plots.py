"""The plots of README and docs: a page links ``plots/KIND/NAME.svg``, drawn from ``NAME.json``.

README's own also shows the runs of other engines that there are (``peers-*.json``).
"""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.common import RESULTS
from benchmarks.quality.tasks.variants import FULL, VARIANTS
from benchmarks.serving import report
from benchmarks.tables.labels import TASKS
from benchmarks.tables.labels import VARIANTS as NAMES
from benchmarks.tables.markdown import percent, read_results
from vllm_kvretrieval.retrieval.presets import EXACT, preset_names

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

LINK = re.compile(r"\((?P<path>[^()\s]*plots/(?P<kind>\w+)/(?P<name>[\w-]+)\.svg)\)")
MARKERS = "osD^v"


def drawn(page: Path, directory: Path = RESULTS) -> dict[Path, str]:
    """Draw the plots that a page links.

    Args:
        page: README, or a page of docs.
        directory: where the result files lie.

    Returns:
        The plots by their places, as SVG: the same text for the same result files.

    Raises:
        KeyError: there is no such kind of plot.
        OSError: there is no such result file.
    """
    found = {}
    for link in LINK.finditer(page.read_text()):
        kind, names = link["kind"], [f"{link['name']}.json"]
        if kind in BESIDE:
            names += sorted(path.name for path in directory.glob(BESIDE[kind]))
        figure = KINDS[kind](*read_results(names, directory).values())
        found[(page.parent / link["path"]).resolve()] = _svg(figure)
    return found


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "plots", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """A figure with panels side by side, of so many inches each."""
    figure, axes = pyplot.subplots(
        1, count, figsize=(width * count + 1.8, height), squeeze=False, layout="constrained"
    )
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    return figure, list(axes[0])


def _legend(figure: Figure, axis: Any) -> None:
    """One legend, outside of all panels."""
    figure.legend(*axis.get_legend_handles_labels(), fontsize=8, loc="outside right upper")


def steps(store: Mapping[str, Any]) -> Figure:
    """Milliseconds of a decode step over the context: a panel per batch, a line per method."""
    cells = report.pooled(store["cells"])
    batches = sorted({cell["batch"] for cell in cells})
    figure, axes = _panels(len(batches), 3.6, 3.4)
    for axis, batch in zip(axes, batches, strict=True):
        of_batch = [cell for cell in cells if cell["batch"] == batch]
        contexts = [cell["context"] for cell in of_batch]
        for name in of_batch[0]["engines"]:
            label = "vLLM alone" if name == report.pair(of_batch[0])[0] else name
            axis.plot(contexts, [report.step_ms(c, name) for c in of_batch], "o-", label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
        axis.set_ylim(bottom=0)
        axis.set(title=f"batch {batch}", xlabel="context, tokens", ylabel="decode step, ms")
    _legend(figure, axes[0])
    return figure


def tokens(store: Mapping[str, Any], *beside: Mapping[str, Any]) -> Figure:
    """Milliseconds of a token of an answer over the context, of one request.

    A panel of vLLM alone and our methods, and one for each run of other engines, which has both,
    too: figures of two runs do not share a panel.
    """
    panels = [_tokens_of_steps(store), *map(_tokens_of_peers, beside)]
    figure, axes = _panels(len(panels), 5.2 if not beside else 4.4, 3.2)
    for axis, lines in zip(axes, panels, strict=True):
        contexts = sorted({context for points in lines.values() for context in points})
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points.items()), strict=True), "o-", label=name)
        axis.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axis.set_ylim(bottom=0)
        axis.set(xlabel="context, tokens", ylabel="a token of the answer, ms")
        axis.legend(fontsize=9 if not beside else 7)
    return figure


def _tokens_of_steps(store: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Milliseconds by method and context, of a file of decode steps."""
    found: dict[str, dict[int, float]] = {}
    for cell in report.pooled(store["cells"]):
        if cell["batch"] == 1:
            for name in cell["engines"]:
                label = "vLLM alone" if name == report.pair(cell)[0] else name
                found.setdefault(label, {})[cell["context"]] = report.step_ms(cell, name)
    return found


def _tokens_of_peers(store: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """The same of a file of other engines: our methods that retrieve, and of each other program
    the fastest of its settings at the longest context that it has read."""
    found: dict[str, dict[int, float]] = {}
    for cell in store["cells"]:
        if cell["figure"] == "steps" and "value" in cell:
            found.setdefault(cell["lane"], {})[cell["context"]] = cell["value"]
    lines: dict[str, dict[int, float]] = {}
    for lane, points in sorted(found.items(), key=lambda line: line[1][max(line[1])], reverse=True):
        method = lane.split(",")[0]
        if method not in preset_names():
            lines[lane.split()[0]] = points  # the last one of a program is its fastest
        elif method != EXACT:
            lines[lane] = points
    return lines


def shares(store: Mapping[str, Any]) -> Figure:
    """KL, or answers found, over the share of the cache attended to: a panel per task."""
    cells = store["cells"]
    tasks = _tasks(cells)
    figure, axes = _panels(len(tasks), 3.8, 3.6)
    for axis, task in zip(axes, tasks, strict=True):
        for variant in VARIANTS:
            if variant.style and (points := _points(cells, task, variant.name)):
                attended = [100 * point["share"] for point in points]
                heights = [_height(point) for point in points]
                axis.plot(attended, heights, variant.style, label=_label(variant.name))
        axis.set(title=TASKS[task], xlabel="KV cache attended to, %")
        _vertical(axis, cells[f"{task}/{FULL.name}/all"])
    _legend(figure, axes[0])
    return figure


def indexes(store: Mapping[str, Any]) -> Figure:
    """KL, or answers found, by index: a panel per task, a line of the panel per index."""
    cells = store["cells"]
    tasks = _tasks(cells)
    kept = {v.name: _kept(cells, v.name) for v in VARIANTS if v.index}
    names = sorted((name for name in kept if kept[name] is not None), key=lambda n: kept[n] or 0)
    figure, axes = _panels(len(tasks), 3.4, 0.28 * len(names) + 1.2)
    for axis, task in zip(axes, tasks, strict=True):
        budgets = sorted({p["budget"] for name in names for p in _points(cells, task, name)})
        for marker, budget in zip(MARKERS, budgets, strict=False):
            found = [cells.get(f"{task}/{name}/{budget}") for name in names]
            values = [(_height(c), place) for place, c in enumerate(found) if c is not None]
            axis.plot(*zip(*values, strict=True), marker, label=f"budget {budget}")
        axis.set_yticks(range(len(names)), [])
        axis.set(title=TASKS[task], xscale="log", xlabel="KL to full attention, nats")
    sizes = (f"{_label(name)} ({percent(kept[name] or 0)})" for name in names)
    axes[0].set_yticks(range(len(names)), list(sizes), fontsize=8)
    axes[0].set_ylabel("index (share of a 16-bit cache)")
    _legend(figure, axes[0])
    return figure


def prompts(store: Mapping[str, Any]) -> Figure:
    """Seconds to the first token over the context: a line per way to read the prompt.

    Below the points of each context stand the KL to exact prefill of the sparse ones, in their
    colours.
    """
    cells = store["cells"]
    contexts = sorted({int(name.split("/")[0]) for name in cells})
    figure, axes = _panels(1, 5.6, 3.4)
    medians = {name: statistics.median(cell["prefill_s"]) for name, cell in cells.items()}
    lowest = {
        context: min(s for name, s in medians.items() if name.startswith(f"{context}/"))
        for context in contexts
    }
    below = dict.fromkeys(contexts, 14)
    for setting in dict.fromkeys(name.split("/")[1] for name in cells):
        found = {context: cells.get(f"{context}/{setting}") for context in contexts}
        points = {context: cell for context, cell in found.items() if cell is not None}
        seconds = [medians[f"{context}/{setting}"] for context in points]
        label = f"prefill budget {setting.split(':')[0]}" if ":" in setting else "full attention"
        (line,) = axes[0].plot(list(points), seconds, "o-", label=label)
        for context, cell in points.items():
            if "novel" in cell:
                kl = f"KL {cell['novel']['kl']:.4f}, {cell['copy']['kl']:.4f}"
                place = {"xytext": (0, -below[context]), "textcoords": "offset points"}
                style = {"fontsize": 7, "color": line.get_color(), "ha": "center"}
                axes[0].annotate(kl, (context, lowest[context]), **place, **style)
                below[context] += 9
    axes[0].set_xscale("log", base=2)
    axes[0].set_xticks(contexts, [f"{round(context / 1024)}K" for context in contexts])
    axes[0].set(yscale="log", xlabel="context, tokens", ylabel="first token, s")
    axes[0].margins(0.15, 0.25)
    _legend(figure, axes[0])
    return figure


def _label(variant: str) -> str:
    """The words for a variant, without Markdown."""
    return NAMES.get(variant, variant).replace("*", "").replace("`", "")


def _tasks(cells: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(cell["task"] for cell in cells.values()))


def _points(cells: Mapping[str, Any], task: str, variant: str) -> Sequence[Any]:
    """Cells of a variant, by budget."""
    found = [c for c in cells.values() if (c["task"], c["variant"]) == (task, variant)]
    return sorted(found, key=lambda cell: cell["budget"])


def _kept(cells: Mapping[str, Any], variant: str) -> float | None:
    """What an index keeps, as a share of the cache."""
    found = (cell.get("index_share") for cell in cells.values() if cell["variant"] == variant)
    return next((share for share in found if share is not None), None)


def _height(cell: Mapping[str, Any]) -> float:
    return float(100 * cell["accuracy"] if "accuracy" in cell else cell["kl"])


def _vertical(axis: Any, full: Mapping[str, Any]) -> None:
    """The figure on the vertical axis."""
    if "accuracy" in full:
        axis.set(ylim=(-5, 105), ylabel="answers found, %")
    else:
        axis.set(yscale="log", ylabel="KL to full attention, nats")


KINDS: Mapping[str, Callable[..., Figure]] = {
    "steps": steps,
    "tokens": tokens,
    "shares": shares,
    "indexes": indexes,
    "prompts": prompts,
}
"""Every kind of plot, and the function that draws it from a result file."""
BESIDE = {"tokens": "peers-*.json"}
"""The further result files that kinds of plots show, if there are any."""
