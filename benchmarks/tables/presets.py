"""Tables of the presets: what they are, and where they are served."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from benchmarks.tables.markdown import Options, Results, markdown
from vllm_kvretrieval.attention.cuda import refusals
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.codec import RAW
from vllm_kvretrieval.retrieval.families import Method, family_with
from vllm_kvretrieval.retrieval.keeping import Keeping
from vllm_kvretrieval.retrieval.needs import CODEC, GPU, GPU_HOST, SLOW_HOME, Setting
from vllm_kvretrieval.retrieval.presets import OWN, Preset

ON_GPU = "device", "host"
"""Homes of the KV cache on a GPU."""
TOLD: dict[str, dict[str, Any]] = {"razor": {"heads": [[1]]}, "omnikv": {"filters": [0]}}
"""What a method has to be told where no model is known."""


def presets(_: Results, options: Options) -> str:
    """The presets as values of options."""
    header = ["`--attention-backend`", "index", "pooling", "schedule", "tokens per page"]
    header += ["dense layers", "sink, window", "besides"]
    rows = []
    for name, preset in OWN.items():
        paper = f" ([paper]({preset.paper}))" if preset.paper else ""
        index = "none" if preset.index == "none" else f"`{preset.index}`"
        pooling = "" if preset.index == "none" else f"`{preset.pooling}`"
        layers = "dense_layers" in family_with(preset.schedule).options
        dense = str(preset.dense_layers) if layers else "its filters'"
        row = f"`{name}`{paper}", index, pooling, f"`{preset.schedule}`", str(preset.page_size)
        rows.append([*row, dense, _parts(preset), _besides(preset)])
    return markdown(header, rows).rstrip("\n")


def _parts(preset: Preset) -> str:
    """What is always attended to."""
    family = family_with(preset.schedule)
    if family.whole or preset.keeping:
        return "everything" if family.whole else "by attention"
    sink = _pages(preset.sink_pages)
    return f"{sink}, {_pages(preset.window_pages) if family.selects else 'the rest'}"


def _pages(pages: int | None) -> str:
    return "budget / 16" if pages is None else f"{pages} page{'s' * (pages > 1)}"


def _besides(preset: Preset) -> str:
    """Options whose values are not those of most presets."""
    names = "unit summary_size rerank mass remainder outliers codec home budget_shares".split()
    told = [f"`{said}`" for said in _unlike(preset, Preset(""), names)]
    if preset.finer:
        finer = ", ".join(f"`{name}={value}`" for name, value in preset.finer.items())
        told.append(f"[where small pages are served](#small-pages) {finer}")
    if preset.keeping:
        names = [field.name for field in fields(Keeping)]
        told.append(f"keeps by {', '.join(_unlike(preset.keeping, Keeping(), names))}")
    if preset.raw_window:
        told.append("its window raw")
    return ", ".join(told)


def _unlike(values: Any, usual: Any, names: Iterable[str]) -> list[str]:
    """The attributes by which values are unlike the usual ones."""
    said = {name: getattr(values, name) for name in names}
    return [f"{name}={value}" for name, value in said.items() if value != getattr(usual, name)]


def served(_: Results, options: Options) -> str:
    """Where each preset is served, and why not; from the table of needs."""
    header = ["`--attention-backend`", "CPU, `home=device`", "CPU, `home=disk`"]
    header += ["8 and 4 bits on disk (`codec`)", *(f"GPU, `home={home}`" for home in ON_GPU)]
    rows = []
    for name, preset in OWN.items():
        made = RetrievalConfig.from_options(name, TOLD.get(name, {})).own
        raw = preset.codec == "raw"
        memory = "yes" if raw else "no: its pages are encoded"
        disk = "yes" if not raw else _cell(made, SLOW_HOME)
        codec = "yes" if not raw else _cell(made, SLOW_HOME, CODEC)
        rows.append([f"`{name}`", memory, disk, codec, *_on_gpu(name)])
    return markdown(header, rows).rstrip("\n")


def served_on_gpu(_: Results, options: Options) -> str:
    """Which presets each home serves on a GPU, and why not."""
    header = ["`--attention-backend`", *(f"`home={home}`" for home in ON_GPU)]
    return markdown(header, [[f"`{name}`", *_on_gpu(name)] for name in OWN]).rstrip("\n")


def _cell(method: Method, *settings: Setting) -> str:
    """Whether settings serve a method, or the first need that one of them lacks."""
    for setting in settings:
        if lacking := [need for need in setting.lacks if need in method.needs]:
            return f"no: {lacking[0].value}"
    return "yes"


def _on_gpu(name: str) -> list[str]:
    """Whether each home serves a preset, by the refusals of its start."""
    return [_at_home(name, home) for home in ON_GPU]


def _at_home(name: str, home: str) -> str:
    told = TOLD.get(name, {})
    try:
        refusals.check_preset(name, told)
        config = RetrievalConfig.from_options(name, {**told, "home": home})
        refusals.check_options(config)
        refusals.check_home(config, sleeps=False)
        refusals.check_methods(config)
    except RetrievalConfigError:
        if OWN[name].codec != RAW:
            return "no: its pages are encoded"
        made = RetrievalConfig.from_options(name, told).own
        told_by = _cell(made, GPU, *([GPU_HOST, SLOW_HOME] if home == "host" else []))
        return "no: no kernel for its index" if told_by == "yes" else told_by
    return "yes"
