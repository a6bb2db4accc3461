"""Options of KV retrieval: typed and validated here, and nowhere else."""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.limits import check_directory
from vllm_kvretrieval.options.files import read_files
from vllm_kvretrieval.options.values import (
    check_digits,
    parse_size,
    reject_misspelt,
    reject_unknown,
    require_bool,
    require_int,
    require_name,
    require_number,
)
from vllm_kvretrieval.retrieval.budget import (
    DEFAULT_BUDGET,
    Budgets,
    PageBudget,
)
from vllm_kvretrieval.retrieval.codec import CODECS, RAW, Codec
from vllm_kvretrieval.retrieval.files import has_file
from vllm_kvretrieval.retrieval.filters import (
    CALIBRATE,
    check_model,
    filters_for,
    read_filters,
)
from vllm_kvretrieval.retrieval.index import Index
from vllm_kvretrieval.retrieval.method import (
    OPTIONS,
    Method,
    make_method,
)
from vllm_kvretrieval.retrieval.presets import OWN, preset_names, presets
from vllm_kvretrieval.retrieval.roles import WINDOW, Role, roles_of
from vllm_kvretrieval.retrieval.schedule import SCHEDULES

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_kvretrieval.options.request import RequestOptions

CONFIG_KEY = "kv_retrieval"
"""Key in vLLM's ``additional_config``, and in ``SamplingParams.extra_args``."""

DEFAULT_METHOD = next(iter(OWN))
PAGE_SIZES = (16, 32, 64, 128)
HOMES = ("auto", "device", "host", "disk")
ATTENTION = ("vllm", "own")


DEFAULT_CHUNK = 512
"""Tokens of a prompt that a filter selects for at once."""
DEFAULT_BLOCK = 128
"""Tokens of a prompt that select pages at once."""
DEFAULT_QUERIES = 8
MOST_QUERIES = 64
REUSES = ("all", "exact")


