"""RULER's tasks, and the presets, ways to read prompts and budgets that are put to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.quality.examples import Example
from benchmarks.quality.intensive import MAKERS, Maker
from benchmarks.quality.ruler_tasks.scoring import METRICS, Metric, match_all, match_part
from benchmarks.quality.tasks.prefill_budget import EXACTLY, PrefillBudget
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.presets import preset_names, presets

CONTEXT = 4096
"""Tokens of a prompt and its answer, at most; the shortest of RULER's lengths."""

BUDGETS = (128, 512, 1024)
SAMPLES = 10

COUNTS_ABOVE = 30.0
"""Points; where full attention scores no more, a task tells nothing about retrieval: it counts for
no mean, and no preset is put to it."""


@dataclass(frozen=True)
class RulerTask:
    """One of RULER's tasks, as its generator configures it, or another in the same form."""

    name: str
    short: str
    """Heading of its column."""

    tokens: int
    """Tokens that the model may generate, RULER's ``tokens_to_generate``; of examples the most."""

    metric: Metric = match_all

    counts_above: float = COUNTS_ABOVE
    """Points that full attention has to exceed."""

    make: Maker | None = None
    """Makes the examples; None: RULER's generator does, or they are a file's."""

    examples: tuple[Example, ...] = ()
    """Those of a file."""


TASKS = (
    RulerTask("niah_single_1", "S1", 128),
    RulerTask("niah_single_2", "S2", 128),
    RulerTask("niah_single_3", "S3", 128),
    RulerTask("niah_multikey_1", "K1", 128),
    RulerTask("niah_multikey_2", "K2", 128),
    RulerTask("niah_multikey_3", "K3", 128),
    RulerTask("niah_multivalue", "MV", 128),
    RulerTask("niah_multiquery", "MQ", 128),
    RulerTask("vt", "VT", 30),
    RulerTask("cwe", "CWE", 120),
    RulerTask("fwe", "FWE", 50),
    RulerTask("qa_1", "QA1", 32, match_part),
    RulerTask("qa_2", "QA2", 32, match_part),
)


def of_examples(name: str, examples: Sequence[Example]) -> RulerTask:
    """Return a task of the examples of a file: it counts unless full attention has no point."""
    tokens, metric = max(each.tokens for each in examples), METRICS[examples[0].match]
    return RulerTask(name, name, tokens, metric, 0.0, examples=tuple(examples))


INTENSIVE = tuple(
    RulerTask(name, name, 0, METRICS["json"], 0.0, make=make) for name, make in MAKERS.items()
)
"""Tasks that need much of their prompts, which RULER has none of."""


ENGINE_METHOD = "kvretrieval"
"""Preset of the engine itself, unless a variant needs an engine of its own."""


@dataclass(frozen=True)
class Variant:
    """One way of decoding, as options of a request to the retrieval engine."""

    name: str
    meaning: str
    options: dict[str, Any] = field(default_factory=dict)
    """The request's ``kv_retrieval`` options, beside its budgets."""

    prefill: PrefillBudget = EXACTLY
    """That of its prompts."""

    watches: bool = False
    """The attention of a prompt's queries decides, so that none may be left out."""

    alone: bool = False
    """It decides the layout of the KV cache, and needs an engine of its own."""

    engine: dict[str, Any] = field(default_factory=dict)
    """Further options of that engine."""

    whole: bool = False
    """It attends to everything, so that it has no budget."""

    @property
    def method(self) -> str:
        """The preset."""
        return str(self.options.get("method", ENGINE_METHOD))


FULL = Variant(
    "full", "full attention, by the same engine: what the others are measured by", {"exact": True}
)

VARIANTS = (
    Variant("oracle", "the best pages by all their keys", {"method": "oracle"}),
    Variant("kvretrieval", "our own choice, the engine's default", {"method": ENGINE_METHOD}),
    Variant("freekv", "FreeKV: speculation with correction", {"method": "freekv"}),
    Variant("quest", "Quest's choice, of this engine's pages", {"method": "quest"}),
    Variant("control", "sink and window alone", {"method": "streamingllm"}),
)
"""The variants that answer every task that counts; each has a row of the table per budget."""


def _preset(name: str, meaning: str, watches: bool = False, alone: bool = False) -> Variant:
    return Variant(name, meaning, {"method": name}, watches=watches, alone=alone)


MORE_VARIANTS = (
    _preset("arkvale", "ArkVale, at this engine's pages"),
    _preset("infllm", "InfLLM, at this engine's pages"),
    _preset("twilight", "Twilight: as few pages as reach 95 % of the attention"),
    _preset("razor", "RazorAttention: retrieval heads read everything"),
    _preset("entropykv", "entropy-guided budgets of layers", watches=True),
    _preset("snapkv", "SnapKV", watches=True),
    _preset("h2o", "H2O", watches=True),
    _preset("tova", "TOVA", watches=True),
    _preset("raas", "RaaS", watches=True),
    Variant(
        "quest_16",
        "Quest as its paper has it: pages of 16, two dense layers; in an engine of its own",
        {"method": "quest"},
        alone=True,
        engine={"page_size": 16, "dense_layers": 2},
    ),
    _preset("shadowkv", "ShadowKV, in an engine of its own", alone=True),
    _preset("fier", "FIER: single tokens, in an engine of its own", alone=True),
    _preset("omnikv", "OmniKV: filter layers, in an engine of its own", alone=True),
    _preset("ttkv", "TTKV, in an engine of its own", alone=True),
)
"""Variants that are run where they are asked for."""

