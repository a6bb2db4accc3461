"""The signature of a cache of recalled units."""

from typing import Protocol

import torch

from vllm_kvretrieval.kernels.rows import DecodeRows, TokenLists
from vllm_kvretrieval.kernels.types import Chooser


class RecallCache(Protocol):
    """Fast memory for one layer whose KV cache (its home) is slow to read.

    A *unit* is one (page, KV head) slice of the KV cache: ``2 * page_size * head_size`` contiguous
    elements, with the number ``page * kv_heads + kv_head``. A *slot* holds a copy of a unit. All
    requests share the slots. A slot always equals its unit, so giving it up needs no write.

    Life of a slot: it is free; it holds a unit; it becomes free when the page is written anew, or
    gets another unit when it is the least recently used slot that is neither pinned nor used by the
    current step. The sink and window pages of a request stay pinned from one of its sparse decode
    steps to the next.

    Home may be *encoded*. A page is then *open* from its first token until :meth:`close` encodes
    it: vLLM writes it to memory, raw. The units of a closed page, in home and in slots, are the
    decoded ones.
    """

    slots: torch.Tensor
    """[slots, 1, 2 * page_size, head_size]: the slots as single-head pages."""

    @property
    def used(self) -> int:
        """The number of slots that hold a unit."""
        ...

    @property
    def bytes_per_read(self) -> int:
        """Bytes of a unit in home."""
        ...

    def write(self, slot_mapping: torch.Tensor) -> None:
        """Follow a write to home.

        Args:
            slot_mapping: int64 [T]; the tokens just written, as ``page * page_size + offset``,
                negative for padding. Tokens of one page are adjacent. The first token of a page
                voids its slots; other tokens are copied into them.

        Raises:
            ValueError: A token lies outside home.
        """
        ...

    def resolve(self, rows: DecodeRows) -> None:
        """Begin a step: bring all attended units into slots, and pin sink and window.

        Bytes moved: one unit per miss.

        Args:
            rows: ``lists`` holds units, as ``plan_decode`` has written them, and ``lengths`` their
                numbers; no entry is negative. The units are replaced by their slots. A slot whose
                unit cannot be read holds zeros.

        Raises:
            ValueError: A row does not fit, as in ``plan_decode``; or a list is shorter than sink
                and window, or too long. Nothing has changed then.
            RuntimeError: The rows attend to more units than there are slots.
        """
        ...

    def stream(self, rows: DecodeRows, late: TokenLists) -> bool:
        """Do as :meth:`resolve`, but wait for no read of home.

        Units that have to be read from there move from the rows' lists, which may then be empty, to
        others, in the same order, and reader threads begin to read them. Call :meth:`wait` before
        their slots are read.

        Args:
            rows: See :meth:`resolve`; ``lengths`` is written, too.
            late: ``entries`` and ``lengths`` are written, if there are such units; there is room
                for all units of the rows.

        Returns:
            Whether there are such units.

        Raises:
            ValueError, RuntimeError: See :meth:`resolve`.
        """
        ...

    def wait(self) -> None:
        """Wait for the reads that :meth:`stream` has begun."""
        ...

    def prefetch(self, rows: DecodeRows, chooser: Chooser) -> None:
        """Fetch the pages selected for the next step of the rows, while the model goes on.

        Call it once after ``resolve`` or ``stream``. It takes no slot of the current step, and
        fetches fewer pages if there are too few slots. The next call of this object, but for
        :meth:`wait`, waits for the reads.

        Args:
            rows: The rows of ``resolve``; ``lists`` is not read.
            chooser: How the layer selects; its selection names the pages.

        Raises:
            ValueError: A row does not fit, as in ``plan_decode``. Nothing has changed then.
        """
        ...

    def close(self, pages: torch.Tensor) -> None:
        """Encode pages that are full.

        Bytes moved: the pages, raw and encoded. A page that cannot be written is lost, and is
        reported as one that cannot be read.

        Args:
            pages: int64 [n]; open pages, each named once.

        Raises:
            ValueError: The home is not encoded, or has no such page.
            RuntimeError: A page is not open.
        """
        ...

    def closed(self, pages: list[int]) -> bool:
        """Whether the file has all of these pages of an encoded home.

        Raises:
            ValueError: The home is not encoded, or has no such page.
        """
        ...

    def adopt(self, pages: list[int]) -> None:
        """Note that the file has these pages of an encoded home since an earlier run.

        Raises:
            ValueError: The home is not encoded, or has no such page.
            RuntimeError: A page is open.
        """
        ...

    def abandon(self, pages: list[int]) -> None:
        """Forget those of these pages that are open in an encoded home; they are never read again.

        Raises:
            ValueError: The home is not encoded, or has no such page.
            RuntimeError: A running request has one of them pinned.
        """
        ...

    def stage(self, pages: torch.Tensor, target: torch.Tensor) -> None:
        """Lay out pages of an encoded home as larger blocks, as :meth:`Ops.stage_pages` does.

        Args:
            pages: int64 [n]; in the order of the result; n is a multiple of the pages per block.
                Negative: zeros.
            target: [>= n * page_size / block_size, kv_heads, block_size, 2 * head_size], written.
                Pages that cannot be read become zeros, too.

        Raises:
            ValueError: The home is not encoded, or has no such page, or ``target`` has another
                shape or dtype. Nothing is written then.
        """
        ...

    def drop_pages(self, pages: list[int]) -> None:
        """Forget pages whose home has changed, but not by a write of tokens.

        Raises:
            RuntimeError: A running request has one of them pinned.
        """
        ...

    def release(self, seat: int) -> None:
        """Unpin the units that the request with this seat has pinned."""
        ...

    def take_failed_pages(self) -> list[int]:
        """Pages with a unit that could not be read since the last call. Their slots are freed.

        It does not wait for reads that are under way. If one of them fails, this is known before
        the page is attended to.
        """
        ...

    def take_error(self) -> int:
        """The number of the latest error in reading or writing a page since the last call; 0: no
        error."""
        ...

    def resident(self) -> list[int]:
        """The units in slots: least recently used first, and then pinned units in slot order."""
        ...

    def check(self) -> str:
        """Check that each slot is owned once, that only running requests pin slots, that free and
        used slots are all slots, and that slots equal home.

        Returns:
            The first error in words; empty if there is none.
        """
        ...
