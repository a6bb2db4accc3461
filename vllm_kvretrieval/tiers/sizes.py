"""How much of the KV cache fits where, when its home is a slow tier."""

from dataclasses import dataclass

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
        max_num_seqs, max_model_len: Requests at once, and tokens of each.
    """

    retrieval_layers: int
    dense_layers: int
    kv_heads: int
    block_size: int
    block_bytes: int
    max_num_seqs: int
    max_model_len: int

    @property
    def blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def blocks_wanted(self) -> int:
        """For as many of the longest requests as may run at once; one block is vLLM's own."""
        return self.max_num_seqs * self.blocks_per_request + 1

    def fits_in(self, fast: int, tokens_per_summary: int) -> bool:
        """Whether ``blocks_wanted`` fit in so many bytes, page index included."""
        layers = self.retrieval_layers + self.dense_layers
        index = self.retrieval_layers * self.block_bytes // tokens_per_summary
        return self.blocks_wanted * (layers * self.block_bytes + index) <= fast


@dataclass(frozen=True)
class Tiers:
    """What goes where. Bytes, unless said otherwise.

    Attributes:
        blocks: vLLM's blocks in home; what its scheduler deals in.
        slots: Per retrieval layer, how many (page, KV head) units fast memory holds.
        home: The slow tier.
        dense: Layers that stay in fast memory.
        index: Page index and recall cache's books on home, in fast memory.
        recall_cache: All slots.
    """

    blocks: int
    slots: int
    home: int
    dense: int
    index: int
    recall_cache: int

    @classmethod
    def plan(
        cls, config: RetrievalConfig, cache: Cache, fast: int, blocks: int | None = None
    ) -> "Tiers":
        """Divide fast memory and home.

        Args:
            config: Options of the engine.
            cache: What is to be kept.
            fast: Bytes of fast memory that the KV cache may take in all.
            blocks: Number of blocks where the user has fixed it.

        Raises:
            RetrievalConfigError: Something does not fit; says what, by how much, and the remedy.
        """
        block_bytes = cache.retrieval_layers * cache.block_bytes
        if blocks is None:
            wanted = cache.blocks_wanted * block_bytes
            blocks = (config.home_bytes or wanted) // block_bytes
        if blocks <= cache.blocks_per_request:
            need = (cache.blocks_per_request + 1) * block_bytes
            raise RetrievalConfigError(
                f"kv_retrieval.home_bytes={config.home_bytes}: one request of max_model_len="
                f"{cache.max_model_len} needs {format_gib(need)} GiB. Raise home_bytes to at least "
                f"{need}, or lower --max-model-len."
            )
        units = blocks * (cache.block_size // config.page_size) * cache.kv_heads
        unit_bytes = cache.block_bytes * blocks // units
        dense = blocks * cache.dense_layers * cache.block_bytes
        books = cache.retrieval_layers * units * BOOKS_PER_UNIT
        index = blocks * block_bytes // config.tokens_per_summary + books
        left = fast - dense - index
        if config.recall_cache_bytes is not None and config.recall_cache_bytes > left:
            raise RetrievalConfigError(
                f"kv_retrieval.recall_cache_bytes={config.recall_cache_bytes} is more than fast "
                f"memory has: of {format_gib(fast)} GiB for the KV cache, "
                f"{cls._fixed(dense, index)} leave {format_gib(left)} GiB. "
                f"Lower it, or {cls._remedy()}."
            )
        per_slot = cache.retrieval_layers * (unit_bytes + BOOKS_PER_SLOT)
        recall_bytes = left if config.recall_cache_bytes is None else config.recall_cache_bytes
        slots = min(units, recall_bytes // per_slot)
        least = min(units, cache.max_num_seqs * cache.kv_heads * config.page_budget().total)
        if slots < least:
            raise RetrievalConfigError(
                f"kv_retrieval.recall_cache_bytes: sink, window and budget of max_num_seqs="
                f"{cache.max_num_seqs} requests need {format_gib(least * per_slot)} GiB of slots, "
                f"but there are {format_gib(max(recall_bytes, 0))} GiB: of {format_gib(fast)} GiB "
                f"of fast memory for the KV cache, {cls._fixed(dense, index)} come first. "
                "Lower --max-num-seqs or kv_retrieval.budget, raise recall_cache_bytes if you have "
                f"set it, or {cls._remedy()}."
            )
        return cls(blocks, slots, blocks * block_bytes, dense, index, slots * per_slot)

    @staticmethod
    def _fixed(dense: int, index: int) -> str:
        return f"dense layers ({format_gib(dense)} GiB) and page index ({format_gib(index)} GiB)"

    @staticmethod
    def _remedy() -> str:
        return (
            "lower kv_retrieval.home_bytes, to which dense layers and index are in proportion, or "
            "give the KV cache more fast memory (--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE)"
        )
