"""The size of a worker's KV cache, and the division of memory where its home is a slow tier."""

import contextlib
import mmap
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NoReturn

import torch
from vllm.utils.mem_utils import format_gib

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig

BOOKS_PER_UNIT = 4
"""Bytes that the recall cache keeps per unit of home: the slot that holds it."""
BOOKS_PER_SLOT = 24
"""Bytes that it keeps per slot: its unit, pins, last step, place in the order of use."""
BOOKS_PER_TOKEN = 16
"""Bytes that the recall of tokens keeps per slot: the token's position, its number in home, its
place, last step."""
MOST_TOKENS = 4
"""Slots for single tokens of a request, at most, in budgets of the largest size: more slots take
longer to search, and tokens that were attended to long ago are seldom wanted again."""

ROOMY = Fraction(3, 2)
"""Budgets of slots per request if the number of requests follows from the room: one for the units
that a step attends to, and half of one for those that are read ahead of the next."""
HOME_SHARE = Fraction(1, 2)
"""Share of fast memory for the parts that grow with the home, if the user has set no size. They may
take it before requests get slots; beyond it they get what requests leave."""
KEPT = 2
"""Blocks of other groups than home's, in those that a request holds at most: one for the request,
and one for contexts that the prefix cache keeps."""
DISK_SHARE = Fraction(3, 4)
"""Share of the free space that a home takes by default; for a single request it may take all."""


@dataclass(frozen=True)
class Cache:
    """The KV cache of one worker; all layers with full attention in it are alike.

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
        groups: Groups of layers in home, each with blocks of its own.
        other_blocks: Blocks that a request has at most in groups of other layers, such as those
            with sliding windows and recurrent states, which stay in fast memory.
        other_bytes: Bytes of each of them.
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
    groups: int = 1
    other_blocks: int = 0
    other_bytes: int = 0

    @property
    def blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key and value of one KV head."""
        return self.block_bytes // (self.block_size * self.kv_heads)

    def blocks_for(self, seats: int) -> int:
        """Blocks for a number of requests of full length; one block more is vLLM's own."""
        return seats * self.groups * self.blocks_per_request + 1

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
        block = max(layers * self.block_bytes, self.other_bytes) + self.index_bytes(1, config)
        blocks = self.blocks_for(self.max_num_seqs) + KEPT * self.max_num_seqs * self.other_blocks
        return blocks * block <= fast


