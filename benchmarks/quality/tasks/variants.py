"""The methods that the accuracy benchmark compares: variants of presets, in groups."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from benchmarks.quality.tasks.variant import FREEKV, OWN, PAGE, Variant
from vllm_kvretrieval.retrieval.codec import CODECS, RAW
from vllm_kvretrieval.retrieval.presets import preset_names, presets

_PRESETS = ("presets",)


def _index(name: str, index: Any, meaning: str, planned: str = "", **options: Any) -> Variant:
    """An index at the schedule and pooling that all indexes are compared at."""
    served = {"index": index, "schedule": "every_step", "pooling": "mean_softmax", **options}
    return Variant(name, meaning, name, ("indexes",), served, index=planned or name)


def _alone(group: str, name: str, meaning: str, **engine: Any) -> Variant:
    """A method that is the engine's own, with options of that engine."""
    return Variant(name, meaning, str(engine["method"]), (group,), engine=engine)


def _own_engine(name: str, meaning: str) -> Variant:
    """A preset that decides what the whole engine is like."""
    return _alone("token_presets", name, meaning, method=name)


def _omnikv(name: str, meaning: str, **engine: Any) -> Variant:
    """OmniKV with other filters, or with another observation window."""
    return _alone("filters", name, meaning, method="omnikv", **engine)


def _fier_groups(size: int) -> Variant:
    """FIER with groups of `size` tokens; sink and window are alike for all sizes."""
    meaning = f"FIER without a sink, in groups of {size}, with a window of 128"
    shape = {"page_size": max(size, PAGE), "summary_size": size, "sink": 0, "window": 128}
    return _alone("groups", f"fier_groups_{size}", meaning, method="fier", **shape)


def _dropping(name: str, meaning: str, style: str = "", **served: Any) -> Variant:
    """A preset that drops tokens, or what is changed of it; beside others in one engine."""
    return Variant(name, meaning, name, ("dropping",), served, style=style)


def _bounded(name: str, meaning: str, **engine: Any) -> Variant:
    """A cache of less than 128 tokens, which does not grow while decoding."""
    return _alone("bounded", name, meaning, page_size=16, **engine)


def _codec(name: str) -> Variant:
    """Our own method, over pages that are encoded."""
    meaning = f"kvretrieval, pages on disk by {name}: {CODECS[name].meaning}"
    engine = {"home": "disk", "codec": name}
    return Variant(f"codec_{name}", meaning, OWN, ("codecs",), engine=engine)


def _encoded(method: str, bits: str, codec: str, raw: str = "") -> Variant:
    """A preset of full attention over pages that are encoded."""
    meaning = f"{method}: everything, by {codec}{raw}"
    engine = {"method": method, "codec": codec}
    return _alone("codecs", f"{method}_{bits}", meaning, **engine)


def _weights(method: str, bits: int) -> Variant:
    """A method over weights that are rounded as they are loaded."""
    meaning = f"{method}, weights of {bits} bits (--quantization kvr_int{bits})"
    engine = {} if method == OWN else {"method": method}
    weights = f"kvr_int{bits}"
    return Variant(
        f"{method}_int{bits}", meaning, method, ("weights",), engine=engine, quantization=weights
    )


def _tiers(name: str, meaning: str, **engine: Any) -> Variant:
    """TTKV, or a change of it, with sink and window alike, so that all select as many tokens.

    In blocks of 256 the sink has to be one of them, and takes 128 tokens from the selection.
    """
    shape = {"method": "ttkv", "page_size": 128, "sink": 128, "window": 256} | engine
    return _alone("tiers", name, meaning, **shape)


def _poolings(prefix: str, method: str, **served: Any) -> list[Variant]:
    """A method with each pooling but the mean of softmaxes, which it has itself."""
    return [
        Variant(
            f"{prefix}_{pooling}",
            f"{method}, pooling {pooling}",
            f"{prefix}_{pooling}",
            ("poolings",),
            {**served, "pooling": pooling},
        )
        for pooling in ("relative", "max", "sum", "max_softmax")
    ]


def _shares(name: str, meaning: str, beta: float) -> Variant:
    served = {"budget_shares": {"pyramid": {"beta": beta}}}
    return Variant(name, meaning, name, ("budgets",), served)


def _threshold(name: str, meaning: str, threshold: float, style: str = "") -> Variant:
    asks = {"correction_threshold": threshold}
    return Variant(name, meaning, FREEKV, ("thresholds",), asks=asks, style=style)


