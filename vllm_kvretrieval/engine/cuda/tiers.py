"""Division of memory when the home of the KV cache is host memory."""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import NoReturn

from vllm.utils.mem_utils import format_gib

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.triton.resolve import MOST_SLOTS
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.tier_sizes import HOME_SHARE, Cache, most_of, most_seats

BOOKS_PER_SLOT = 8
"""Bytes beside a slot: what is in it, and the step that last used it."""
BUDGETS = 2
"""Budgets of slots per request, if there is room: one for the step, one for what is kept longer."""
HOST_SHARE = Fraction(1, 2)
"""Share of host memory that a home takes by default; for a single request it may take all."""
MOST_HOME = 4
"""Most of a home by default, as a multiple of the device's room: a larger home has more memory to
lock at every start, and leaves each context less of the device."""


@dataclass(frozen=True)
class HostTiers:
    """A division of memory. Numbers are bytes, unless said otherwise.

    Attributes:
        seats: Most requests that run at once; ``Cache.max_num_seqs``, or fewer.
        blocks: vLLM's blocks in home, the units of its scheduler.
        staged: Pages of a buffer for the contexts of prompts.
        capacity: Slots of a KV head of a request in each retrieval layer, for
            ``RetrievalConfig.slot_tokens`` tokens each.
        home: Host memory that is locked: the retrieval layers.
        dense: Dense layers on the device.
        index: Page index, on the device.
        staging: Buffers on the device for contexts of prompts.
        open_pages: Pages on the device that are not yet encoded, if home is encoded.
        slots: All slots, on the device.
    """

    seats: int
    blocks: int
    staged: int
    capacity: int
    home: int
    dense: int
    index: int
    staging: int
    open_pages: int
    slots: int

    @property
    def device(self) -> int:
        """Device memory that all parts take together."""
        return self.dense + self.index + self.staging + self.open_pages + self.slots

    def of(self, blocks: int) -> "HostTiers":
        """The same division with fewer blocks, if another worker has less room."""
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
        drafts: int = 0,
    ) -> "HostTiers":
        """Divide the memory of the device and of the host.

        Staging, and dense layers and index of the home, come first. As many requests run at once,
        up to ``max_num_seqs``, as the rest of the device has slots for, ``ROOMY`` budgets each.
        What they leave goes to the home, then to slots; see ``Tiers.plan``.

        Args:
            config: Options of the engine.
            cache: The KV cache of the worker.
            device: Bytes of the device for everything together.
            host: Bytes of host memory that this worker may lock.
            blocks: Number of blocks, if the user has fixed it.
            drafts: The most draft tokens of a request in a step.

        Raises:
            RetrievalConfigError: One request of ``max_model_len`` cannot be served, or a size that
                the user has set does not fit; says which, by how much, and the remedy.
        """
        return _Plan(config, cache, device, host, blocks, drafts).make()


