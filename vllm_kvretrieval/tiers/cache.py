"""The size of a worker's KV cache: its layers, blocks and requests."""

import mmap
from dataclasses import dataclass

import torch

from vllm_kvretrieval.options.engine import RetrievalConfig


@dataclass(frozen=True)
class Cache:
    """The KV cache of one worker, all its layers alike.

    Attributes:
        retrieval_layers, dense_layers: How many of each.
        kv_heads: Per layer.
        block_size: Tokens per block of vLLM's.
        block_bytes: Bytes of a block in one layer.
        head_size, dtype: The head size and element type of keys and values.
        max_num_seqs, max_model_len: Most requests at once, and tokens of each.
        attended: The most that a request attends to in each retrieval layer: (page, KV head)
            units, or, if methods select single tokens, tokens of KV heads, all with the same
            number; None: for each KV head as many as the largest budget has.
        step_tokens: Most tokens that a step computes.
        alignment: The alignment of the fields of page indexes' records, in bytes.
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
    alignment: int = 1

    @property
    def blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key and value of one KV head."""
        return self.block_bytes // (self.block_size * self.kv_heads)

    def blocks_for(self, seats: int) -> int:
        """Blocks for a number of requests of full length; one block more is vLLM's own."""
        return seats * self.blocks_per_request + 1

    def index_bytes(self, blocks: int, config: RetrievalConfig) -> int:
        """Bytes of page index beside so many blocks."""
        kv_bytes = blocks * self.retrieval_layers * self.block_bytes
        return config.index_bytes(kv_bytes, self.head_size, self.dtype, self.alignment)

    def bytes_in_home(self, config: RetrievalConfig) -> int:
        """Bytes in home of a block of a retrieval layer."""
        if config.encoding is None:
            return self.block_bytes
        units = self.block_size // config.page_size * self.kv_heads
        return units * config.encoding.unit_bytes(config.page_size, self.head_size, self.dtype)

    def open_bytes(self, config: RetrievalConfig, seats: int) -> int:
        """Bytes of pages that wait to be encoded.

        These are the last pages of the requests, and the pages that a step writes in one layer.
        """
        if config.encoding is None:
            return 0
        token = self.block_bytes // self.block_size
        last = (1 + config.open_pages) * config.page_size * token + mmap.PAGESIZE
        return self.retrieval_layers * seats * last + self.step_tokens * token

    def fits_in(self, fast: int, config: RetrievalConfig) -> bool:
        """Whether ``max_num_seqs`` of the longest requests fit in so many bytes, index included."""
        layers = self.retrieval_layers + self.dense_layers
        index = self.index_bytes(1, config)
        return self.blocks_for(self.max_num_seqs) * (layers * self.block_bytes + index) <= fast