VARIANTS = (
    Variant(
        OWN,
        "this project's own choice: low-rank factors of the keys, at every step",
        OWN,
        ("core", "quick", "indexes"),
        index="low_rank",
        style="o-",
    ),
    Variant(
        "oracle",
        "the best pages by all their keys: what an index can reach",
        "oracle",
        ("core", "quick", "indexes"),
        index="exact",
        style="*-",
    ),
    Variant(
        FREEKV, "speculative retrieval with correction", FREEKV, ("core", "quick"), style="s--"
    ),
    Variant(
        "every_step",
        "freekv's minima and maxima, selection at every step (threshold 1)",
        FREEKV,
        ("core", "indexes", "thresholds"),
        asks={"correction_threshold": 1.0},
        index="min_max",
        style="D--",
    ),
    Variant(
        "sink_window",
        "sinks and window alone, the control",
        "streamingllm",
        ("core", "quick", "indexes"),
        index="none",
        style="x:",
    ),
    _index("mean", "mean", "mean of the keys"),
    _index("mean_std", "mean_std", "mean and standard deviation"),
    _index("mean_std_half", {"mean_std": {"spread": 0.5}}, "half a standard deviation", "mean_std"),
    _index("bounding", "bounding", "sphere around the keys"),
    _index("representative", "representative", "representative keys"),
    _index("one_bit", "one_bit", "a bit per token and channel"),
    _index("low_rank_4", {"low_rank": {"rank": 4}}, "low-rank factors, rank 4"),
    _index("low_rank_8", {"low_rank": {"rank": 8}}, "low-rank factors, rank 8"),
    Variant(
        "kvretrieval_rerank",
        "kvretrieval, two candidates per page scored again by their keys (cache in memory only)",
        "kvretrieval_rerank",
        ("indexes",),
        {"rerank": 2},
        index="low_rank_rerank",
    ),
    *_poolings("pooling", OWN),
    *_poolings("bounds", "freekv, selecting at every step", preset=FREEKV, schedule="every_step"),
    Variant("quest", "Quest, at the engine's pages of 32 and one dense layer", "quest", _PRESETS),
    Variant("arkvale", "ArkVale", "arkvale", _PRESETS),
    Variant(
        "infllm", "InfLLM, at the engine's pages of 32 and one dense layer", "infllm", _PRESETS
    ),
    Variant(
        "shadowkv",
        "ShadowKV, pages of 16 and one dense layer",
        "shadowkv",
        _PRESETS,
        engine={"page_size": 16},
    ),
    Variant(
        "shadowkv_scores",
        "the same without outliers",
        "shadowkv_scores",
        _PRESETS,
        {"preset": "shadowkv", "outliers": 0},
        engine={"page_size": 16},
    ),
    _own_engine("fier", "FIER: single tokens by a bit per channel; two dense layers"),
    Variant(
        "fier_bare",
        "FIER without a sink, in groups of 16, so that 32 tokens are a budget",
        "fier",
        ("token_presets",),
        engine={"method": "fier", "sink": 0, "page_size": 16},
    ),
    *(_fier_groups(size) for size in (8, 16, 32, 64, 128)),
    _own_engine("omnikv", "OmniKV: filter layers, which are dense, select tokens for the others"),
    _omnikv("omnikv_uniform", "omnikv, by its last 16 queries alike", observation="uniform"),
    _omnikv("omnikv_exponential", "omnikv, the newer the more", observation="exponential"),
    _omnikv("omnikv_filters_3_12", "omnikv, two filters: layers 3 and 12", filters=[3, 12]),
    _omnikv("omnikv_filter_2", "omnikv, one filter: layer 2", filters=[2]),
    _dropping(
        "entropykv", "entropy-guided budgets of layers; one dense layer, as all of these", "P-"
    ),
    _dropping(
        "entropykv_uniform",
        "the same tokens, all layers alike",
        "p:",
        preset="entropykv",
        budget_shares="uniform",
    ),
    _dropping(
        "entropykv_32",
        "entropykv by a prompt's last 32 queries",
        preset="entropykv",
        observation=32,
    ),
    _dropping(
        "entropykv_32_uniform",
        "the same, all layers alike",
        preset="entropykv",
        observation=32,
        budget_shares="uniform",
    ),
    _bounded(
        "entropykv_sliding",
        "entropykv whose recent tokens slide: the paper's cache",
        method="entropykv",
        schedule="sliding",
    ),
    _bounded(
        "entropykv_sliding_uniform",
        "the same, all layers alike",
        method="entropykv",
        schedule="sliding",
        budget_shares="uniform",
    ),
    _bounded("sink_window_16", "sinks and window alone, pages of 16", method="streamingllm"),
    _dropping("snapkv", "SnapKV", "<-."),
    _dropping("h2o", "H2O", ">-."),
    _dropping("tova", "TOVA", "1-."),
    _dropping("raas", "RaaS", "2-."),
    _dropping(
        "razor", "RazorAttention: retrieval heads read everything, whatever the budget", "X--"
    ),
    _shares("pyramid", "kvretrieval, less with depth: 1.95 to 0.05 times the mean", 20),
    _shares("pyramid_2", "kvretrieval, less with depth: 1.5 to 0.5 times the mean", 2),
    _threshold("threshold_0.8", "freekv, fewer heads select anew", 0.8),
    _threshold("threshold_0.7", "freekv, fewer still", 0.7),
    _threshold(
        "reuse",
        "freekv, no correction: always the previous step's selection (threshold -1)",
        -1.0,
        "^-.",
    ),
    Variant(
        "speculative",
        "kvretrieval, with freekv's schedule",
        "speculative",
        ("thresholds",),
        {"schedule": "speculative"},
    ),
    Variant(
        "summary_8",
        "freekv, 8 tokens per entry of the index",
        "summary_8",
        ("thresholds",),
        {"preset": FREEKV, "summary_size": 8},
        style="d-.",
    ),
    Variant(
        "page_16",
        "freekv, pages of 16 tokens",
        FREEKV,
        ("pages",),
        engine={"page_size": 16},
        style="v-.",
    ),
    Variant(
        "kvretrieval_page_16",
        "kvretrieval, pages of 16 tokens",
        OWN,
        ("pages", "small"),
        engine={"page_size": 16},
        style="^:",
    ),
    Variant(
        "paired",
        "kvretrieval, pages of 16 tokens, two to an entry of the index",
        "paired",
        ("small",),
        {"preset": OWN, "summary_size": 32},
        engine={"page_size": 16},
        style="v:",
    ),
    Variant(
        "paired_rest",
        "the same, and means of what is left out",
        "paired_rest",
        ("small",),
        {"preset": OWN, "summary_size": 32, "remainder": 0.003},
        engine={"page_size": 16},
        style="P-",
    ),
    Variant(
        "oracle_page_16",
        "the best pages of 16 tokens by all their keys",
        "oracle",
        ("small",),
        engine={"page_size": 16},
        style="d-.",
    ),
    *(_codec(name) for name in CODECS if name != RAW),
    *(_encoded("kivi", b, b, " but for the recent 128 tokens") for b in ("k2v2", "k4v4")),
    *(_encoded("kvquant", b, f"{b}_sparse") for b in ("k2v2", "k4v4")),
    *(_weights(method, bits) for method in ("full", OWN) for bits in (8, 4)),
    _tiers("tiers_freekv", "freekv, pages of 32 in memory", method=FREEKV, page_size=PAGE),
    _tiers("tiers_ttkv", "TTKV: blocks of 128, 8-bit keys and 4-bit values"),
    _tiers("tiers_raw", "the same, as the model made them", home="device", codec=RAW),
    _tiers("tiers_4_bits", "the same, keys of 4 bits, too", codec="k4v4"),
    _tiers("tiers_256", "blocks of 256, the sink, too", page_size=256, sink=256),
    _tiers("tiers_64", "blocks of 64", page_size=64),
    _tiers("tiers_32", "blocks of 32", page_size=32),
    _tiers("tiers_low_rank", "blocks of 128 by low-rank factors", index="low_rank"),
)

