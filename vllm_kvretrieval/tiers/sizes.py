"""How much of the KV cache fits where, when its home is a slow tier."""

import contextlib
import mmap
from dataclasses import dataclass

import torch
from vllm.utils.mem_utils import format_gib

from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.errors import RetrievalConfigError

BOOKS_PER_UNIT = 4
"""Bytes that the recall cache keeps per unit of home: the slot that holds it."""
BOOKS_PER_SLOT = 24
"""And per slot: its unit, pins, last step, place in the order of use."""
BOOKS_PER_TOKEN = 16
"""Bytes that the recall of tokens keeps per slot: the token's position, its number in home, its
place, last step."""
MOST_TOKENS = 4
"""Of single tokens no more are kept than so many times the largest budget: finding what is there
takes the longer, and what was attended to long ago is seldom wanted again."""


@dataclass(frozen=True)
class Cache:
    """The KV cache of one worker, all its layers alike.

    Attributes:
        retrieval_layers, dense_layers: How many of each.
        kv_heads: Per layer.
        block_size: Tokens per block of vLLM's.
        block_bytes: Bytes of a block in one layer.
        head_size, dtype: Of keys and values.
        max_num_seqs, max_model_len: Requests at once, and tokens of each.
        attended: Of each retrieval layer what a request attends to at most: (page, KV head) units,
            or where methods select single tokens, tokens of KV heads, of which all have as many;
            None: for each KV head as many as the largest budget has.
        step_tokens: Most that a step computes.
    """

    retrieval_layers: int
    dense_layers: int
    kv_heads: int
    block_size: int
    block_bytes: int
    head_size: int
    dtype: torch.dtype
    max_num_seqs: int
    max_model_len: int
    step_tokens: int
    attended: tuple[int, ...] | None = None

    @property
    def blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def token_bytes(self) -> int:
        """Of a token's key and value of one KV head."""
        return self.block_bytes // (self.block_size * self.kv_heads)

    @property
    def blocks_wanted(self) -> int:
        """For as many of the longest requests as may run at once; one block is vLLM's own."""
        return self.max_num_seqs * self.blocks_per_request + 1

    def index_bytes(self, blocks: int, config: RetrievalConfig) -> int:
        """Bytes of page index beside so many blocks."""
        kv_bytes = blocks * self.retrieval_layers * self.block_bytes
        return config.index_bytes(kv_bytes, self.head_size, self.dtype)

    def bytes_in_home(self, config: RetrievalConfig) -> int:
        """Of a block of a retrieval layer."""
        if config.encoding is None:
            return self.block_bytes
        units = self.block_size // config.page_size * self.kv_heads
        return units * config.encoding.unit_bytes(config.page_size, self.head_size, self.dtype)

    def open_bytes(self, config: RetrievalConfig) -> int:
        """Of pages that wait to be encoded: each request's last ones, and a layer's of a step."""
        if config.encoding is None:
            return 0
        token = self.block_bytes // self.block_size
        last = (1 + config.open_pages) * config.page_size * token + mmap.PAGESIZE
        return self.retrieval_layers * self.max_num_seqs * last + self.step_tokens * token

    def fits_in(self, fast: int, config: RetrievalConfig) -> bool:
        """Whether ``blocks_wanted`` fit in so many bytes, page index included."""
        layers = self.retrieval_layers + self.dense_layers
        index = self.index_bytes(1, config)
        return self.blocks_wanted * (layers * self.block_bytes + index) <= fast


