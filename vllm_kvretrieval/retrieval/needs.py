"""The needs of methods, and what serves them: refusals of methods follow from this table.

A method says what it needs (:attr:`Method.needs`). A setting of an engine (a device, a home, a
codec, a model's logits) lists the needs that it does not serve, with the reason and the remedy. A
GPU also lacks kernels for some indexes and codecs (``attention/cuda/refusals.py``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvretrieval.errors import RetrievalConfigError

if TYPE_CHECKING:
    from vllm_kvretrieval.retrieval.families.base import Method


class Need(Enum):
    """A need that not every setting serves. Its value follows a method's name in messages."""

    TOKENS = "selects single tokens (unit token)"
    STALE_TOKENS = "attends to single tokens of an earlier step (unit token, schedule speculative)"
    LATEST_QUERIES = "selects by several queries (observation)"
    KEYS = "selects by the keys of its own layers (index exact, or rerank)"
    READS = "reads keys in the KV cache"
    EVERYTHING = "reads everything at each step"
    HEADS = "lets some heads read everything"
    LAYERS_SHARE = "lets layers share a selection"
    DROPS = "drops tokens"
    DROPS_ALWAYS = "drops a token at each step (schedule running or sliding)"
    PROMPTS = "keeps tokens by the attention of whole prompts"
    UNEVEN_SHARES = "divides the budget unevenly (budget_shares)"
    UNEVEN_PAGES = "divides pages unevenly (budget_shares)"
    UNEVEN_TOKENS = "divides single tokens unevenly (budget_shares)"
    MASS = "selects up to a mass of the attention (mass)"
    TOKEN_MASS = "selects single tokens up to a mass of the attention (mass)"
    REMAINDER = "adds up means of what is not selected (remainder)"
    RERANK = "scores candidates again by their keys (rerank)"
    LONG_ENTRIES = "has index entries of several pages (summary_size)"
    LAYER_NUMBERS = "goes by the numbers of layers"


class Lack(NamedTuple):
    """Why a setting does not serve a need.

    Attributes:
        why: The reason, which follows the setting's name.
        remedy: The way out, as a clause.
    """

    why: str
    remedy: str


@dataclass(frozen=True)
class Setting:
    """A setting of an engine that does not serve all needs.

    Attributes:
        name: Its name in messages.
        lacks: The needs that it does not serve.
        of_methods: Needs that a request may not bring, by a number, where its method lacks them.
        drafts_alike: Whether all requests of a step have as many drafts.
    """

    name: str
    lacks: Mapping[Need, Lack]
    of_methods: frozenset[Need] = frozenset()
    drafts_alike: bool = False

    def check(self, methods: Iterable["Method"], name: str = "", where: str = "") -> None:
        """Refuse methods that need what the setting lacks.

        Args:
            methods: The engine's methods.
            name: The setting as it is there, such as ``home='disk'``; empty: its own name.
            where: The part of the model that is meant; it follows the setting's name.

        Raises:
            RetrievalConfigError: Names the methods, and says why and what to do.
        """
        methods = list(methods)
        for need, lack in self.lacks.items():
            if names := [method.name for method in methods if need in method.needs]:
                who = names[0] if len(names) == 1 else f"each of {', '.join(names)}"
                raise RetrievalConfigError(
                    f"{name or self.name}{where} {lack.why}, and {who} {need.value}; {lack.remedy}."
                )

    def serves(self, method: "Method") -> bool:
        """Whether a method needs nothing that the setting lacks."""
        return method.needs.isdisjoint(self.lacks)


LEAVE_HOME = "use another method, or home=device"
BY_PAGES = "use a method that selects pages by an index, such as freekv, quest or kvretrieval"