@dataclass(frozen=True)
class _Plan:
    """Arguments as those of :meth:`HostTiers.plan`."""

    config: RetrievalConfig
    cache: Cache
    device: int
    host: int
    fixed_blocks: int | None
    drafts: int

    def make(self) -> HostTiers:
        """Divide memory for as many requests as fit; raises as :meth:`HostTiers.plan`."""
        cache = self.cache
        seats, budgets = most_seats(cache.max_num_seqs, self._fits)
        if not seats:
            self._refuse()
        blocks = self._wanted(seats)
        if self._given is None:
            left = self._left(seats, self._least_capacity(seats, budgets))
            blocks = most_of(blocks, lambda blocks: self._beside(blocks) <= left)
        capacity = self._most_capacity(seats, blocks)
        return HostTiers(
            seats=seats,
            blocks=blocks,
            staged=self._staged,
            capacity=capacity,
            home=blocks * self._at_home,
            dense=blocks * cache.dense_layers * cache.block_bytes,
            index=cache.index_bytes(blocks, self.config),
            staging=self._staging,
            open_pages=self._open(seats),
            slots=capacity * self._slot_bytes(seats),
        )

    @property
    def _given(self) -> str | None:
        """The option by which the user has set the size of the home."""
        if self.fixed_blocks is not None:
            return f"--num-gpu-blocks-override {self.fixed_blocks}"
        if self.config.home_bytes is not None:
            return f"home_bytes={self.config.home_bytes}"
        return None

    @property
    def _budget(self) -> int:
        """Slots of what a KV head attends to within a budget, drafts beyond it included."""
        tokens = self.config.slot_tokens
        return self.config.budget_limit // tokens + -(-self.drafts // tokens)

    @property
    def _page_bytes(self) -> int:
        """Bytes of a page of a KV head."""
        return self.config.page_size * self.cache.token_bytes

    @property
    def _staged(self) -> int:
        longest = max(self.cache.max_model_len, self.cache.step_tokens)
        return -(-longest // self.config.page_size)

    @property
    def _staging(self) -> int:
        return 2 * self._staged * self._page_bytes * self.cache.kv_heads

    @property
    def _at_home(self) -> int:
        """Bytes of a block in host memory."""
        return self.cache.retrieval_layers * self.cache.bytes_in_home(self.config)

    def _open(self, seats: int) -> int:
        """Bytes of the device for the pages of ``seats`` requests that are not yet encoded."""
        if self.config.encoding is None:
            return 0
        lists = seats * self.cache.kv_heads * self.cache.retrieval_layers
        return lists * (1 + self.config.open_pages) * self._page_bytes

    def _slot_bytes(self, seats: int) -> int:
        """Bytes of one slot of every KV head of ``seats`` requests."""
        lists = seats * self.cache.kv_heads * self.cache.retrieval_layers
        unit = self.config.slot_tokens * self.cache.token_bytes
        return lists * (unit + BOOKS_PER_SLOT)

    def _beside(self, blocks: int) -> int:
        """Bytes of the device in proportion to the home."""
        dense = blocks * self.cache.dense_layers * self.cache.block_bytes
        return dense + self.cache.index_bytes(blocks, self.config)

    def _left(self, seats: int, capacity: int) -> int:
        """Bytes of the device for the parts that grow with the home."""
        slots = capacity * self._slot_bytes(seats)
        return self.device - self._staging - self._open(seats) - slots

    def _wanted(self, seats: int) -> int:
        """Blocks of a home for ``seats`` requests, as far as host memory allows; or the user's."""
        if self.fixed_blocks is not None:
            return self.fixed_blocks
        if self.config.home_bytes is not None:
            return self.config.home_bytes // self._at_home
        share = min(int(self.host * HOST_SHARE), MOST_HOME * self.device) // self._at_home
        one = min(self.cache.blocks_for(1), self.host // self._at_home)
        return min(self.cache.blocks_for(seats), max(share, one))

    def _home_share(self, seats: int) -> int:
        """Bytes of the device that the home has before requests have slots."""
        wanted = self._beside(self._wanted(seats))
        if self._given is not None:
            return wanted
        least = self._beside(self.cache.blocks_for(1))
        return max(least, min(wanted, int(self.device * HOME_SHARE)))

    def _least_capacity(self, seats: int, budgets: Fraction) -> int:
        """Slots of a KV head of a request that are reserved first."""
        if self.config.recall_cache_bytes is not None:
            return min(self.config.recall_cache_bytes // self._slot_bytes(seats), MOST_SLOTS)
        return min(ceil(self._budget * budgets), max(MOST_SLOTS, self._budget))

    def _most_capacity(self, seats: int, blocks: int) -> int:
        """Slots of a KV head of a request."""
        if self.config.recall_cache_bytes is not None:
            return self._least_capacity(seats, Fraction(1))
        left = self._left(seats, 0) - self._beside(blocks)
        return min(left // self._slot_bytes(seats), BUDGETS * self._budget, MOST_SLOTS)

    def _fits(self, seats: int, budgets: Fraction) -> bool:
        capacity = self._least_capacity(seats, budgets)
        wanted = self._budget if self.config.recall_cache_bytes is not None else capacity
        return (
            self.cache.blocks_for(1) <= self._wanted(seats) <= self.host // self._at_home
            and wanted <= capacity <= MOST_SLOTS
            and self._home_share(seats) <= self._left(seats, capacity)
        )

    def _refuse(self) -> NoReturn:
        """Say why not even one request can be served."""
        config, cache = self.config, self.cache
        capacity = self._least_capacity(1, Fraction(1))
        if capacity < self._budget:
            raise RetrievalConfigError(
                f"kv_retrieval.recall_cache_bytes={config.recall_cache_bytes} is too small for the "
                f"slots of one request: a budget of {config.budget_limit} tokens needs "
                f"{self._budget * self._slot_bytes(1)} bytes. Raise it, or lower "
                "kv_retrieval.budget (or max_budget)."
            )
        given, least = self._given, cache.blocks_for(1)
        count = max(least, self._wanted(1))
        raise RetrievalConfigError(
            f"kv_retrieval.home=host{f', {given}' if given else ''}: {count} blocks of "
            f"{cache.block_size} tokens need {format_gib(count * self._at_home)} GiB of host "
            f"memory and {format_gib(self._beside(count))} GiB of the device for dense layers and "
            f"page index; a request of max_model_len={cache.max_model_len} needs {least} blocks. "
            f"There are {format_gib(self.host)} GiB of host memory to be locked, and of "
            f"{format_gib(self.device)} GiB of the device, staging "
            f"({format_gib(self._staging)} GiB) and the slots of one request "
            f"({format_gib(capacity * self._slot_bytes(1) + self._open(1))} GiB) leave "
            f"{format_gib(self._left(1, capacity))} GiB. Lower --max-model-len or "
            "kv_retrieval.budget (or max_budget), or set home_bytes or the number of blocks to "
            "what fits."
        )