KNOWN = (*VARIANTS, *MORE_VARIANTS)


def named(names: Collection[str], apart: bool = False) -> tuple[Variant, ...]:
    """Return the variants of these names: those that are known, in their order, then presets.

    A preset that is not among them, such as another package's, has an engine of its own.

    Args:
        names: Of variants, or of presets.
        apart: Each has an engine of its own, and there it is what its preset says.

    Raises:
        ValueError: There is no such variant or preset.
    """
    known = {variant.name: variant for variant in KNOWN}
    others = [name for name in dict.fromkeys(names) if name not in (*known, FULL.name)]
    there = preset_names()
    if unknown := [name for name in others if name not in there]:
        raise ValueError(
            f"--variants {unknown[0]}: there is no such variant or preset; there are: "
            f"{', '.join(dict.fromkeys([*known, *there]))}"
        )
    found = [variant for name, variant in known.items() if name in names]
    found += [_of_preset(name) for name in others]
    return tuple(replace(variant, alone=variant.alone or apart) for variant in found)


def _of_preset(name: str) -> Variant:
    own = RetrievalConfig.from_options(name, {}).own
    variant = _preset(name, presets()[name].summary, own.observes, alone=True)
    return replace(variant, whole=own.whole)


@dataclass(frozen=True)
class Group:
    """Variants that one engine answers."""

    variants: tuple[Variant, ...]

    options: dict[str, Any]
    """What `open_engine` has to know of them."""


def grouped(variants: Sequence[Variant], apart: bool = False) -> list[Group]:
    """Divide variants among engines. The first engine answers with full attention, too.

    Args:
        variants: All of them.
        apart: Each has an engine of its own; so has full attention.

    Raises:
        ValueError: Variants of one engine contradict each other.
    """
    beside = tuple(variant for variant in variants if not variant.alone)
    alone = [(variant,) for variant in variants if variant.alone]
    groups = [Group(of, engine_options(of)) for of in ([beside] if beside else []) + alone]
    if apart:
        return [Group((), {"method": "full", "also": {}}), *groups]
    return groups or [Group((), engine_options(()))]


def prefilling(budget: PrefillBudget) -> Variant:
    """Return the variant whose prompts retrieve so many tokens."""
    meaning = f"kvretrieval, whose prompts attend to {budget} tokens before each chunk, too"
    return Variant(f"prefill_{budget}", meaning, {"method": ENGINE_METHOD}, budget)


def engine_options(variants: Sequence[Variant]) -> dict[str, Any]:
    """Return what `open_engine` has to know of these variants.

    Raises:
        ValueError: Their prompts are read in ways that one engine cannot have.
    """
    options: dict[str, Any]
    if variants and variants[0].alone:
        (variant,) = variants
        options = {"method": variant.method, "also": {}, **variant.engine}
    else:
        others = (of.method for of in variants if of.method != ENGINE_METHOD)
        options = {"also": {method: {} for method in others}}
    for option, of_each in (
        ("prefill_budget", [variant.prefill.tokens for variant in variants]),
        ("prefill_share", [variant.prefill.share for variant in variants]),
    ):
        if most := max(of_each, default=0):
            options[option] = most
    of_engines = [variant.prefill.of_engine for variant in variants if variant.prefill.tokens]
    if any(of_engine != of_engines[0] for of_engine in of_engines):
        raise ValueError(
            "prefill_budget_shares and prefill_depth are an engine's: name budgets that agree"
        )
    return options | (of_engines[0] if of_engines else {})


@dataclass(frozen=True)
class Published:
    """A row that others have published. Its model and length are theirs, so only distances from
    their own full attention and oracle say anything beside ours."""

    name: str
    by_budget: dict[int, float]
    """Mean over the 13 tasks, in points, by budget in tokens."""


PUBLISHED_FULL = 94.3
PUBLISHED_WHERE = "Llama-3.1-8B, RULER at 16K, as LOCKS's authors publish it: another model"
PUBLISHED = (
    Published("oracle", {64: 80.0, 128: 87.5, 512: 91.5, 2048: 93.7}),
    Published("LOCKS", {64: 78.1, 128: 87.4, 512: 91.4, 2048: 93.7}),
    Published("Quest", {64: 39.5, 128: 57.8, 512: 79.3, 2048: 90.3}),
)
"""From the README of locks-kv 0.1.4; its oracle is the exact page mass, as ours."""
