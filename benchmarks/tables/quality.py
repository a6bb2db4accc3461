"""Tables of answers' quality, and of keys: results of `benchmarks.quality`."""

from __future__ import annotations

from typing import Any

from benchmarks.quality.ruler_tasks import report
from benchmarks.quality.ruler_tasks.catalogue import TASKS as RULER
from benchmarks.tables.labels import TASKS, VARIANTS
from benchmarks.tables.markdown import Options, Results, listed, markdown, percent, significant

FULL = "full"


def quality(results: Results, options: Options) -> str:
    """KL to full attention, or answers found: a row per variant, a column per task and budget.

    ``show=agreement`` adds the share of positions with the same likeliest token, ``show=index``
    columns with the size of the index, ``show=corrected`` the share of KV heads that corrected.
    """
    cells = {name: cell for store in results.values() for name, cell in store["cells"].items()}
    tasks, budgets = listed(options, "tasks"), listed(options, "budgets")
    variants, show = listed(options, "variants"), options.get("show", "")
    index = show == "index"
    header = ["", *["index: bytes per token and KV head", "of a 16-bit cache"] * index]
    header += [_heading(task, budget, budgets) for task in tasks for budget in budgets]
    rows = []
    for variant in variants:
        row = [VARIANTS.get(variant, variant)]
        if index:
            cell = cells[f"{tasks[0]}/{variant}/{budgets[0]}"]
            row += [f"{cell['index_bytes']:.1f}", percent(cell["index_share"])]
        for task in tasks:
            for place, budget in enumerate(budgets):
                name = f"{task}/{variant}/{'all' if variant == FULL else budget}"
                hidden = variant == FULL and place > 0
                row.append("" if hidden or name not in cells else _quality(cells[name], show))
        rows.append(row)
    return markdown(header, rows)


def turns(results: Results, options: Options) -> str:
    """KL to full attention in each turn over one document, or in each ``part`` of an answer.

    A row per variant, columns per task.
    """
    (store,) = results.values()
    tasks, variants = listed(options, "tasks"), listed(options, "variants")
    first = store["cells"][f"{tasks[0]}/{FULL}/all"]
    numbers = range(1, 1 + len(first["kl_turns"]))
    header = [""]
    for task in tasks:
        first_word = f"{TASKS[task]}: {options.get('each', 'turn')}"
        header += [f"{first_word} {n}" if n == 1 else f"{n}" for n in numbers]
    rows = []
    for variant in variants:
        cells = [store["cells"][f"{task}/{variant}/{options['budget']}"] for task in tasks]
        figures = [significant(kl) for cell in cells for kl in cell["kl_turns"]]
        rows.append([VARIANTS.get(variant, variant), *figures])
    return markdown(header, rows)


def _heading(task: str, budget: str, budgets: list[str]) -> str:
    return f"{TASKS[task]}: budget {budget}" if budget == budgets[0] else budget


def _quality(cell: dict[str, Any], show: str) -> str:
    if "kl" not in cell:
        return f"{sum(cell['found'])} of {cell['samples']}"
    text = significant(cell["kl"])
    if show == "agreement":
        text += f" ({percent(cell['agreement'], 0)})"
    if show == "corrected" and cell.get("corrected_share") is not None:
        text += f" ({percent(cell['corrected_share'], 0)})"
    return text


def ruler(results: Results, options: Options) -> str:
    """RULER's scores: a row per preset and budget, a column per task; ``means`` alone by option.

    The cells of several files are of the same samples. A cell of more than one is the first's.
    """
    cells = {
        (cell["task"], cell["variant"], cell["budget"]): cell
        for store in reversed([*results.values()])
        for cell in store["cells"].values()
    }
    budgets = sorted({budget for *_, budget in cells if budget is not None})
    if "means" not in options:
        return report.table(RULER, budgets, cells) + "\n"
    rows = []
    for variant in listed(options, "means"):
        means = [report.mean(RULER, variant, budget, cells) for budget in budgets]
        rows.append(
            [VARIANTS.get(variant, variant), *("" if m is None else f"{m:.1f}" for m in means)]
        )
    full = report.mean(RULER, FULL, None, cells)
    header = (
        f"mean score of {len(report.counted(RULER, cells))} tasks ({full:.1f} with full attention)"
    )
    return markdown([header, *(f"budget {budget}" for budget in budgets)], rows)


def recall(results: Results, options: Options) -> str:
    """Tokens with the most attention that an index finds: a row per index, columns per model."""
    (store,) = results.values()
    models = list(dict.fromkeys(row["model"] for row in store["rows"]))
    cases = list(dict.fromkeys(row["case"] for row in store["rows"]))
    by_name = {(row["model"], row["case"]): row for row in store["rows"]}
    selected = list(store["rows"][0]["recall"])
    header = ["index", "bytes per token and KV head"]
    header += [
        f"{model}: of {count} selected" if count == selected[0] else count
        for model in models
        for count in selected
    ]
    rows = []
    for case in cases:
        found = [by_name[model, case] for model in models]
        shares = [percent(row["recall"][count]) for row in found for count in selected]
        rows.append([case, f"{found[0]['bytes_per_token']:.1f}", *shares])
    return markdown(header, rows)


def key_ranks(results: Results, options: Options) -> str:
    """What low-rank factors of keys hold: a row per share of their width, columns per model."""
    (store,) = results.values()
    models = list(dict.fromkeys(row["model"] for row in store["rows"]))
    shares = list(dict.fromkeys(row["share"] for row in store["rows"]))
    by_name = {(row["model"], row["share"]): row for row in store["rows"]}
    header = ["share of the width"]
    for model in models:
        header += [
            f"{model}: rank",
            "energy before, after rotation",
            "attention moved before, after",
        ]
    rows = []
    for share in shares:
        row = [share]
        for found in (by_name[model, share] for model in models):
            row += [f"{found['rank']} of {found['width']}"]
            row += [
                ", ".join(percent(found[stage][figure]) for stage in ("before", "after"))
                for figure in ("energy", "moved")
            ]
        rows.append(row)
    return markdown(header, rows)


def query_similarity(results: Results, options: Options) -> str:
    """Cosines of adjacent queries: a row per model."""
    (store,) = results.values()
    first = store["rows"][0]
    header = ["model", "query heads", "lowest mean cosine", "a tenth below", "half below"]
    header += [f"heads at {mark} and more" for mark in first["alike"]]
    header += [f"corrected at {threshold}" for threshold in first["corrected"]]
    rows = [
        [
            row["model"],
            f"{row['heads']} of {row['layers']} layers",
            *(f"{row[figure]:.2f}" for figure in ("least", "tenth", "median")),
            *map(percent, [*row["alike"].values(), *row["corrected"].values()]),
        ]
        for row in store["rows"]
    ]
    return markdown(header, rows)