GROUPS = tuple(dict.fromkeys(group for variant in VARIANTS for group in variant.groups))

FULL = Variant("full", "stock vLLM, full attention", "", ())


def chosen(quick: bool, also: Collection[str], alone: bool = False) -> tuple[Variant, ...]:
    """Return the variants to be run.

    Args:
        quick: variants of the quick tier, or of the core.
        also: names of further variants, or of groups of them.
        alone: these and no others.
    """
    wanted = {*also} if alone else {"quick" if quick else "core", *also}
    return tuple(v for v in VARIANTS if v.name in wanted or wanted.intersection(v.groups))


def named(names: Collection[str], apart: bool = False) -> tuple[Variant, ...]:
    """Return the variants of these names, or groups, and presets, in an engine of their own.

    Args:
        names: Of variants, of groups of them, or of presets, another package's included.
        apart: Names of presets mean these as they are, each in an engine of its own.

    Raises:
        ValueError: There is no such variant or preset.
    """
    known = {variant.name: variant for variant in VARIANTS}
    found: dict[str, Variant] = {}
    for name in names:
        if name in preset_names() and (apart or name not in known):
            found[name] = _alone("", name, presets()[name].summary, method=name)
        elif name in known:
            found[name] = known[name]
        elif name in GROUPS:
            found |= {variant.name: variant for variant in VARIANTS if name in variant.groups}
        else:
            there = dict.fromkeys([*GROUPS, *known, *preset_names()])
            raise ValueError(
                f"--variants {name}: there is no such variant, group or preset; there are: "
                f"{', '.join(there)}"
            )
    found.pop(FULL.name, None)
    return tuple(found.values())
