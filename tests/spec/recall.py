"""Units of an encoded home, and the cache of recalled units."""

import os
from collections import Counter, OrderedDict
from collections.abc import Iterable

import torch

from tests.spec.attend import stage_pages
from vllm_kvretrieval.kernels.reference.index import tokens_of
from vllm_kvretrieval.kernels.reference.plan import selected
from vllm_kvretrieval.kernels.rows import DecodeRows, Mode, TokenLists
from vllm_kvretrieval.kernels.types import Chooser
from vllm_kvretrieval.retrieval.codec import Codec


def encode_units(units: torch.Tensor, codec: Codec) -> torch.Tensor:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.encode_units`."""
    size, head_size = units.shape[1] // 2, units.shape[2]
    return codec.encode(*tokens_of(units.reshape(-1, size, 2 * head_size), "vec"))


def decode_units(data: torch.Tensor, codec: Codec, units: torch.Tensor) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.decode_units`."""
    size, head_size = units.shape[1] // 2, units.shape[2]
    keys, values = codec.decode(data, size, head_size, units.dtype)
    units.copy_(torch.cat([keys.transpose(1, 2).flatten(1), values.flatten(1)], 1).view_as(units))


class RecallCache:
    """See :class:`vllm_kvretrieval.kernels.recall.RecallCache`; reads home in place, at once.

    Args:
        home: [units, 1, 2 * page_size, head_size]; the layer's KV cache.
        slots: How many units fast memory holds.
        kv_heads: KV heads of the layer.
        counts: int64 [S, 3]; per request, units attended to, missed, and read from home; added to.
        codec: Home is encoded by it, and ``home`` is where open pages lie; None: it is not.
        file: Descriptor of the file of an encoded home, and where in it the layer's part begins
            (bytes); only what is adopted is read from there.
    """

    def __init__(
        self,
        home: torch.Tensor,
        slots: int,
        kv_heads: int,
        counts: torch.Tensor,
        codec: Codec | None = None,
        file: tuple[int, int] | None = None,
    ) -> None:
        self.slots = torch.empty(slots, *home.shape[1:], dtype=home.dtype)
        self.home, self.kv_heads, self.counts = home, kv_heads, counts
        self.page_size, self.codec, self.file = home.shape[2] // 2, codec, file
        self._open: set[int] = set()  # pages of an encoded home
        self._closed: dict[int, torch.Tensor] = {}  # and what decoding gives back, by unit
        self._slot_of: dict[int, int] = {}
        self._last_step: dict[int, int] = {}
        self._unpinned: OrderedDict[int, None] = OrderedDict()  # units, least recently used first
        self._pinned_by: dict[int, list[int]] = {}  # units of a request
        self._free = list(range(slots))[::-1]
        self._step = 0

    @property
    def used(self) -> int:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.used`."""
        return len(self._slot_of)

    def write(self, slot_mapping: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.write`."""
        tokens = [slot for slot in slot_mapping.tolist() if slot >= 0]
        started = [t // self.page_size for t in tokens if t % self.page_size == 0]
        self.drop_pages(started)
        if self.codec is not None:
            self._open.update(started)
            if not self._open.issuperset(t // self.page_size for t in tokens):
                raise RuntimeError("a page is written to, but not open")
        for page in {t // self.page_size for t in tokens}:
            for unit in self._units(page):
                if unit in self._slot_of:
                    self.slots[self._slot_of[unit]] = self.content(unit)

    def close(self, pages: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.close`."""
        assert self.codec is not None
        for page in pages.tolist():
            if page not in self._open:
                raise RuntimeError(f"page {page} is to be closed, but not open")
            self._open.remove(page)
            units = self._units(page)
            decoded = torch.empty_like(self.home[units, 0])
            decode_units(encode_units(self.home[units, 0], self.codec), self.codec, decoded)
            self._closed.update(zip(units, decoded[:, None], strict=True))
            for unit in units:
                if unit in self._slot_of:
                    self.slots[self._slot_of[unit]] = self.content(unit)

    def closed(self, pages: list[int]) -> bool:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.closed`."""
        units = [unit for page in pages for unit in self._units(page)]
        return self._open.isdisjoint(pages) and self._closed.keys() >= {*units}

    def adopt(self, pages: list[int]) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.adopt`."""
        assert self.codec is not None
        assert self.file is not None
        if not self._open.isdisjoint(pages):
            raise RuntimeError(f"one of pages {pages} is open, and is to be adopted")
        self.drop_pages(pages)
        fd, begin = self.file
        size = self.codec.unit_bytes(self.page_size, self.home.shape[3], self.home.dtype)
        for page in pages:
            for unit in self._units(page):
                data = bytearray(os.pread(fd, size, begin + unit * size))
                decoded = torch.empty_like(self.home[:1, 0])
                decode_units(torch.frombuffer(data, dtype=torch.uint8)[None], self.codec, decoded)
                self._closed[unit] = decoded

    def abandon(self, pages: list[int]) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.abandon`."""
        unfinished = [page for page in pages if page in self._open]
        self.drop_pages(unfinished)
        self._open.difference_update(unfinished)

    def stage(self, pages: torch.Tensor, target: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.stage`."""
        nothing = torch.zeros_like(self.home[0])
        units = [
            self.content(page * self.kv_heads + head) if page >= 0 else nothing
            for page in pages.tolist()
            for head in range(self.kv_heads)
        ]
        source = torch.stack(units).view(len(pages), self.kv_heads, self.page_size, -1)
        stage_pages(source, torch.arange(len(pages)), target)

    def content(self, unit: int) -> torch.Tensor:
        """The unit as home holds it."""
        if self.codec is None or unit // self.kv_heads in self._open:
            return self.home[unit]
        return self._closed[unit]

    def resolve(self, rows: DecodeRows) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.resolve`."""
        self._bring(rows)

    def stream(self, rows: DecodeRows, late: TokenLists) -> bool:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.stream`."""
        read = self._bring(rows)
        read = {unit for unit in read if unit // self.kv_heads not in self._open}
        slots = torch.tensor([self._slot_of[unit] for unit in read], dtype=torch.int32)
        for number, (listed, length) in enumerate(
            zip(rows.lists, rows.lengths.tolist(), strict=False)
        ):
            tokens = torch.arange(length)
            moved = torch.isin(listed[tokens // self.page_size], slots)
            here, there = (listed[tokens[m] // self.page_size] for m in (~moved, moved))
            for target, entries in (listed, here), (late.entries[number], there):
                pages = entries.unique_consecutive()
                target[: len(pages)] = pages
            rows.lengths[number], late.lengths[number] = len(here), len(there)
        return bool(read)

    def wait(self) -> None:
        """Do nothing: units are read at once."""

    def _bring(self, rows: DecodeRows) -> set[int]:
        """Bring all attended units into slots; those that none held are returned."""
        self._step += 1
        for request in rows.seats.tolist():
            self.release(request)
        lists = [self._lists(rows, r) for r in range(len(rows))]
        missing: list[tuple[int, int]] = []
        for request, per_head in zip(rows.seats.tolist(), lists, strict=True):
            units = [unit for listed in per_head for unit in listed]
            misses = [unit for unit in units if unit not in self._slot_of]
            missing += [(request, unit) for unit in misses]
            for unit in units:
                if unit in self._slot_of:
                    self._touch(unit)
            self.counts[request, :2] += torch.tensor([len(units), len(misses)])
        fetched = list[int]()
        for request, unit in missing:
            if unit not in self._slot_of:  # else another row has missed it, too
                if not self._fetch(unit):
                    self._drop(fetched)
                    raise RuntimeError("the recall cache has fewer slots than one step attends to")
                fetched.append(unit)
                self.counts[request, 2] += 1
        for r, (request, per_head) in enumerate(zip(rows.seats.tolist(), lists, strict=True)):
            sink, window = int(rows.sink[r]), int(rows.window[r])
            pinned = self._pinned_by.setdefault(request, [])
            for head, units in enumerate(per_head):
                entry = rows.lists[r * self.kv_heads + head]
                entry[: len(units)] = torch.tensor([self._slot_of[unit] for unit in units])
                if rows.mode[r] != Mode.WHOLE:
                    pinned += units[:sink] + units[len(units) - window :]
            for unit in pinned:
                self._unpinned.pop(unit, None)
        return {unit for _, unit in missing}

    def prefetch(self, rows: DecodeRows, chooser: Chooser) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.prefetch`."""
        room = True
        for r, request in enumerate(rows.seats.tolist()):
            if rows.mode[r] != Mode.SELECT:
                continue
            pages = -(-int(rows.seq_lens[r]) // self.page_size)
            for head in range(self.kv_heads):
                count = selected(rows, r, head, pages, chooser.selection)
                chosen = chooser.selection.chosen[request, head, :count]
                for page in rows.block_table[r, chosen.long()].tolist():
                    unit = page * self.kv_heads + head
                    if unit in self._slot_of:
                        self._touch(unit)
                    elif room:
                        room = self._fetch(unit)
                        self.counts[request, 2] += room

    def drop_pages(self, pages: list[int]) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.drop_pages`."""
        self._drop(unit for page in pages for unit in self._units(page))

    def release(self, seat: int) -> None:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.release`."""
        pins = Counter(unit for units in self._pinned_by.values() for unit in units)
        for unit in self._pinned_by.pop(seat, []):
            pins[unit] -= 1
            if pins[unit] == 0:
                self._unpinned[unit] = None

    def take_failed_pages(self) -> list[int]:
        """No pages: reads never fail here."""
        return []

    def take_error(self) -> int:
        """0: there is no error."""
        return 0

    def resident(self) -> list[int]:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.resident`."""
        pinned = self._slot_of.keys() - self._unpinned.keys()
        return [*self._unpinned, *sorted(pinned, key=self._slot_of.__getitem__)]

    def check(self) -> str:
        """See :meth:`vllm_kvretrieval.kernels.recall.RecallCache.check`."""
        if sorted([*self._free, *self._slot_of.values()]) != list(range(len(self.slots))):
            return "free and used slots are not all slots"
        pinned = {unit for units in self._pinned_by.values() for unit in units}
        if self._slot_of.keys() - self._unpinned.keys() != pinned:
            return "pinned by nobody, or held but not pinned"
        differ = [u for u, s in self._slot_of.items() if not self.slots[s].equal(self.content(u))]
        return f"units {differ} differ from home" if differ else ""

    def _units(self, page: int) -> range:
        return range(page * self.kv_heads, (page + 1) * self.kv_heads)

    def _drop(self, units: Iterable[int]) -> None:
        for unit in units:
            if unit in self._slot_of:
                if unit not in self._unpinned:
                    raise RuntimeError(f"page {unit // self.kv_heads} is given up while pinned")
                del self._unpinned[unit]
                self._free.append(self._slot_of.pop(unit))

    def _lists(self, rows: DecodeRows, r: int) -> list[list[int]]:
        """The units that a row attends to, by KV head."""
        heads = slice(r * self.kv_heads, (r + 1) * self.kv_heads)
        counts = (-(-rows.lengths[heads] // self.page_size)).tolist()
        return [
            units[:count].tolist() for units, count in zip(rows.lists[heads], counts, strict=True)
        ]

    def _touch(self, unit: int) -> None:
        self._last_step[unit] = self._step
        if unit in self._unpinned:
            self._unpinned.move_to_end(unit)

    def _fetch(self, unit: int) -> bool:
        """Bring a unit into a slot. Returns whether there was one."""
        if not self._free:
            old = (u for u in self._unpinned if self._last_step[u] != self._step)
            victim = next(old, None)
            if victim is None:
                return False
            del self._unpinned[victim]
            self._free.append(self._slot_of.pop(victim))
        self._slot_of[unit] = self._free.pop()
        self.slots[self._slot_of[unit]] = self.content(unit)
        self._unpinned[unit] = None
        self._touch(unit)
        return True
