"""The methods as presets over the axes; no other file of the package knows their names."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.keeping import Keeping
from vllm_kvretrieval.retrieval.outside import entry_points, names

ENTRY_POINTS = "vllm_kvretrieval.presets"
"""Group of entry points by which other packages add theirs: name -> Preset."""


@dataclass(frozen=True)
class Preset:
    """One retrieval method, as values of the options that a user leaves out.

    Attributes:
        summary: One line for ``vllm serve --help``.
        paper: A link to the paper; empty: there is none, or no link to it.
        index: See :func:`vllm_kvretrieval.retrieval.index.make_index`.
        pooling: Name in :class:`vllm_kvretrieval.retrieval.pooling.Pooling`, in lower case.
        schedule: Name in :data:`vllm_kvretrieval.retrieval.families.SCHEDULES`.
        rerank: Candidates per page selected, which are scored again by their keys; 0: none.
        remainder: The share of the estimated attention below which the mean value of a page stands
            for it, if it is not selected.
        mass: The share of the estimated attention that is enough; 1: all that is selected.
        outliers: The share of the selected pages that are outliers, where the index tells them.
        page_size: Tokens per page.
        summary_size: Tokens per entry of the index, if pages have as many; None: ``page_size``.
        unit: What is selected, one of :data:`vllm_kvretrieval.options.choices.UNITS`.
        sink_pages, window_pages: Pages always attended to; None: a share of the budget each.
        dense_layers: Leading layers that keep full attention.
        codec: Form of pages in a slow home; see :data:`vllm_kvretrieval.retrieval.codec.CODECS`.
        raw_window: Whether the window is raw in fast memory where home is encoded.
        home: The option ``home``.
        keeping: Where the schedule keeps some tokens and drops the others, which.
        budget_shares: See :func:`vllm_kvretrieval.retrieval.shares.make_shares`.
        finer: Options in place of these where smaller pages are served well
            (:mod:`vllm_kvretrieval.platforms.finer`); None: there are none.
    """

    summary: str
    paper: str = field(default="", kw_only=True)
    index: Any = "none"
    pooling: str = "mean_softmax"
    schedule: str = "every_step"
    rerank: int = 0
    mass: float = 1.0
    remainder: float = 0.0
    outliers: float = 0.0
    page_size: int = 32
    summary_size: int | None = None
    unit: str = "page"
    sink_pages: int | None = None
    window_pages: int | None = None
    dense_layers: int = 1
    codec: str = "raw"
    raw_window: bool = False
    home: str = "device"
    keeping: Keeping | None = None
    budget_shares: Any = "uniform"
    finer: Mapping[str, Any] | None = None


def _keeps(
    summary: str,
    keeping: Keeping,
    schedule: str = "once",
    budget_shares: Any = "uniform",
    paper: str = "",
) -> Preset:
    return Preset(
        summary,
        paper=paper,
        schedule=schedule,
        unit="token",
        sink_pages=0,
        window_pages=0,
        dense_layers=0,
        keeping=keeping,
        budget_shares=budget_shares,
    )


OWN = {
    "kvretrieval": Preset(
        "our own choice: low-rank factors of the keys of a page, at every step",
        index="low_rank",
        sink_pages=1,
        window_pages=2,
        finer={"page_size": 16, "summary_size": 32, "remainder": 0.003},
    ),
    "freekv": Preset(
        "FreeKV: speculative retrieval with correction",
        paper="https://arxiv.org/abs/2505.13109",
        index="min_max",
        schedule="speculative",
    ),
    "quest": Preset(
        "Quest: bounds of pages of 16, at every step",
        paper="https://arxiv.org/abs/2406.10774",
        index="min_max",
        pooling="max",
        page_size=16,
        dense_layers=2,
    ),
    "arkvale": Preset("ArkVale: spheres around the keys of a page", index="bounding"),
    "infllm": Preset(
        "InfLLM: representative keys of blocks of 128",
        paper="https://arxiv.org/abs/2402.04617",
        index="representative",
        pooling="sum",
        page_size=128,
        dense_layers=0,
    ),
    "twilight": Preset(
        "Twilight: as few pages as reach 95 % of the attention, up to the budget",
        paper="https://arxiv.org/abs/2502.02770",
        index="low_rank",
        mass=0.95,
        sink_pages=1,
        window_pages=2,
    ),
    "shadowkv": Preset(
        "ShadowKV: landmarks of 8 tokens, and the pages that these tell least of",
        paper="https://arxiv.org/abs/2410.21465",
        index="landmark",
        pooling="max_softmax",
        outliers=0.158,  # 48 chunks beside 256 that are selected
        page_size=16,
        summary_size=8,
        sink_pages=1,
        window_pages=2,
        dense_layers=0,
    ),
    "fier": Preset(
        "FIER: single tokens by keys of one bit per channel, at every step",
        paper="https://arxiv.org/abs/2508.08256",
        index="one_bit",
        unit="token",
        sink_pages=1,
        window_pages=1,
        dense_layers=2,
    ),
    "omnikv": Preset(
        "OmniKV: filter layers select tokens for the layers after them",
        paper="https://proceedings.iclr.cc/paper_files/paper/2025/hash/da1131a86ac3c70e0b7cae89c3d4df22-Abstract-Conference.html",
        schedule="shared_layers",
        unit="token",
        dense_layers=0,
    ),
    "ttkv": Preset(
        "TTKV: recent tokens raw in memory, older ones in 8 and 4 bits on disk, in blocks of 128",
        paper="https://arxiv.org/abs/2604.19769",
        index="min_max",
        page_size=128,
        sink_pages=1,
        window_pages=4,
        dense_layers=0,
        codec="k8v4",
        raw_window=True,
        home="disk",
    ),
    "entropykv": _keeps(
        "entropy-guided KV caching: most attended tokens, more in layers that look wider",
        Keeping(per_layer=True, sink=1, recent_share=0.5),
        budget_shares="entropy",
    ),
    "snapkv": _keeps(
        "SnapKV: what a prompt's last 32 queries attend to, and these",
        Keeping(observation=32, recent=32, smoothing=7),
        paper="https://arxiv.org/abs/2404.14469",
    ),
    "h2o": _keeps(
        "H2O: the tokens most attended to so far, and recent ones",
        Keeping(recent_share=0.5),
        "running",
        paper="https://arxiv.org/abs/2306.14048",
    ),
    "tova": _keeps(
        "TOVA: at each step the least attended token goes",
        Keeping(observation=1, per_layer=True, rating="latest"),
        "running",
        paper="https://arxiv.org/abs/2401.06104",
    ),
    "raas": _keeps(
        "RaaS: pages of 16 by when they were last attended to",
        Keeping(observation=32, recent=16, rating="stamp", page=16),
        "running",
        paper="https://arxiv.org/abs/2502.11147",
    ),
    "razor": Preset(
        "RazorAttention: retrieval heads attend to everything, others to sink and window",
        paper="https://arxiv.org/abs/2407.15891",
        schedule="by_head",
        sink_pages=1,
        dense_layers=0,
    ),
    "streamingllm": Preset(
        "StreamingLLM: sink and window only, a baseline",
        paper="https://arxiv.org/abs/2309.17453",
        schedule="never",
    ),
    "full": Preset(
        "full attention at each step, without index and retrieval: the baseline",
        schedule="whole",
        dense_layers=0,
    ),
    "kivi": Preset(
        "KIVI: full attention over keys and values of 2 bits, but for recent tokens: a baseline",
        paper="https://arxiv.org/abs/2402.02750",
        schedule="whole",
        window_pages=4,
        dense_layers=0,
        codec="k2v2",
        raw_window=True,
        home="disk",
    ),
    "kvquant": Preset(
        "KVQuant: full attention over keys and values of 2 bits, outliers as they are: a baseline",
        paper="https://arxiv.org/abs/2401.18079",
        schedule="whole",
        dense_layers=0,
        codec="k2v2_sparse",
        home="disk",
    ),
    "oracle": Preset("the best pages by all their keys, slowly: for evaluation", index="exact"),
}

CERTIFIED = "certified"
"""The backend that stands for a method that is measured to lose nothing of a model, or for ..."""
EXACT = "full"
"""... the one that attends to everything; see :mod:`vllm_kvretrieval.platforms.certified`."""

EXPLAINED = "entropykv"
"""The method that ``vllm-kvretrieval explain`` shows if the user names none."""


def preset_names() -> tuple[str, ...]:
    """Names of all presets, those of other packages included; nothing is imported."""
    return *OWN, *(name for name in names(ENTRY_POINTS) if name not in OWN)


def backend_names() -> tuple[str, ...]:
    """What ``--attention-backend`` may name: the presets, and ``certified``."""
    return *preset_names(), CERTIFIED


@functools.cache
def presets() -> dict[str, Preset]:
    """All of them by name.

    Raises:
        RetrievalConfigError: Another package's is no preset, or has the name of one that there is.
    """
    known = dict(OWN)
    for name, preset in entry_points(ENTRY_POINTS).items():
        taken = name in known or name == CERTIFIED
        if not isinstance(preset, Preset) or taken or name != name.lower():
            raise RetrievalConfigError(
                f"entry point {name} of {ENTRY_POINTS} must name a Preset, in lower case, unlike "
                f"{', '.join([*OWN, CERTIFIED])}; got {preset!r}."
            )
        known[name] = preset
    return known