def most_of(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``most`` that fits; 0: none. If one fits, so do those below it."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def most_seats(most: int, fits: Callable[[int, Fraction], bool]) -> tuple[int, Fraction]:
    """Number of requests that run at once, and of budgets that each has slots for.

    Args:
        most: Upper bound of the number of requests.
        fits: Says whether a number of requests fits, with slots for a number of budgets each.

    Returns:
        As many requests as have ``ROOMY`` slots; if not even one has, as many as have slots for one
        budget; 0: none.
    """
    for budgets in (ROOMY, Fraction(1)):
        if seats := most_of(most, lambda seats: fits(seats, budgets)):  # noqa: B023 - called here
            return seats, budgets
    return 0, Fraction(1)


@dataclass(frozen=True)
class Tiers:
    """A division of memory. Numbers are bytes, unless said otherwise.

    Attributes:
        seats: Most requests that run at once; ``Cache.max_num_seqs``, or fewer.
        blocks: vLLM's blocks in home, the units of its scheduler; the first by number.
        other_blocks: Blocks behind them, of groups of layers that stay in fast memory.
        slots: Slots of each retrieval layer in fast memory: for (page, KV head) units, or, if
            methods select single tokens, for tokens of KV heads.
        home: The slow tier.
        streams_dense: Whether dense layers are in home, too, and read from there at every step.
        dense: Dense layers in fast memory.
        index: Page index, in fast memory.
        books: Tables of units in slots, of parts of home that could not be read, and of encoded
            pages.
        staging: The buffer in which prefill lays out its context, see PrefillStaging; 0: none.
        open_pages: Pages that are not yet encoded, if home is encoded.
        recall_cache: All slots.
        others: The blocks behind those in home.
    """

    seats: int
    blocks: int
    other_blocks: int
    slots: tuple[int, ...]
    home: int
    streams_dense: bool
    dense: int
    index: int
    books: int
    staging: int
    open_pages: int
    recall_cache: int
    others: int

    @property
    def fast(self) -> int:
        """Fast memory that all parts take together."""
        parts = self.dense, self.index, self.books, self.staging, self.open_pages, self.others
        return sum(parts) + self.recall_cache

    @property
    def all_blocks(self) -> int:
        """vLLM's blocks, wherever they are."""
        return self.blocks + self.other_blocks

    def of(self, all_blocks: int) -> "Tiers":
        """The same division with fewer blocks, if another worker has less room."""
        blocks = all_blocks - self.other_blocks
        growing = {name: getattr(self, name) for name in ("home", "dense", "index", "books")}
        return replace(
            self,
            blocks=blocks,
            **{name: size * blocks // self.blocks for name, size in growing.items()},
        )

    @classmethod
    def plan(
        cls,
        config: RetrievalConfig,
        cache: Cache,
        fast: int,
        staging: int,
        blocks: int | None = None,
        disk: int | None = None,
        streams_dense: bool | None = None,
    ) -> "Tiers":
        """Divide fast memory and home.

        The index and books of the home may take ``HOME_SHARE`` of fast memory, or what a home for
        that many contexts of full length needs, if that is less, or what a home for a single
        context needs, if that is more. As many requests run at once, up to ``max_num_seqs``, as
        have slots in the rest. What they leave goes to the home, up to as many contexts of full
        length, and then to slots.

        If there is not even room for one request, or for all in a home whose size the user has set,
        prefill does without staging, and next dense layers are streamed from home, if that helps.
        Encoded pages are read in slots and in staging only, so an encoded home needs both.

        Args:
            config: Options of the engine.
            cache: The KV cache of the worker.
            fast: Bytes of fast memory for everything together.
            staging: Bytes of the staging buffer.
            blocks: Number of blocks, if the user has fixed it.
            disk: Free bytes at the place of a home whose size the user has not set; None: not
                checked.
            streams_dense: Whether dense layers are in the home that there is already; None: either.

        Raises:
            RetrievalConfigError: One request of ``max_model_len`` cannot be served, or a size that
                the user has set does not fit; says which, by how much, and the remedy.
        """
        # vLLM's kernel does not read rows, nor what is encoded: prefill cannot do without staging.
        staged = [staging] if config.token_major or config.encoding is not None else [staging, 0]
        frugal = [(False, size) for size in staged]
        if cache.dense_layers and config.encoding is None:
            frugal += [(True, size) for size in staged]
        if streams_dense is not None:
            frugal = [(streams_dense, size) for size in staged]
        plans = [
            _Plan(config, cache, fast, size, streams, blocks, disk) for streams, size in frugal
        ]
        for plan in plans:
            if plan.given and plan.serves_all:
                return plan.make()
        for plan in plans[:-1]:
            with contextlib.suppress(RetrievalConfigError):
                return plan.make()
        return plans[-1].make()


@dataclass(frozen=True)
class _Plan:
    """One way to divide memory; arguments as those of :meth:`Tiers.plan`."""

    config: RetrievalConfig
    cache: Cache
    fast: int
    staging: int
    streams_dense: bool
    fixed_blocks: int | None
    disk: int | None

    def make(self) -> Tiers:
        """Divide memory for as many requests as fit; raises as :meth:`Tiers.plan`."""
        config, cache = self.config, self.cache
        seats, budgets = most_seats(cache.max_num_seqs, self._fits)
        # All requests share the slots: if fewer run than may, each has more.
        if seats < cache.max_num_seqs and self.serves_all:
            seats, budgets = cache.max_num_seqs, Fraction(1)
        if not seats:
            self._refuse()
        room = self.fast - self._beside(seats) - self._slots_wanted(seats, budgets)
        blocks = self._wanted(seats)
        if not self.given:
            blocks = most_of(blocks, lambda blocks: sum(self._growing(blocks).values()) <= room)
        growing = self._growing(blocks)
        slots = self._slots(seats, blocks)
        return Tiers(
            seats=seats,
            blocks=blocks,
            other_blocks=self._others(seats),
            slots=slots,
            home=blocks * self._block_bytes,
            streams_dense=self.streams_dense,
            dense=growing["dense layers"],
            index=growing["page index"],
            books=growing["books"],
            staging=self.staging,
            open_pages=cache.open_bytes(config, seats),
            recall_cache=sum(slots) * self._slot_bytes,
            others=self._others(seats) * cache.other_bytes,
        )

    @property
    def given(self) -> bool:
        """Whether the user has set the size of the home."""
        return self.fixed_blocks is not None or self.config.home_bytes is not None

    @property
    def serves_all(self) -> bool:
        """Whether there is room for as many requests as may run at once."""
        return self._fits(self.cache.max_num_seqs, Fraction(1))

    @property
    def _block_bytes(self) -> int:
        """Bytes of a block in home."""
        cache = self.cache
        in_home = cache.retrieval_layers * cache.bytes_in_home(self.config)
        return in_home + cache.dense_layers * self.streams_dense * cache.block_bytes

    @property
    def _slot_bytes(self) -> int:
        """Bytes of a slot, and of the books beside it."""
        tokens = 1 if self.config.token_major else self.config.page_size
        books = BOOKS_PER_TOKEN if self.config.token_major else BOOKS_PER_SLOT
        return tokens * self.cache.token_bytes + books

    def _wanted(self, seats: int) -> int:
        """Blocks of a home for ``seats`` requests, as far as the disk has room; or the user's."""
        if self.fixed_blocks is not None:
            return self.fixed_blocks - self._others(seats)
        if self.config.home_bytes is not None:
            return self.config.home_bytes // self._block_bytes
        wanted = self.cache.blocks_for(seats)
        if self.disk is None:
            return wanted
        share, whole = (int(s * self.disk) // self._block_bytes for s in (DISK_SHARE, 1))
        return min(wanted, max(share, min(self.cache.blocks_for(1), whole)))

    def _others(self, seats: int) -> int:
        """Blocks of other groups."""
        return KEPT * seats * self.cache.other_blocks

    def _units(self, blocks: int) -> int:
        """(page, KV head) units of a layer."""
        return blocks * (self.cache.block_size // self.config.page_size) * self.cache.kv_heads

    def _growing(self, blocks: int) -> dict[str, int]:
        """Bytes of fast memory in proportion to the home."""
        config, cache = self.config, self.cache
        units = 0 if config.token_major else self._units(blocks)
        mappings = 2 if config.token_major else 1
        # Of what could not be read; or of pages.
        states = mappings * (blocks * self._block_bytes // mmap.PAGESIZE)
        if config.encoding is not None:
            states = cache.retrieval_layers * units // cache.kv_heads
        dense = 0 if self.streams_dense else cache.dense_layers * cache.block_bytes
        return {
            "dense layers": blocks * dense,
            "page index": cache.index_bytes(blocks, config),
            "books": cache.retrieval_layers * units * BOOKS_PER_UNIT + states,
        }

    def _beside(self, seats: int) -> int:
        """Bytes of fast memory that are neither slots nor in proportion to the home."""
        others = self._others(seats) * self.cache.other_bytes
        return self.staging + self.cache.open_bytes(self.config, seats) + others

    def _home_share(self, seats: int) -> int:
        """Bytes of fast memory that the home has before requests have slots."""
        wanted = sum(self._growing(self._wanted(seats)).values())
        if self.given:
            return wanted
        least = sum(self._growing(self.cache.blocks_for(1)).values())
        return max(least, min(wanted, int(self.fast * HOME_SHARE)))

    def _needs(self, seats: int, budgets: Fraction = Fraction(1)) -> list[int]:
        """Slots of each layer for a number of requests with a number of budgets each."""
        cache = self.cache
        if self.config.token_major:
            own = min(int(budgets * self._least_tokens), self._longest)
            return [seats * cache.kv_heads * own] * cache.retrieval_layers
        most = cache.kv_heads * (self.config.budget_limit // self.config.page_size)
        attended = cache.attended or (most,) * cache.retrieval_layers
        units = self._units(self._wanted(seats))
        return [min(units, int(seats * count * budgets)) for count in attended]

    @property
    def _longest(self) -> int:
        """Tokens of the longest context, in whole blocks."""
        return self.cache.blocks_per_request * self.cache.block_size

    @property
    def _least_tokens(self) -> int:
        """Slots for single tokens that a KV head of a request needs, in whole pages."""
        cache, page = self.cache, self.config.page_size
        if cache.attended is None:
            return min(self.config.budget_limit // page * page, self._longest)
        pages = -(-max(cache.attended) // (cache.kv_heads * page))
        return min(pages * page, self._longest)

    def _slots_wanted(self, seats: int, budgets: Fraction) -> int:
        """Bytes of slots: the user's, or for a number of requests with a number of budgets each."""
        if self.config.recall_cache_bytes is not None:
            return self.config.recall_cache_bytes
        return sum(self._needs(seats, budgets)) * self._slot_bytes

    def _fits(self, seats: int, budgets: Fraction) -> bool:
        left = self.fast - self._beside(seats) - self._home_share(seats)
        return (
            self._wanted(seats) >= self.cache.blocks_for(1)
            and sum(self._needs(seats)) * self._slot_bytes <= self._slots_wanted(seats, budgets)
            and self._slots_wanted(seats, budgets) <= left
        )

    def _slots(self, seats: int, blocks: int) -> tuple[int, ...]:
        """Slots of each layer, as many as there is room for."""
        config, cache, needs = self.config, self.cache, self._needs(seats)
        recall = config.recall_cache_bytes
        if recall is None:
            recall = self.fast - self._beside(seats) - sum(self._growing(blocks).values())
        room = recall // self._slot_bytes
        if config.token_major:
            # Every request has its own slots, in whole pages, so slots are numbered like tokens.
            lists = seats * cache.kv_heads
            budget = config.budget_limit // config.page_size * config.page_size
            most = min(max(MOST_TOKENS * budget, self._least_tokens), self._longest)
            own = min(room // cache.retrieval_layers // lists, most)
            return (lists * (own // config.page_size) * config.page_size,) * len(needs)
        # In proportion to what the layers attend to.
        return tuple(min(self._units(blocks), room * need // sum(needs)) for need in needs)

    def _refuse(self) -> NoReturn:
        """Say why not even one request can be served."""
        config, cache, blocks = self.config, self.cache, self._wanted(1)
        least = cache.blocks_for(1)
        need = least * self._block_bytes
        if blocks < least:
            given = f"kv_retrieval.home_path: the home may take {format_gib(self.disk or 0)} GiB"
            remedy = "Name another disk"
            if config.home_bytes is not None:
                given = f"kv_retrieval.home_bytes={config.home_bytes}"
                remedy = f"Raise home_bytes to {need} at least"
            if self.fixed_blocks is not None:
                given = f"--num-gpu-blocks-override {self.fixed_blocks}"
                fewest = least + self._others(1)
                remedy = f"Raise --num-gpu-blocks-override to {fewest} at least"
            raise RetrievalConfigError(
                f"{given}: one request of max_model_len={cache.max_model_len} needs "
                f"{format_gib(need)} GiB. {remedy}, or lower --max-model-len."
            )
        opened = cache.open_bytes(config, 1)
        parts = self._growing(blocks) | {"staging": self.staging, "open pages": opened}
        parts["windows and states"] = self._others(1) * cache.other_bytes
        left = self.fast - sum(parts.values())
        taken = ", ".join(f"{name} {format_gib(size)}" for name, size in parts.items() if size)
        taken = f"of {format_gib(self.fast)} GiB for the KV cache, what comes first ({taken}) "
        taken += f"leaves {format_gib(left)} GiB"
        more = "give the KV cache more memory (--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE)"
        if self.given:
            more = "make the home smaller, to which index and books are in proportion, or " + more
        else:
            more = "lower --max-model-len, or " + more
        if config.recall_cache_bytes is not None and config.recall_cache_bytes > left:
            raise RetrievalConfigError(
                f"kv_retrieval.recall_cache_bytes={config.recall_cache_bytes} is more than fast "
                f"memory has: {taken}. Lower it, or {more}."
            )
        slots = sum(self._needs(1)) * self._slot_bytes
        raise RetrievalConfigError(
            f"kv_retrieval.recall_cache_bytes: sink, window and budget of one request need "
            f"{format_gib(slots)} GiB of slots; {taken}. Lower kv_retrieval.budget (or "
            f"max_budget), raise recall_cache_bytes if you have set it, or {more}."
        )
