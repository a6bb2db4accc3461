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

    @property
    def blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def blocks_wanted(self) -> int:
        """For as many of the longest requests as may run at once; one block is vLLM's own."""
        return self.max_num_seqs * self.blocks_per_request + 1

    def index_bytes(self, blocks: int, config: RetrievalConfig) -> int:
        """Bytes of page index beside so many blocks."""
        kv_bytes = blocks * self.retrieval_layers * self.block_bytes
        return config.index_bytes(kv_bytes, self.head_size, self.dtype)

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
        slots: Per retrieval layer, how many (page, KV head) units fast memory holds.
        home: The slow tier.
        streams_dense: Whether dense layers are in home, too, and read from there at every step.
        dense: Dense layers in fast memory.
        index: Page index, in fast memory.
        books: What says which unit is in which slot, and which part of home could not be read.
        staging: Where prefill lays out its context, see PrefillStaging; 0: it does without.
        recall_cache: All slots.
    """

    blocks: int
    slots: int
    home: int
    streams_dense: bool
    dense: int
    index: int
    books: int
    staging: int
    recall_cache: int

    @property
    def fast(self) -> int:
        """Fast memory that all of it takes."""
        return self.dense + self.index + self.books + self.staging + self.recall_cache

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

        Args:
            config: Options of the engine.
            cache: What is to be kept.
            fast: Bytes of fast memory that everything may take in all.
            staging: Bytes of the staging buffer.
            blocks: Number of blocks where the user has fixed it.

        Raises:
            RetrievalConfigError: Something does not fit; says what, by how much, and the remedy.
        """
        frugal = [(False, staging), (False, 0)]
        if cache.dense_layers:
            frugal += [(True, staging), (True, 0)]
        for streams_dense, staged in frugal[:-1]:
            with contextlib.suppress(RetrievalConfigError):
                return cls._plan(config, cache, fast, staged, blocks, streams_dense)
        streams_dense, staged = frugal[-1]
        return cls._plan(config, cache, fast, staged, blocks, streams_dense)

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
        in_home = cache.retrieval_layers + cache.dense_layers * streams_dense
        block_bytes = in_home * cache.block_bytes
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
        units = blocks * (cache.block_size // config.page_size) * cache.kv_heads
        unit_bytes = cache.block_bytes * blocks // units
        home = blocks * block_bytes
        parts = {
            "dense layers": 0 if streams_dense else blocks * cache.dense_layers * cache.block_bytes,
            "page index": cache.index_bytes(blocks, config),
            "books": cache.retrieval_layers * units * BOOKS_PER_UNIT + home // mmap.PAGESIZE,
            "staging": staging,
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
        per_slot = cache.retrieval_layers * (unit_bytes + BOOKS_PER_SLOT)
        recall_bytes = left if config.recall_cache_bytes is None else config.recall_cache_bytes
        slots = min(units, recall_bytes // per_slot)
        most = config.budget_limit // config.page_size
        least = min(units, cache.max_num_seqs * cache.kv_heads * most)
        if slots < least:
            raise RetrievalConfigError(
                f"kv_retrieval.recall_cache_bytes: sink, window and budget of max_num_seqs="
                f"{cache.max_num_seqs} requests need {format_gib(least * per_slot)} GiB of slots; "
                f"{taken}. Lower --max-num-seqs or kv_retrieval.budget (or max_budget), raise "
                f"recall_cache_bytes if you have set it, or {cls._remedy()}."
            )
        return cls(
            blocks=blocks,
            slots=slots,
            home=home,
            streams_dense=streams_dense,
            dense=parts["dense layers"],
            index=parts["page index"],
            books=parts["books"],
            staging=staging,
            recall_cache=slots * per_slot,
        )

    @staticmethod
    def _remedy() -> str:
        return (
            "lower kv_retrieval.home_bytes, to which index and books are in proportion, or give "
            "the KV cache more fast memory (--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE)"
        )
