"""The ops in plain torch: their specification. Slow, and meant to be read."""

import math
from collections import Counter, OrderedDict

import torch
import torch.nn.functional as F

from vllm_kvretrieval.kernels.types import DecodeRows, LayerState


def update_index(key: torch.Tensor, slot_mapping: torch.Tensor, state: LayerState) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.update_index`."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        entry, offset = divmod(slot, state.summary_size)
        minimum, maximum = state.index[entry].unbind(1)
        if offset == 0:
            minimum.copy_(key[token])
            maximum.copy_(key[token])
        else:
            torch.minimum(minimum, key[token], out=minimum)
            torch.maximum(maximum, key[token], out=maximum)


def index_pages(
    kv_cache: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    state: LayerState,
    layout: str,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.index_pages`."""
    size = state.page_size
    for page, length in zip(pages.tolist(), lengths.tolist(), strict=True):
        keys = keys_of(kv_cache[page], layout).transpose(0, 1)
        update_index(keys[:length], torch.arange(page * size, page * size + length), state)


def keys_of(page: torch.Tensor, layout: str) -> torch.Tensor:
    """The keys of a page of vLLM's CPU cache.

    Args:
        page: [kv_heads, page_size, 2 * head_size].
        layout: vLLM's attention ``isa``.

    Returns:
        [kv_heads, page_size, head_size].
    """
    heads, tokens, width = page.shape
    size = width // 2
    keys = page.reshape(heads, 2, tokens * size)[:, 0]
    if layout == "amx":  # [groups of 16 tokens, words of 4 bytes, 16 tokens, elements of a word]
        per_word = 4 // page.element_size()
        words = keys.view(heads, tokens // 16, size // per_word, 16, per_word)
        return words.transpose(2, 3).reshape(heads, tokens, size)
    return keys.view(heads, size, tokens).transpose(1, 2)


def plan_decode(query: torch.Tensor, rows: DecodeRows, state: LayerState) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.plan_decode`."""
    for r in range(len(rows)):
        slot = int(rows.slots[r])
        num_pages = -(-int(rows.seq_lens[r]) // state.page_size)
        pages = rows.block_table[r, :num_pages].long()
        parts = state.page_size // state.summary_size
        entries = (pages[:, None] * parts + torch.arange(parts)).flatten()
        entries = entries[: -(-int(rows.seq_lens[r]) // state.summary_size)]
        sink, window, select = (
            int(t[r]) for t in (rows.sink_pages, rows.window_pages, rows.select_pages)
        )
        grouped = query[r].view(state.kv_heads, state.group, state.head_size)
        previous = state.prev_query[slot].view_as(grouped)
        for head in range(state.kv_heads):
            if select < 0:
                attended = torch.arange(num_pages)
            else:
                chosen = torch.empty(0, dtype=torch.int64)
                if select > 0:
                    best = sink + top_pages(
                        page_scores(grouped[head], state.index[entries, head], state.scale, parts)[
                            sink : num_pages - window
                        ],
                        select,
                    )
                    corrected = bool(rows.fresh[r]) or _turned(
                        grouped[head], previous[head], float(rows.threshold[r])
                    )
                    kept = state.prev_selection[slot, head, :select]
                    chosen = best if corrected else kept.long()
                    rows.corrected[slot] += corrected
                    kept.copy_(best)
                attended = torch.cat(
                    [torch.arange(sink), chosen, torch.arange(num_pages - window, num_pages)]
                )
            entry = rows.page_table[r * state.kv_heads + head]
            entry[: len(attended)] = pages[attended] * state.kv_heads + head
        if select > 0:
            previous.copy_(grouped)


def stage_pages(source: torch.Tensor, pages: torch.Tensor, target: torch.Tensor) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.stage_pages`."""
    _, kv_heads, page_size, width = source.shape
    block_size, size = target.shape[2], width // 2
    blocks = target[: len(pages) * page_size // block_size]
    parts = block_size // page_size
    # [blocks, parts, kv_heads, keys or values, elements of a page]
    chosen = source[pages.long()].view(len(blocks), parts, kv_heads, 2, page_size * size)
    keys = chosen[..., 0, :].view(len(blocks), parts, kv_heads, size, page_size)
    values = chosen[..., 1, :].view(len(blocks), parts, kv_heads, page_size, size)
    halves = blocks.view(len(blocks), kv_heads, 2, block_size * size)
    halves[:, :, 0] = keys.permute(0, 2, 3, 1, 4).flatten(2)
    halves[:, :, 1] = values.transpose(1, 2).flatten(2)


def page_scores(query: torch.Tensor, index: torch.Tensor, scale: float, parts: int) -> torch.Tensor:
    """Logarithm of the pooled score of every page for one KV head (FreeKV, section 3.2).

    In logarithms pages keep their order however far apart the bounds are, as they are where a
    sink takes nearly all attention: softmax itself underflows to nothing below 87 or so.

    Args:
        query: [group, head_size].
        index: [entries, 2, head_size]; minimum and maximum of the keys that each covers.
        scale: Softmax scale.
        parts: Entries per page; the last page may have fewer.

    Returns:
        float64 [pages]: the logarithm of the softmax over entries of the upper bound
        ``sum_c max(q_c * min_c, q_c * max_c) * scale``, summed over the group and the page's
        entries. (The mean over the group is less by the logarithm of its size.)
    """
    products = query.float()[:, None, None, :] * index.float()
    bounds = products.amax(dim=2).sum(dim=-1) * scale
    pooled = bounds.double().log_softmax(dim=-1).logsumexp(dim=0)
    missing = -len(pooled) % parts  # entries of the last page
    return F.pad(pooled, (0, missing), value=-math.inf).view(-1, parts).logsumexp(dim=-1)


def top_pages(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the ``count`` highest scores, rising; of equal scores the earlier wins."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def _turned(query: torch.Tensor, previous: torch.Tensor, threshold: float) -> bool:
    """Whether a KV head must be corrected (FreeKV, section 3.3)."""
    if threshold >= 1 or threshold <= -1:
        return threshold >= 1
    similarity = torch.cosine_similarity(query.float(), previous.float(), dim=-1)
    return similarity.mean().item() < threshold


class RecallCache:
    """See :class:`vllm_kvretrieval.kernels.types.RecallCache`; reads home in place, at once.

    Args:
        home: [units, 1, 2 * page_size, head_size]; the layer's KV cache.
        slots: How many units fast memory holds.
        kv_heads: KV heads of the layer.
        counts: int64 [S, 3]; per request, units attended to, missed, and read from home; added to.
    """

    def __init__(self, home: torch.Tensor, slots: int, kv_heads: int, counts: torch.Tensor) -> None:
        self.slots = torch.empty(slots, *home.shape[1:], dtype=home.dtype)
        self.home, self.kv_heads, self.counts = home, kv_heads, counts
        self.page_size = home.shape[2] // 2
        self._slot_of: dict[int, int] = {}
        self._last_step: dict[int, int] = {}
        self._unpinned: OrderedDict[int, None] = OrderedDict()  # units, least recently used first
        self._pinned_by: dict[int, list[int]] = {}  # units of a request
        self._free = list(range(slots))[::-1]
        self._step = 0

    @property
    def used(self) -> int:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.used`."""
        return len(self._slot_of)

    def write(self, slot_mapping: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.write`."""
        tokens = [slot for slot in slot_mapping.tolist() if slot >= 0]
        self.drop_pages([t // self.page_size for t in tokens if t % self.page_size == 0])
        for page in {t // self.page_size for t in tokens}:
            for unit in self._units(page):
                if unit in self._slot_of:
                    self.slots[self._slot_of[unit]] = self.home[unit]

    def resolve(self, rows: DecodeRows) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.resolve`."""
        self._step += 1
        for request in rows.slots.tolist():
            self.release(request)
        lists = [self._entries(rows, r) for r in range(len(rows))]
        missing: list[tuple[int, int]] = []
        for request, units in zip(rows.slots.tolist(), lists, strict=True):
            misses = [unit for unit in units if unit not in self._slot_of]
            missing += [(request, unit) for unit in misses]
            for unit in units:
                if unit in self._slot_of:
                    self._touch(unit)
            self.counts[request, :2] += torch.tensor([len(units), len(misses)])
        for request, unit in missing:
            if unit not in self._slot_of:  # else another row has missed it, too
                if not self._fetch(unit):
                    raise RuntimeError("the recall cache has fewer slots than one step attends to")
                self.counts[request, 2] += 1
        for r, (request, units) in enumerate(zip(rows.slots.tolist(), lists, strict=True)):
            per_head = len(units) // self.kv_heads
            sink, window = int(rows.sink_pages[r]), int(rows.window_pages[r])
            pinned = self._pinned_by.setdefault(request, [])
            for head in range(self.kv_heads):
                own = units[head * per_head : (head + 1) * per_head]
                entry = rows.page_table[r * self.kv_heads + head]
                entry[:per_head] = torch.tensor([self._slot_of[unit] for unit in own])
                if rows.select_pages[r] >= 0:
                    pinned += own[:sink] + own[per_head - window :]
            for unit in pinned:
                self._unpinned.pop(unit, None)

    def prefetch(self, rows: DecodeRows, state: LayerState) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.prefetch`."""
        room = True
        for r, request in enumerate(rows.slots.tolist()):
            for head in range(self.kv_heads):
                chosen = state.prev_selection[request, head, : max(0, int(rows.select_pages[r]))]
                for page in rows.block_table[r, chosen.long()].tolist():
                    unit = page * self.kv_heads + head
                    if unit in self._slot_of:
                        self._touch(unit)
                    elif room:
                        room = self._fetch(unit)
                        self.counts[request, 2] += room

    def drop_pages(self, pages: list[int]) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.drop_pages`."""
        for page in pages:
            for unit in self._units(page):
                if unit in self._slot_of:
                    if unit not in self._unpinned:
                        raise RuntimeError(f"page {page} is given up while pinned")
                    del self._unpinned[unit]
                    self._free.append(self._slot_of.pop(unit))

    def release(self, request: int) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.release`."""
        pins = Counter(unit for units in self._pinned_by.values() for unit in units)
        for unit in self._pinned_by.pop(request, []):
            pins[unit] -= 1
            if pins[unit] == 0:
                self._unpinned[unit] = None

    def take_failed_pages(self) -> list[int]:
        """Nothing fails here."""
        return []

    def resident(self) -> list[int]:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.resident`."""
        pinned = self._slot_of.keys() - self._unpinned.keys()
        return [*self._unpinned, *sorted(pinned, key=self._slot_of.__getitem__)]

    def check(self) -> str:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.check`."""
        if sorted([*self._free, *self._slot_of.values()]) != list(range(len(self.slots))):
            return "free and used slots are not all slots"
        pinned = {unit for units in self._pinned_by.values() for unit in units}
        if self._slot_of.keys() - self._unpinned.keys() != pinned:
            return "pinned by nobody, or held but not pinned"
        differ = [u for u, s in self._slot_of.items() if not self.slots[s].equal(self.home[u])]
        return f"units {differ} differ from home" if differ else ""

    def _units(self, page: int) -> range:
        return range(page * self.kv_heads, (page + 1) * self.kv_heads)

    def _entries(self, rows: DecodeRows, r: int) -> list[int]:
        """Units that a row attends to, KV head after KV head."""
        sink, window, select = (
            int(t[r]) for t in (rows.sink_pages, rows.window_pages, rows.select_pages)
        )
        pages = -(-int(rows.seq_lens[r]) // self.page_size)
        count = pages if select < 0 else sink + select + window
        table = rows.page_table[r * self.kv_heads : (r + 1) * self.kv_heads, :count]
        return [int(unit) for unit in table.flatten()]

    def _touch(self, unit: int) -> None:
        self._last_step[unit] = self._step
        if unit in self._unpinned:
            self._unpinned.move_to_end(unit)

    def _fetch(self, unit: int) -> bool:
        """Whether there was a slot for it."""
        if not self._free:
            old = (u for u in self._unpinned if self._last_step[u] != self._step)
            victim = next(old, None)
            if victim is None:
                return False
            del self._unpinned[victim]
            self._free.append(self._slot_of.pop(victim))
        self._slot_of[unit] = self._free.pop()
        self.slots[self._slot_of[unit]] = self.home[unit]
        self._unpinned[unit] = None
        self._touch(unit)
        return True