@dataclass(frozen=True)
class RetrievalConfig:
    """Validated options of one engine. Lengths are in tokens, sizes in bytes per worker.

    Build it with :meth:`from_options` or :meth:`from_vllm`; both raise
    :class:`RetrievalConfigError` on anything that cannot work.
    """

    method: str = DEFAULT_METHOD
    budget: int = DEFAULT_BUDGET
    sink: int | None = None
    window: int | None = None
    page_size: int = None  # type: ignore[assignment]  # the preset's
    summary_size: int | None = None
    index: Any = None
    pooling: str | None = None
    schedule: str | None = None
    rerank: int | None = None
    unit: str | None = None
    correction_threshold: float | None = None
    budget_shares: Any = None
    also: Any = ()
    filters: Any = None
    observation: Any = None
    heads: Any = None
    prefill_budget: int | None = None
    prefill_chunk: int | None = None
    prefill_queries: int | None = None
    dense_layers: int = None  # type: ignore[assignment]  # the preset's
    max_budget: int | None = None
    memory_fraction: float | None = None
    allow_exact: bool = True
    reuse: str = "all"
    attention: str | None = None
    home: str = None  # type: ignore[assignment]  # the preset's
    home_bytes: int | None = None
    home_path: str | None = None
    codec: str = None  # type: ignore[assignment]  # the preset's
    recall_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        preset = presets()[self.method]
        for key in ("page_size", "dense_layers", "codec", "home"):
            if getattr(self, key) is None:
                object.__setattr__(self, key, getattr(preset, key))
        for key in ("budget", "page_size", "dense_layers"):
            require_int(key, getattr(self, key))
        if self.page_size not in PAGE_SIZES:
            raise RetrievalConfigError(
                f"page_size={self.page_size} is not supported; use one of {PAGE_SIZES}."
            )
        if self.dense_layers < 0:
            raise RetrievalConfigError(
                f"dense_layers={self.dense_layers} must be 0 or more; 1 is FreeKV's choice."
            )
        whole = self.own.schedule.whole
        unused = (["sink"] if whole else []) + (["window"] if not self.own.selects else [])
        for key in unused:
            if getattr(self, key) is not None:
                why = "attends to everything" if whole else "selects nothing"
                raise RetrievalConfigError(
                    f"{key}={getattr(self, key)!r} has no effect with {self.method}, which {why}; "
                    "leave it out."
                )
        self._check_filters()
        for key in ("sink", "window"):
            value = getattr(self, key)
            if value is None:
                continue
            if require_int(key, value) < self.page_size or value % self.page_size:
                raise RetrievalConfigError(
                    f"{key}={value} must be a positive multiple of page_size={self.page_size}; "
                    f"try {self.budgets.nearest(value)}, or leave it out."
                )
        for method in self.methods.values():
            self.page_budget(method=method.name)
        require_bool("allow_exact", self.allow_exact)
        require_name("reuse", self.reuse, REUSES)
        if self.attention is not None:
            require_name("attention", self.attention, ATTENTION)
        if self.max_budget is not None:
            if require_int("max_budget", self.max_budget) < self.budget:
                raise RetrievalConfigError(
                    f"max_budget={self.max_budget} must be budget={self.budget} or more: requests "
                    "may raise theirs up to it. Raise it, or leave it out."
                )
            self.page_budget(self.max_budget, key="max_budget")
        by_head = [method.name for method in self.methods.values() if method.heads is not None]
        share = self.memory_fraction
        if share is not None and by_head:
            raise RetrievalConfigError(
                f"memory_fraction={share!r} makes budgets of what a request may read, and with "
                f"{', '.join(by_head)} some heads read everything; leave one out."
            )
        if share is not None and require_number("memory_fraction", share) <= 0:
            raise RetrievalConfigError(f"memory_fraction={share} must be more than 0, such as 0.3.")
        self._check_prefill()
        self._check_home()

    @functools.cached_property
    def own(self) -> Method:
        """The engine's own method, for requests that name none."""
        return make_method(
            self.method, self.method, {key: getattr(self, key) for key in OPTIONS}, self.page_size
        )

    @functools.cached_property
    def methods(self) -> dict[str, Method]:
        """All that requests may name, the engine's own first.

        Those that select nothing come last, where the budget has room for them.
        """
        made = {self.method: self.own}
        for name, options in self._also().items():
            if name in made:
                raise RetrievalConfigError(f"also={self.also!r} names {name} twice; leave one out.")
            base = options.get("preset", name if name in presets() else self.method)
            own = {} if base != self.method else {k: getattr(self, k) for k in OPTIONS}
            for key, depends_on in (("correction_threshold", "schedule"), ("rerank", "index")):
                if depends_on in options:
                    own.pop(key, None)
            changed = {key: value for key, value in options.items() if key != "preset"}
            try:
                made[name] = make_method(name, base, own | changed, self.page_size)
            except RetrievalConfigError as e:
                raise RetrievalConfigError(f"also: {name}: {e}") from None
            if made[name].shares and self.own.shares:
                raise RetrievalConfigError(
                    f"also: {name}: its layers would select as {self.method} does, of which there "
                    "is nothing else to choose; leave it out."
                )
            if made[name].shares:
                raise RetrievalConfigError(
                    f"also: {name}: which layers are dense is the server's affair, and {name} "
                    f"needs others than {self.method}. Use --attention-backend {base}."
                )
        for name, preset in presets().items():
            schedule = SCHEDULES[preset.schedule]
            asked_for = schedule.selects or schedule.by_head or schedule.whole
            if not asked_for and name not in made:
                method = make_method(name, name, {}, self.page_size)
                if self.budgets.fits(self.budget, method):
                    made[name] = method
        return made

    def _also(self) -> dict[str, Mapping[str, Any]]:
        """``also`` as a mapping."""
        if isinstance(self.also, Mapping):
            given = dict(self.also)
        elif isinstance(self.also, list | tuple):
            given = {name if isinstance(name, str) else repr(name): {} for name in self.also}
            for name in given:
                require_name("also", name, presets())
        else:
            given = {"": None}
        for name, options in given.items():
            if not isinstance(options, Mapping) or not isinstance(name, str) or not name:
                raise RetrievalConfigError(
                    f"also={self.also!r} must be a list of methods, or a mapping of names to "
                    'options, such as {"fine": {"summary_size": 16}}.'
                )
        return given

    def _check_filters(self) -> None:
        if self.filters is None and not self.own.shares:
            return
        for key in ("filters", "dense_layers"):
            value = getattr(self, key)
            if key == "dense_layers" and value:
                raise RetrievalConfigError(
                    f"dense_layers={value} has no effect with {self.method}, whose filters say "
                    "which layers are dense; leave it out."
                )
            if key != "dense_layers" and value is not None and not self.own.shares:
                raise RetrievalConfigError(
                    f"{key}={value!r} has no effect with {self.method}, whose layers select for "
                    "themselves; leave it out."
                )
        filters = self.filters
        if isinstance(filters, list | tuple) and all(type(layer) is int for layer in filters):
            object.__setattr__(self, "filters", tuple(filters))
        elif isinstance(filters, str) or has_file(filters):
            read_filters(filters)
        elif filters is not None:
            raise RetrievalConfigError(
                f"filters={filters!r} must be a list of layers, such as [2, 8, 18], or the path of "
                f"a file that {CALIBRATE} wrote."
            )

    def _check_prefill(self) -> None:
        if self.prefill_budget is None:
            for key in ("prefill_chunk", "prefill_queries"):
                if getattr(self, key) is not None:
                    raise RetrievalConfigError(
                        f"{key}={getattr(self, key)!r} has no effect without prefill_budget; "
                        "leave it out."
                    )
            return
        if not (self.own.shares or self.own.selects_for_blocks):
            raise RetrievalConfigError(
                f"prefill_budget={self.prefill_budget!r} cannot be used with {self.method}, which "
                "selects no pages by an index: its prefill is exact. Leave it out."
            )
        if self.home != "device":
            raise RetrievalConfigError(
                f"prefill_budget={self.prefill_budget!r} needs home=device: parts of prompts read "
                f"scattered keys, which home={self.home!r} does not serve. Leave one out."
            )
        budget = require_int("prefill_budget", self.prefill_budget)
        for method in self.methods.values():
            if self.prefills_sparsely(method):
                self.page_budget(budget, method.name, key="prefill_budget")
        if self.own.shares:
            self._check_chunks()
        else:
            self._check_blocks()

    def _check_chunks(self) -> None:
        """Check the options of chunks of prompts, for which filters select."""
        if self.prefill_queries is not None:
            raise RetrievalConfigError(
                f"prefill_queries={self.prefill_queries!r} has no effect with {self.method}, whose "
                f"filters select by the last {WINDOW} queries of a chunk; leave it out."
            )
        if self.prefill_chunk is None:
            object.__setattr__(self, "prefill_chunk", DEFAULT_CHUNK)
        if require_int("prefill_chunk", self.prefill_chunk) < WINDOW:
            raise RetrievalConfigError(
                f"prefill_chunk={self.prefill_chunk} must be {WINDOW} or more: filters select by "
                f"so many queries of a chunk. Try {DEFAULT_CHUNK}, or leave it out."
            )

    def _check_blocks(self) -> None:
        """Check the options of blocks of prompts, which select pages themselves."""
        if self.prefill_chunk is None:
            object.__setattr__(self, "prefill_chunk", max(DEFAULT_BLOCK, self.page_size))
        chunk = require_int("prefill_chunk", self.prefill_chunk)
        if chunk < self.page_size or chunk % self.page_size:
            raise RetrievalConfigError(
                f"prefill_chunk={chunk} must be a positive multiple of page_size={self.page_size}; "
                f"try {self.budgets.nearest(chunk)}, or leave it out."
            )
        most = min(MOST_QUERIES, chunk)
        if self.prefill_queries is None:
            object.__setattr__(self, "prefill_queries", min(DEFAULT_QUERIES, most))
        if not 1 <= require_int("prefill_queries", self.prefill_queries) <= most:
            raise RetrievalConfigError(
                f"prefill_queries={self.prefill_queries} must be from 1 to {most}; try "
                f"{min(DEFAULT_QUERIES, most)}, or leave it out."
            )

    def roles(self, model_config: Any, layers: Collection[int]) -> dict[int, Role]:
        """What each layer does; empty where every layer selects for itself.

        Args:
            model_config: vLLM's.
            layers: The model's layers with plain full attention.

        Raises:
            RetrievalConfigError: The model's filters are not known, or are none of these layers.
        """
        if not self.own.shares:
            return {}
        if isinstance(self.filters, tuple):
            return roles_of(self.filters, layers)
        model, config = model_config.model, model_config.hf_text_config
        if self.filters is None:
            return roles_of(filters_for(model, config).filters, layers)
        file = read_filters(self.filters)
        check_model(file, model, config)
        return roles_of(file.filters, layers)

    def _check_home(self) -> None:
        require_name("home", self.home, HOMES)
        # Filters read keys, too, but of layers that stay in memory as long as they fit there.
        reading = [m.name for m in self.methods.values() if m.reads_keys and not m.shares]
        if self.home != "device" and reading:
            raise RetrievalConfigError(
                f"home={self.home!r} keeps keys where they are slow to read, and "
                f"{', '.join(reading)} selects by them (index exact, or rerank); leave it out, or "
                "use home=device."
            )
        # By entropy all KV heads of a layer keep as many: enough where nothing is dropped later.
        uneven = [
            m.name
            for m in self.methods.values()
            if not m.budget_shares.uniform and (m.budget_shares.entropy is None or m.schedule.drops)
        ]
        if self.home != "device" and self.rows and uneven:
            raise RetrievalConfigError(
                f"home={self.home!r} gives all KV heads as many slots for single tokens, and "
                f"{', '.join(uneven)} divides the budget unevenly (budget_shares); leave it out, "
                "or use home=device."
            )
        by_head = [m.name for m in self.methods.values() if m.heads is not None]
        whole = self.own.schedule.whole
        if self.home != "device" and (by_head or whole):
            some, who = ("some heads read", by_head) if by_head else ("steps read", [self.method])
            raise RetrievalConfigError(
                f"home={self.home!r} is for contexts of which little is read at a step, and with "
                f"{', '.join(who)} {some} everything; leave it out, or use home=device."
            )
        self._check_codec()
        for key in ("home_bytes", "home_path", "recall_cache_bytes"):
            value = getattr(self, key)
            if value is None:
                continue
            if self.home == "device":
                raise RetrievalConfigError(
                    f"{key}={value!r} has no effect with home=device; leave it out, or use "
                    "a home that is larger: disk, on a GPU host."
                )
            if key == "home_path":
                if not isinstance(value, str):
                    raise RetrievalConfigError(
                        f"home_path={value!r} is no directory; name one on the disk to be used."
                    )
                check_directory(value)
            else:
                object.__setattr__(self, key, parse_size(key, value))

    def _check_codec(self) -> None:
        if require_name("codec", self.codec, CODECS) == RAW:
            return
        tokens = [m.name for m in self.methods.values() if m.per_token]
        if self.home == "device":
            raise RetrievalConfigError(
                f"codec={self.codec!r} is for pages in a file, and with home=device the KV cache "
                "is read where it lies; use home=disk (whose home_path may be in memory, such as "
                "/dev/shm), or codec=raw."
            )
        if tokens:
            raise RetrievalConfigError(
                f"codec={self.codec!r} encodes whole pages, and {', '.join(tokens)} selects single "
                "tokens (unit token); use codec=raw."
            )
        uneven = [m.name for m in self.methods.values() if not m.budget_shares.uniform]
        if uneven:
            raise RetrievalConfigError(
                f"codec={self.codec!r} reads contexts within the budget from slots, of which every "
                f"layer needs as many, and {', '.join(uneven)} divides the budget unevenly "
                "(budget_shares); use codec=raw, or leave the shares out."
            )

    @property
    def encoding(self) -> Codec | None:
        """What the file of a slow home holds pages by; None: as the model made them."""
        return None if self.codec == RAW else CODECS[self.codec]

    @property
    def open_pages(self) -> int:
        """Full pages at the end of a context that are not encoded: the window's, if that is raw."""
        if not presets()[self.method].raw_window:
            return 0
        return max(budget.window for budget in self.budgets.largest(self.own))

    @functools.cached_property
    def stores(self) -> tuple[tuple[Index, int], ...]:
        """Every index that some method has, with the tokens of its entries; equal ones are one."""
        used = (m for m in self.methods.values() if m.index is not None)
        return tuple(dict.fromkeys((m.index, m.entry_tokens) for m in used))  # type: ignore[misc]

    def index_bytes(self, kv_bytes: int, head_size: int, dtype: "torch.dtype") -> int:
        """Bytes of all page indexes beside so many bytes of keys and values."""
        tokens = kv_bytes // (2 * head_size * dtype.itemsize)  # per KV head
        return sum(
            tokens // size * index.record_bytes(head_size, size, dtype)
            for index, size in self.stores
        )

    @property
    def rows(self) -> bool:
        """Whether the KV cache of retrieval layers is laid out token by token."""
        return any(method.per_token for method in self.methods.values())

    @property
    def budget_limit(self) -> int:
        """Tokens; the largest budget that any request may have."""
        return self.budget if self.max_budget is None else self.max_budget

    @functools.cached_property
    def budgets(self) -> Budgets:
        """The budgets that requests may have, and what they divide into."""
        return Budgets(self.page_size, self.budget_limit, self.sink, self.window, self.method)

    @functools.cached_property
    def most_selected(self) -> dict[str, int]:
        """Most pages or tokens that a request selects per KV head on average, by method."""
        return {name: self.budgets.most_selected(m) for name, m in self.methods.items()}

    def budget_of_share(self, prompt: int, dense_share: float, method: str) -> int:
        """Tokens of the budget that ``memory_fraction`` leaves to a prompt (OmniKV, section 5).

        Dense layers keep all of it, the others so much that it is this share on average; rounded to
        pages, and no less than the method needs, nor more than a request may have.

        Args:
            prompt: Tokens.
            dense_share: Of the layers with full attention, those that are dense.
            method: Name in ``methods``.

        Raises:
            RetrievalConfigError: Dense layers alone take more.
        """
        assert self.memory_fraction is not None
        share = (self.memory_fraction - dense_share) / (1 - dense_share)
        if share <= 0:
            raise RetrievalConfigError(
                f"kv_retrieval.memory_fraction={self.memory_fraction} is too little: dense layers "
                f"alone are {dense_share:.2f} of the KV cache. Raise it, or have fewer of them."
            )
        return self.budgets.of_share(share, prompt, self.methods[method])

    def page_budget(
        self, budget: int | None = None, method: str | None = None, key: str = "budget"
    ) -> PageBudget:
        """The budget in pages, for this engine or for a request with one of its own.

        Args:
            budget: Tokens; the engine's own if None.
            method: Name in ``methods``; the engine's own if None.
            key: What errors call it.

        Raises:
            RetrievalConfigError: See :meth:`Budgets.pages`.
        """
        by = self.own if method is None else self.methods[method]
        return self.budgets.pages(self.budget if budget is None else budget, by, key)

    def prefills_sparsely(self, method: Method) -> bool:
        """Whether parts of prompts attend to a part of what lies before them, by this method."""
        selects = method.shares if self.own.shares else method.selects_for_blocks
        return self.prefill_budget is not None and selects

    @property
    def exact_prefill(self) -> int:
        """Tokens at the start of a prompt that sparse prefill lets attend to all before them."""
        assert self.prefill_budget is not None
        assert self.prefill_chunk is not None
        return (self.prefill_budget // self.prefill_chunk + 1) * self.prefill_chunk

    def certain_budget(self, options: "RequestOptions") -> int:
        """Tokens; a context of so many is attended to whole in decode steps, whatever its prompt.

        Budgets may be a share of the prompt, and methods that drop tokens have dropped some at the
        first step, perhaps.
        """
        method = self.methods[options.method]
        if method.schedule.drops:
            return 0
        if self.memory_fraction is not None and not options.own_budget:
            return self.budgets.least(method)
        return options.budget.total * self.page_size

    def wants_exact_prefix(self, options: "RequestOptions") -> bool:
        """Whether the request may only share keys and values that full attention has computed.

        It has promised exact answers, or its method rates tokens of the prompt by attention.
        """
        observes = self.methods[options.method].keeping is not None
        return options.exact or options.exact_prefix or observes or self.reuse == "exact"

    def observes_all(self, options: "RequestOptions") -> bool:
        """Whether all queries of the prompt count, those of a prefix in the cache, too."""
        keeping = self.methods[options.method].keeping
        return keeping is not None and keeping.observation is None and not options.exact

    @classmethod
    def from_options(cls, method: str, options: Any) -> "RetrievalConfig":
        """Validate the ``kv_retrieval`` mapping of ``additional_config`` for ``method``.

        Raises:
            RetrievalConfigError: An unknown key, a wrong type or an impossible combination.
        """
        check_digits("kv_retrieval", options)
        if not isinstance(options, Mapping):
            raise RetrievalConfigError(
                f"kv_retrieval must be a mapping of options, got {options!r}. "
                "Example: --kv-retrieval.budget 1024"
            )
        known = [f.name for f in fields(cls) if f.name != "method"]
        if "method" in options:
            raise RetrievalConfigError(
                f"kv_retrieval.method={options['method']!r}: the method is chosen by the backend's "
                f"name; use --attention-backend {options['method']} instead."
            )
        reject_unknown(options, known, "kv_retrieval")
        for key, value in options.items():
            if value is None and key in OPTIONS:
                raise RetrievalConfigError(
                    f"kv_retrieval.{key}=None must have a value; leave it out for the default."
                )
        try:
            return cls(method=method, **read_files(options))
        except RetrievalConfigError as e:
            raise RetrievalConfigError(f"kv_retrieval.{e}") from None

    @classmethod
    def from_vllm(cls, vllm_config: "VllmConfig") -> "RetrievalConfig | None":
        """The options of an engine, or None where it does not use retrieval."""
        method = selected_method(vllm_config)
        if method is None:
            return None
        options = options_of(vllm_config)
        if isinstance(options, Mapping) and isinstance(size := options.get("window"), str):
            shape = {key: options[key] for key in ("page_size", "dense_layers") if key in options}
            tokens = cls.from_options(method, shape)._tokens_of(size, vllm_config)
            options = {**options, "window": tokens}
        return cls.from_options(method, options)

    @classmethod
    def read_files(cls, vllm_config: "VllmConfig") -> None:
        """Put what files hold in place of their names in the options of an engine.

        The configuration is what other processes of the engine get.

        Raises:
            RetrievalConfigError: A file cannot be read, or is no JSON.
        """
        options, additional = options_of(vllm_config), vllm_config.additional_config
        if not isinstance(options, Mapping) or not isinstance(additional, Mapping):
            return
        try:
            read = read_files(options)
        except RetrievalConfigError as e:
            raise RetrievalConfigError(f"kv_retrieval.{e}") from None
        vllm_config.additional_config = {**additional, CONFIG_KEY: read}

    def _tokens_of(self, size: str, vllm_config: "VllmConfig") -> int:
        """A window that is given as a size: the tokens of as many whole pages as fit.

        Raises:
            RetrievalConfigError: None does, or the method's window takes no memory of its own.
        """
        given = f"kv_retrieval.window={size!r}"
        if not presets()[self.method].raw_window:
            raise RetrievalConfigError(
                f"{given} must be a number of tokens: with {self.method} the window takes no "
                "memory of its own."
            )
        model = vllm_config.model_config
        layers = max(1, model.get_total_num_hidden_layers() - self.dense_layers)
        width = 2 * model.get_head_size() * model.dtype.itemsize
        page = layers * model.get_num_kv_heads(vllm_config.parallel_config) * width * self.page_size
        pages = parse_size("kv_retrieval.window", size) // page
        if not pages:
            raise RetrievalConfigError(
                f"{given} has no room for a page of {self.page_size} tokens, which takes {page} "
                f"bytes in {layers} layers. Raise it."
            )
        return pages * self.page_size


def options_of(vllm_config: "VllmConfig") -> Any:
    """The raw ``kv_retrieval`` options of an engine.

    Raises:
        RetrievalConfigError: They stand under another name, and would be ignored.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, Mapping):
        return {}
    right = f'{{"{CONFIG_KEY}": {{"budget": 1024}}}}'
    reject_misspelt(additional, CONFIG_KEY, "additional_config", right)
    return additional.get(CONFIG_KEY, {})


def selected_method(vllm_config: "VllmConfig") -> str | None:
    """The retrieval method that an engine's attention backend names, or None.

    Raises:
        RetrievalConfigError: Two different methods are named for two kinds of layers.
    """
    attention = vllm_config.attention_config
    backends = {attention.backend, *attention.backend_per_kind.values()}
    names = {b.name.lower() for b in backends if b is not None} & set(preset_names())
    if len(names) > 1:
        raise RetrievalConfigError(
            f"attention backends {', '.join(sorted(names))} cannot run in one engine; choose one."
        )
    return names.pop() if names else None