CPU = Setting("a CPU", {})
GPU = Setting(
    "a GPU",
    {
        need: Lack("does not serve every method yet", remedy)
        for need, remedy in {
            Need.STALE_TOKENS: f"set schedule=every_step, or {BY_PAGES}",
            Need.LATEST_QUERIES: f"set observation=last, or {BY_PAGES}",
            Need.RERANK: f"set rerank=0, or {BY_PAGES}",
            Need.TOKEN_MASS: f"set mass=1, or {BY_PAGES}",
            Need.LONG_ENTRIES: f"leave summary_size out, or {BY_PAGES}",
            Need.REMAINDER: f"set remainder=0, or {BY_PAGES}",
        }.items()
    },
    frozenset({Need.MASS}),
    drafts_alike=True,
)
GPU_HOST = Setting(
    "home=host",
    {
        Need.UNEVEN_PAGES: Lack(
            "gives all KV heads as many slots", "set budget_shares=uniform, or home=device"
        ),
    },
)
"""A home in host memory, on a GPU."""
BY_OWN = "lets each worker select by its own KV heads"
FILTERS_ALONE = Setting(
    "--tensor-parallel-size on a GPU",
    {Need.LAYERS_SHARE: Lack(BY_OWN, "set filter_heads=own, or leave it out")},
)
"""Workers with some of the KV heads of a filter, which do not tell each other what they find."""
LITTLE = "is for methods that read little of a context at a step"
SLOW_HOME = Setting(
    "a slow home",
    {
        Need.KEYS: Lack("keeps keys where they are slow to read", LEAVE_HOME),
        Need.UNEVEN_TOKENS: Lack(
            "gives all KV heads as many slots", "set budget_shares=uniform, or home=device"
        ),
        Need.HEADS: Lack(LITTLE, LEAVE_HOME),
        Need.EVERYTHING: Lack(LITTLE, LEAVE_HOME),
    },
)
SHARED_KV = Setting(
    "a slow home of layers whose keys others read",
    {
        need: Lack("gives these layers the same slots", LEAVE_HOME)
        for need in (Need.TOKENS, Need.DROPS)
    },
)
"""Cross-layer KV sharing."""
CODEC = Setting(
    "a codec",
    {
        Need.TOKENS: Lack("encodes whole pages", "use another method, or codec=raw"),
        Need.UNEVEN_SHARES: Lack(
            "reads contexts within the budget from slots, equally many in every layer",
            "set budget_shares=uniform, or codec=raw",
        ),
    },
)
STREAMING = Setting(
    "streaming_attention=True",
    {Need.TOKENS: Lack("is for pages", "use another method, or leave streaming_attention out")},
)
MEMORY_FRACTION = Setting(
    "memory_fraction",
    {
        Need.HEADS: Lack(
            "sets the budget by what a request may read",
            "use another method, or leave memory_fraction out",
        )
    },
)
SELECTING = "use methods that select pages, such as kvretrieval"
SPECULATION = Setting(
    "--speculative-config",
    {
        Need.DROPS_ALWAYS: Lack(
            "verifies drafts, of which some are taken back",
            "set schedule=once, or leave it out",
        )
    },
)
FAR_SPECULATION = Setting(
    "--speculative-config with a slow home",
    {
        Need.DROPS: Lack(
            "verifies several tokens, of which some are taken back",
            f"{SELECTING}, or home=device, or leave it out",
        )
    },
)
CAPPED_LOGITS = Setting(
    "the soft-capping of logits",
    {
        Need.REMAINDER: Lack("is not known to indexes", "use kv_retrieval.remainder=0"),
        Need.MASS: Lack("is not known to indexes", "use kv_retrieval.mass=1"),
    },
)
ALIKE = "are attended to by vLLM's kernel, which reads lists of one length"
UNREAD = "cannot be read by our kernels"
UNKNOWN_KEYS = Setting(
    "keys in an unknown layout",
    {
        Need.UNEVEN_SHARES: Lack(ALIKE, "use methods without budget_shares"),
        Need.HEADS: Lack(ALIKE, "use methods by which all KV heads attend alike"),
        Need.MASS: Lack(ALIKE, "use methods without mass"),
        Need.TOKENS: Lack(UNREAD, SELECTING),
        Need.READS: Lack(UNREAD, "use a method with index=min_max, which reads keys as written"),
    },
)
PIPELINE = Setting(
    "--pipeline-parallel-size",
    {
        need: Lack("leaves no worker with all layers", remedy)
        for need, remedy in {
            Need.UNEVEN_SHARES: "use budget_shares=uniform, or --tensor-parallel-size",
            Need.HEADS: "use another method, or --tensor-parallel-size",
        }.items()
    },
)
UNKNOWN_STAGES = Setting(
    "--pipeline-parallel-size where a model's configuration does not say its full layers",
    {
        Need.LAYERS_SHARE: Lack(
            "needs a configuration that says which layers have full attention",
            "use another method, or --tensor-parallel-size",
        )
    },
)
PARTIAL_MODELS = Setting(
    "layers with full attention that do not retrieve",
    {
        need: Lack(
            "are left as they are", "use a method that selects pages, and budget_shares=uniform"
        )
        for need in (Need.PROMPTS, Need.UNEVEN_SHARES, Need.HEADS)
    },
)
OTHER_LAYERS = Setting(
    "layers of other numbers than the model's configuration says",
    {
        Need.LAYER_NUMBERS: Lack(
            "have full attention", "use a method and options that treat all layers alike"
        )
    },
)
SETTINGS = (
    GPU,
    GPU_HOST,
    FILTERS_ALONE,
    SLOW_HOME,
    SHARED_KV,
    CODEC,
    STREAMING,
    MEMORY_FRACTION,
    CAPPED_LOGITS,
    UNKNOWN_KEYS,
    SPECULATION,
    FAR_SPECULATION,
    PIPELINE,
    UNKNOWN_STAGES,
    PARTIAL_MODELS,
    OTHER_LAYERS,
)
"""All of them, for documentation and tests."""
