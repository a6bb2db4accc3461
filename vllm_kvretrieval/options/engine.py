"""The options of an engine, checked, and what follows from them."""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options import of_drafts, of_prompts
from vllm_kvretrieval.options.choices import HOMES
from vllm_kvretrieval.options.combinations import check_combinations
from vllm_kvretrieval.options.files import read_files
from vllm_kvretrieval.options.methods import make_method
from vllm_kvretrieval.options.of_requests import check_client_options
from vllm_kvretrieval.options.source import options_of, selected_method, window_tokens
from vllm_kvretrieval.options.table import OF_METHOD, OPTIONS, Options, checked
from vllm_kvretrieval.retrieval.budget import Budgets, PageBudget
from vllm_kvretrieval.retrieval.codec import CODECS, RAW, Codec
from vllm_kvretrieval.retrieval.families import FixedMethod, Method, family_with
from vllm_kvretrieval.retrieval.index import Index, IndexKind
from vllm_kvretrieval.retrieval.needs import Need
from vllm_kvretrieval.retrieval.pooling import Pooling
from vllm_kvretrieval.retrieval.presets import presets
from vllm_kvretrieval.retrieval.prompt_shares import PromptShares, make_prompt_shares
from vllm_kvretrieval.retrieval.roles import Role
from vllm_kvretrieval.values import check_digits, reject_unknown, require_name, shortened

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class RetrievalConfig(Options):
    """Validated options of one engine, with the values that the user leaves to the method.

    Build it with :meth:`from_options` or :meth:`from_vllm`; both raise
    :class:`RetrievalConfigError` on anything that cannot work.
    """

    def __post_init__(self) -> None:
        preset, given = presets()[self.method], {}
        for key, known in OPTIONS.items():
            value = getattr(self, key)
            if known.of_method:
                continue  # methods check theirs
            if value is not None:
                given[key] = value
            else:
                value = getattr(preset, key, None)
            if value is not None or getattr(Options, key) is not None:
                object.__setattr__(self, key, checked(key, value))
        if self.prefill_budget is not None:
            for key, value in of_prompts.defaults(self).items():
                if getattr(self, key) is None:
                    object.__setattr__(self, key, value)
        if self.client_options is not None:
            names = check_client_options("client_options", self.client_options)
            object.__setattr__(self, "client_options", names)
        if self.drafts is None:
            object.__setattr__(self, "drafts", of_drafts.default(self))
        check_combinations(self, given)

    @functools.cached_property
    def own(self) -> Method:
        """The engine's own method, for requests that name none."""
        return make_method(self.method, self.method, self._of_method(), self.page_size)

    def _of_method(self) -> dict[str, Any]:
        """The options of the engine's own method as the user wrote them."""
        return {key: getattr(self, key) for key in OF_METHOD}

    @functools.cached_property
    def methods(self) -> dict[str, Method]:
        """The methods that requests may name: the engine's own, those of ``also``, and methods that
        select nothing if the budget has room for them."""
        made = {self.method: self.own}
        for name, options in self._also().items():
            if name in made:
                raise RetrievalConfigError(
                    f"also={shortened(self.also)} names {name} twice; leave one out."
                )
            base = options.get("preset", name if name in presets() else self.method)
            own = {} if base != self.method else self._of_method()
            own = {key: own[key] for key in own if options.keys().isdisjoint(OPTIONS[key].rests_on)}
            changed = {key: value for key, value in options.items() if key != "preset"}
            try:
                made[name] = make_method(name, base, own | changed, self.page_size)
            except RetrievalConfigError as e:
                raise RetrievalConfigError(f"also: {name}: {e}") from None
            if made[name].whole and presets()[base].codec != RAW and self.codec == RAW:
                raise RetrievalConfigError(
                    f"also: {name}: how the cache is encoded is the server's affair, and here it "
                    f"is not. Use --attention-backend {base}, or name full."
                )
            if why := made[name].why_not_beside(self.own):
                raise RetrievalConfigError(f"also: {name}: {why}")
        for name, preset in presets().items():
            if family_with(preset.schedule) is FixedMethod and name not in made:
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
                    f"also={shortened(self.also)} must be a list of methods, or a mapping of "
                    "names to "
                    'options, such as {"fine": {"summary_size": 16}}.'
                )
        return given

    def roles(self, model_config: Any, layers: Collection[int]) -> dict[int, Role]:
        """The role of each layer, by its number; empty if every layer selects for itself.

        Args:
            model_config: vLLM's configuration of the model.
            layers: Numbers of the model's layers with plain full attention.

        Raises:
            RetrievalConfigError: The model's filters are not known, or are not among these layers.
        """
        return self.own.roles(self.filters, model_config, layers)

    @property
    def encoding(self) -> Codec | None:
        """The codec of pages in the file of a slow home; None: pages are as the model made them."""
        return None if self.codec == RAW else CODECS[self.codec]

    @property
    def home_directory(self) -> str | None:
        """Where the file of a slow home is to lie, if the user has named a place."""
        return self.home_path if self.store is None else self.store

    @property
    def open_pages(self) -> int:
        """The number of full pages at the end of a context that are not encoded.

        See :meth:`Method.open_pages`.
        """
        raw = presets()[self.method].raw_window
        methods = self.methods.values()
        return max(m.open_pages(self.budgets, raw and m is self.own) for m in methods)

    @functools.cached_property
    def index_kinds(self) -> tuple[IndexKind, ...]:
        """What all methods keep of entries. Methods with equal indexes share their records."""
        used: dict[tuple[Index, int], bool] = {}
        for method in self.methods.values():
            if method.index is not None:
                kind = method.index, method.entry_tokens
                used[kind] = used.get(kind, False) or method.remainder > 0
        return tuple(
            IndexKind(index, tokens, max(1, tokens // self.page_size) if means else 0)
            for (index, tokens), means in used.items()
        )

    def index_bytes(
        self, kv_bytes: int, head_size: int, dtype: "torch.dtype", alignment: int = 1
    ) -> int:
        """Bytes of all page indexes for ``kv_bytes`` bytes of keys and values.

        Their records have fields that begin at multiples of ``alignment`` bytes.
        """
        tokens = kv_bytes // (2 * head_size * dtype.itemsize)  # per KV head
        return sum(
            tokens // kind.entry_tokens * kind.record_bytes(head_size, dtype, alignment)
            for kind in self.index_kinds
        )

    @property
    def slow_home(self) -> bool:
        """Whether the home may be slow: then fast memory has a part of the KV cache only."""
        return HOMES[self.home].slow

    @property
    def token_major(self) -> bool:
        """Whether the KV cache of retrieval layers is laid out token by token."""
        return any(method.per_token for method in self.methods.values())

    @property
    def slot_tokens(self) -> int:
        """Tokens of the units in which a GPU holds parts of a home in host memory."""
        return 1 if self.token_major else self.page_size

    @property
    def looks_ahead(self) -> bool:
        """Whether steps of some method may attend to what an earlier one has selected."""
        return any(method.speculates for method in self.methods.values())

    @property
    def keeps_tokens(self) -> bool:
        """Whether methods keep tokens of prompts, chosen by attention that is observed."""
        return any(method.observes for method in self.methods.values())

    @property
    def drops_tokens(self) -> bool:
        """Whether each step of some method drops a token for the one that it adds."""
        return any(Need.DROPS_ALWAYS in method.needs for method in self.methods.values())

    def lets_set(self, option: str) -> bool:
        """Whether a request may set an option (``client_options``)."""
        return self.client_options is None or option in self.client_options

    def whole_beyond_budget(self, method: Method) -> int:
        """Tokens of contexts that steps of a method attend to in full, whatever the budget.

        It is 0 with families that do not have ``exact_below``: those keep a part of a prompt, by
        their budgets.
        """
        if self.exact_below is None or "exact_below" not in method.options:
            return 0
        return max(self.exact_below - 1, 0)

    @property
    def budget_limit(self) -> int:
        """The largest budget of a request, in tokens."""
        return self.budget if self.max_budget is None else self.max_budget

    @functools.cached_property
    def budgets(self) -> Budgets:
        """The budgets that requests may have, and what they divide into."""
        return Budgets(self.page_size, self.budget_limit, self.sink, self.window, self.method)

    @functools.cached_property
    def most_selected(self) -> dict[str, int]:
        """The most pages or tokens that a request selects per KV head on average, by method."""
        return {name: self.budgets.most_selected(m) for name, m in self.methods.items()}

    def budget_of_share(self, prompt: int, dense_share: float, method: str) -> int:
        """The budget that follows from ``memory_fraction``, in tokens (OmniKV, section 5).

        Dense layers read the whole context. The budget of the other layers makes the average over
        all layers ``memory_fraction``. It is rounded to pages, to at least what the method needs
        and at most what a request may have.

        Args:
            prompt: Tokens of the prompt.
            dense_share: Share of dense layers among the layers with full attention.
            method: Name in ``methods``.

        Raises:
            RetrievalConfigError: Dense layers alone read more than ``memory_fraction``.
        """
        assert self.memory_fraction is not None
        left = self.memory_fraction - dense_share
        if left <= 0:
            raise RetrievalConfigError(
                f"kv_retrieval.memory_fraction={self.memory_fraction} is too little: dense layers "
                f"alone are {dense_share:.2f} of the KV cache. Raise it, or have fewer of them."
            )
        return self.budgets.of_share(left / (1 - dense_share), prompt, self.methods[method])

    def page_budget(
        self, budget: int | None = None, method: str | None = None, key: str = "budget"
    ) -> PageBudget:
        """A budget in pages.

        Args:
            budget: Tokens; None: the engine's budget.
            method: Name in ``methods``; None: the engine's own method.
            key: The option that errors name.

        Raises:
            RetrievalConfigError: See :meth:`Budgets.pages`.
        """
        by = self.own if method is None else self.methods[method]
        return self.budgets.pages(self.budget if budget is None else budget, by, key)

    def prefills_sparsely(self, method: Method) -> bool:
        """Whether parts of the prompts of a method attend to a part of what lies before them."""
        selects = method.prompts_select and method.prompts_select == self.own.prompts_select
        return self.prefill_budget is not None and bool(selects)

    def pools_chunks_by(self, method: Method) -> Pooling:
        """How the scores of a chunk's queries become one, where chunks of prompts select."""
        if self.prefill_pooling is None:
            return method.pooling
        return Pooling[self.prefill_pooling.upper()]

    @functools.cached_property
    def prompt_shares(self) -> PromptShares | None:
        """The shares of KV heads in ``prefill_budget``; None: chunks of prompts select no pages."""
        if self.prefill_queries is None:
            return None
        return make_prompt_shares(self.prefill_budget_shares)

    @property
    def exact_prefill(self) -> int:
        """Tokens at the start of a prompt that attend to all tokens before them, although prefill
        is sparse."""
        assert self.prefill_budget is not None
        assert self.prefill_chunk is not None
        return (self.prefill_budget // self.prefill_chunk + 1) * self.prefill_chunk

    @classmethod
    def from_options(cls, method: str, options: Any) -> "RetrievalConfig":
        """Validate the ``kv_retrieval`` mapping of ``additional_config`` for ``method``.

        Raises:
            RetrievalConfigError: An unknown key, a wrong type or an impossible combination.
        """
        check_digits("kv_retrieval", options)
        if not isinstance(options, Mapping):
            raise RetrievalConfigError(
                f"kv_retrieval must be a mapping of options, got {shortened(options)}. "
                "Example: --kv-retrieval.budget 1024"
            )
        if "method" in options:
            raise RetrievalConfigError(
                f"kv_retrieval.method={shortened(options['method'])}: the method is chosen by the "
                f"backend's name; use --attention-backend {options['method']} instead."
            )
        reject_unknown(options, OPTIONS, "kv_retrieval")
        for key, value in options.items():
            if value is None and key in OF_METHOD:
                raise RetrievalConfigError(
                    f"kv_retrieval.{key}=None must have a value; leave it out for the default."
                )
        try:
            return cls(method=method, **read_files(options))
        except RetrievalConfigError as e:
            raise RetrievalConfigError(f"kv_retrieval.{e}") from None

    @classmethod
    def from_vllm(cls, vllm_config: "VllmConfig") -> "RetrievalConfig | None":
        """The options of an engine; None: the engine does not use retrieval."""
        method = selected_method(vllm_config)
        if method is None:
            return None
        options = options_of(vllm_config)
        if isinstance(options, Mapping) and isinstance(size := options.get("window"), str):
            shape = {key: options[key] for key in ("page_size", "dense_layers") if key in options}
            plain = cls.from_options(method, shape)
            tokens = window_tokens(size, vllm_config, method, plain.page_size, plain.dense_layers)
            options = {**options, "window": tokens}
        return cls.from_options(method, options)