@dataclass(frozen=True)
class Tiers:
    """What goes where. Bytes, unless said otherwise.

    Attributes:
        blocks: vLLM's blocks in home; what its scheduler deals in.
        slots: Of each retrieval layer, how much fast memory holds: (page, KV head) units, or where
            methods select single tokens, tokens of KV heads.
        home: The slow tier.
        streams_dense: Whether dense layers are in home, too, and read from there at every step.
        dense: Dense layers in fast memory.
        index: Page index, in fast memory.
        books: What says which unit is in which slot, and which part of home could not be read, or
            which page is encoded.
        staging: Where prefill lays out its context, see PrefillStaging; 0: it does without.
        open_pages: What is not yet encoded, where home is.
        recall_cache: All slots.
    """

    blocks: int
    slots: tuple[int, ...]
    home: int
    streams_dense: bool
    dense: int
    index: int
    books: int
    staging: int
    open_pages: int
    recall_cache: int

    @property
    def fast(self) -> int:
        """Fast memory that all of it takes."""
        parts = self.dense, self.index, self.books, self.staging, self.open_pages
        return sum(parts) + self.recall_cache

    @classmethod
    def plan(
        cls,
        config: RetrievalConfig,
        cache: Cache,
        fast: int,
        staging: int,
        blocks: int | None = None,
    ) -> "Tiers":
        """Divide fast memory and home.

        Fast memory must have room for index, books, and the slots that running requests need. If it
        has not, prefill first does without staging, and then dense layers are streamed from home.
        What is encoded is read in slots and in staging only, so an encoded home needs all of that.

        Args:
            config: Options of the engine.
            cache: What is to be kept.
            fast: Bytes of fast memory that everything may take in all.
            staging: Bytes of the staging buffer.
            blocks: Number of blocks where the user has fixed it.

        Raises:
            RetrievalConfigError: Something does not fit; says what, by how much, and the remedy.
        """
        # vLLM's kernel does not read rows, nor what is encoded: prefill cannot do without staging.
        staged = [staging] if config.rows or config.encoding is not None else [staging, 0]
        frugal = [(False, size) for size in staged]
        if cache.dense_layers and config.encoding is None:
            frugal += [(True, size) for size in staged]
        for streams_dense, size in frugal[:-1]:
            with contextlib.suppress(RetrievalConfigError):
                return cls._plan(config, cache, fast, size, blocks, streams_dense)
        streams_dense, size = frugal[-1]
        return cls._plan(config, cache, fast, size, blocks, streams_dense)

    @classmethod
    def _plan(
        cls,
        config: RetrievalConfig,
        cache: Cache,
        fast: int,
        staging: int,
        blocks: int | None,
        streams_dense: bool,
    ) -> "Tiers":
        block_bytes = cache.retrieval_layers * cache.bytes_in_home(config)
        block_bytes += cache.dense_layers * streams_dense * cache.block_bytes
        fixed = blocks is not None
        if blocks is None:
            wanted = cache.blocks_wanted * block_bytes
            blocks = (config.home_bytes or wanted) // block_bytes
        if blocks <= cache.blocks_per_request:
            least = cache.blocks_per_request + 1
            need = least * block_bytes
            given, remedy = f"kv_retrieval.home_bytes={config.home_bytes}", f"home_bytes to {need}"
            if fixed:
                given = f"--num-gpu-blocks-override {blocks}"
                remedy = f"--num-gpu-blocks-override to {least}"
            raise RetrievalConfigError(
                f"{given}: one request of max_model_len={cache.max_model_len} needs "
                f"{format_gib(need)} GiB. Raise {remedy} at least, or lower --max-model-len."
            )
        each = 1 if config.rows else config.page_size  # tokens of a slot
        units = 0 if config.rows else blocks * (cache.block_size // each) * cache.kv_heads
        home, mappings = blocks * block_bytes, 2 if config.rows else 1
        states = mappings * (home // mmap.PAGESIZE)  # of what could not be read; or of pages
        if config.encoding is not None:
            states = cache.retrieval_layers * units // cache.kv_heads
        parts = {
            "dense layers": 0 if streams_dense else blocks * cache.dense_layers * cache.block_bytes,
            "page index": cache.index_bytes(blocks, config),
            "books": cache.retrieval_layers * units * BOOKS_PER_UNIT + states,
            "staging": staging,
            "open pages": cache.open_bytes(config),
        }
        left = fast - sum(parts.values())
        taken = ", ".join(f"{name} {format_gib(size)}" for name, size in parts.items() if size)
        taken = f"of {format_gib(fast)} GiB for the KV cache, what comes first ({taken}) leaves "
        taken += f"{format_gib(left)} GiB"
        if config.recall_cache_bytes is not None and config.recall_cache_bytes > left:
            raise RetrievalConfigError(
                f"kv_retrieval.recall_cache_bytes={config.recall_cache_bytes} is more than fast "
                f"memory has: {taken}. Lower it, or {cls._remedy()}."
            )
        books = BOOKS_PER_TOKEN if config.rows else BOOKS_PER_SLOT
        per_slot = each * cache.token_bytes + books
        recall_bytes = left if config.recall_cache_bytes is None else config.recall_cache_bytes
        room = recall_bytes // per_slot
        budget = config.budget_limit // config.page_size * config.page_size
        lists = cache.max_num_seqs * cache.kv_heads
        alike = (cache.kv_heads * (budget // each),) * cache.retrieval_layers
        attended = cache.attended or alike
        if config.rows:
            # Every request has its own slots, in whole pages, so that their numbers are tokens'.
            longest = cache.blocks_per_request * cache.block_size
            pages = -(-max(attended) // (cache.kv_heads * config.page_size))
            least = min(pages * config.page_size, longest)
            most = min(max(MOST_TOKENS * budget, least), longest)
            own = min(room // cache.retrieval_layers // lists, most)
            needs = [lists * least] * cache.retrieval_layers
            slots = [lists * (own // config.page_size) * config.page_size] * cache.retrieval_layers
        else:
            needs = [min(units, cache.max_num_seqs * count) for count in attended]
            # In proportion to what the layers attend to.
            slots = [min(units, room * need // sum(needs)) for need in needs]
        if any(slot < need for slot, need in zip(slots, needs, strict=True)):
            raise RetrievalConfigError(
                f"kv_retrieval.recall_cache_bytes: sink, window and budget of max_num_seqs="
                f"{cache.max_num_seqs} requests need {format_gib(sum(needs) * per_slot)} GiB of "
                f"slots; {taken}. Lower --max-num-seqs or kv_retrieval.budget (or max_budget), "
                f"raise recall_cache_bytes if you have set it, or {cls._remedy()}."
            )
        return cls(
            blocks=blocks,
            slots=tuple(slots),
            home=home,
            streams_dense=streams_dense,
            dense=parts["dense layers"],
            index=parts["page index"],
            books=parts["books"],
            staging=staging,
            open_pages=parts["open pages"],
            recall_cache=sum(slots) * per_slot,
        )

    @staticmethod
    def _remedy() -> str:
        return (
            "lower kv_retrieval.home_bytes, to which index and books are in proportion, or give "
            "the KV cache more fast memory (--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE)"
        )
