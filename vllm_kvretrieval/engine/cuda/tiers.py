"""How much of the KV cache goes where, when its home is host memory."""

from dataclasses import dataclass, replace

from vllm.utils.mem_utils import format_gib

from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.triton.resolve import MOST_SLOTS
from vllm_kvretrieval.tiers.sizes import Cache

BOOKS_PER_SLOT = 8
"""Bytes beside a slot: what it holds, and when that was used."""
BUDGETS = 2
"""Of slots per request, where there is room: one for the step, one for what comes and goes."""


@dataclass(frozen=True)
class HostTiers:
    """What goes where. Bytes, unless said otherwise.

    Attributes:
        blocks: vLLM's blocks in home; what its scheduler deals in.
        staged: Pages of a buffer for the contexts of prompts.
        capacity: Slots of a KV head of a request in each retrieval layer, for a page each.
        home: Host memory that is locked: the retrieval layers.
        dense: Dense layers on the device.
        index: Page index, on the device.
        staging: Buffers on the device for contexts of prompts.
        slots: All slots, on the device.
    """

    blocks: int
    staged: int
    capacity: int
    home: int
    dense: int
    index: int
    staging: int
    slots: int

    @property
    def device(self) -> int:
        """Device memory that all of it takes."""
        return self.dense + self.index + self.staging + self.slots

    def of(self, blocks: int) -> "HostTiers":
        """The same with fewer blocks, as workers have where another has less room."""
        growing = {name: getattr(self, name) for name in ("home", "dense", "index")}
        return replace(
            self,
            blocks=blocks,
            **{name: size // self.blocks * blocks for name, size in growing.items()},
        )

    @classmethod
    def plan(
        cls,
        config: RetrievalConfig,
        cache: Cache,
        *,
        device: int,
        host: int,
        blocks: int | None = None,
    ) -> "HostTiers":
        """Divide the memory of the device and of the host.

        The device must have room for staging, for the slots of ``max_num_seqs`` requests, and for
        dense layers and index of all blocks; twice as many slots are taken where that leaves as
        many blocks.

        Args:
            config: Options of the engine.
            cache: What is to be kept.
            device: Bytes that everything may take there.
            host: Bytes of host memory that this worker may lock.
            blocks: Number of blocks where the user has fixed it.

        Raises:
            RetrievalConfigError: Something does not fit; says what, by how much, and the remedy.
        """
        at_home = cache.retrieval_layers * cache.block_bytes
        beside = cache.dense_layers * cache.block_bytes + cache.index_bytes(1, config)
        page = config.page_size * cache.token_bytes
        staged = -(-max(cache.max_model_len, cache.step_tokens) // config.page_size)
        staging = 2 * staged * page * cache.kv_heads
        slot = cache.max_num_seqs * cache.kv_heads * cache.retrieval_layers
        slot *= page + BOOKS_PER_SLOT  # one of every KV head
        least, wanted, given = cache.blocks_per_request + 1, cache.blocks_wanted, None
        if blocks is not None:
            wanted, given = blocks, f"--num-gpu-blocks-override {blocks}"
        elif config.home_bytes is not None:
            wanted, given = config.home_bytes // at_home, f"home_bytes={config.home_bytes}"
        most = min(wanted, host // at_home)
        capacity = cls._capacity(config, slot, device - staging - most * beside)
        left = device - staging - capacity * slot
        room = min(host // at_home, left // beside if beside else wanted)
        if given is None:
            wanted = min(wanted, room)
        if not least <= wanted <= room:
            count = max(least, wanted)
            raise RetrievalConfigError(
                f"kv_retrieval.home=host{f', {given}' if given else ''}: {count} blocks of "
                f"{cache.block_size} tokens need {format_gib(count * at_home)} GiB of host memory "
                f"and {format_gib(count * beside)} GiB of the device for dense layers and page "
                f"index; a request of max_model_len={cache.max_model_len} needs {least} blocks. "
                f"There are {format_gib(host)} GiB of host memory to be locked, and of "
                f"{format_gib(device)} GiB of the device, staging ({format_gib(staging)} GiB) and "
                f"the slots of max_num_seqs={cache.max_num_seqs} requests "
                f"({format_gib(capacity * slot)} GiB) leave {format_gib(left)} GiB. Lower "
                "--max-model-len, --max-num-seqs or kv_retrieval.budget (or max_budget), or set "
                "home_bytes or the number of blocks to what fits."
            )
        return cls(
            blocks=wanted,
            staged=staged,
            capacity=capacity,
            home=wanted * at_home,
            dense=wanted * cache.dense_layers * cache.block_bytes,
            index=cache.index_bytes(wanted, config),
            staging=staging,
            slots=capacity * slot,
        )

    @staticmethod
    def _capacity(config: RetrievalConfig, slot: int, left: int) -> int:
        """Slots of a KV head of a request, if one of every KV head takes ``slot`` bytes."""
        budget = config.budget_limit // config.page_size
        if config.recall_cache_bytes is None:
            return min(max(left // slot, budget), BUDGETS * budget, MOST_SLOTS)
        capacity = min(config.recall_cache_bytes // slot, MOST_SLOTS)
        if capacity < budget:
            raise RetrievalConfigError(
                f"kv_retrieval.recall_cache_bytes={config.recall_cache_bytes} is too small for the "
                f"slots of all requests: a budget of {config.budget_limit} tokens needs "
                f"{budget * slot} bytes. Raise it, or lower --max-num-seqs or kv_retrieval.budget "
                "(or max_budget)."
            )
        return capacity
