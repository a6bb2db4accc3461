"""The ops in plain torch: their specification. Slow, and meant to be read."""

import math
from collections import Counter, OrderedDict

import torch

from vllm_kvretrieval.kernels.types import (
    Chooser,
    ContextSelector,
    DecodeRows,
    IndexStore,
    TokenLists,
)
from vllm_kvretrieval.retrieval.index import Field, Index, pack, unpack
from vllm_kvretrieval.retrieval.index.exact import Exact


def update_index(key: torch.Tensor, slot_mapping: torch.Tensor, store: IndexStore) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.update_index`."""
    size = store.entry_tokens
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        entry, offset = divmod(slot, size)
        if store.index is not None and store.index.grows:
            new = build(key[None, token, None].expand(1, size, -1, -1).float(), store)[0]
            if offset:
                old, new = (_fields(r, store) for r in (store.records[entry], new))
                merged = {
                    "minimum": torch.minimum(old["minimum"], new["minimum"]),
                    "maximum": torch.maximum(old["maximum"], new["maximum"]),
                }
                new = pack(_layout(store), merged, store.dtype)
            store.records[entry] = new
        elif offset == size - 1 and store.records.shape[-1]:
            store.records[entry] = build(keys_of_entries(torch.tensor([entry]), store), store)[0]


def index_pages(pages: torch.Tensor, lengths: torch.Tensor, store: IndexStore) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.index_pages`."""
    assert store.cache is not None
    size = store.page_size
    for page, length in zip(pages.tolist(), lengths.tolist(), strict=True):
        keys = keys_of(store.cache[page], store.layout).transpose(0, 1)
        update_index(keys[:length], torch.arange(page * size, page * size + length), store)


def build(keys: torch.Tensor, store: IndexStore) -> torch.Tensor:
    """float32 [n, entry_tokens, kv_heads, head_size] -> records, uint8 [n, kv_heads, bytes]."""
    assert store.index is not None
    record = store.index.build(keys.transpose(1, 2).flatten(0, 1))
    return pack(_layout(store), record, store.dtype).view(len(keys), store.kv_heads, -1)


def keys_of_entries(entries: torch.Tensor, store: IndexStore) -> torch.Tensor:
    """float32 [n, entry_tokens, kv_heads, head_size]; from the cache."""
    assert store.cache is not None
    pages = torch.stack([keys_of(store.cache[e // store.parts], store.layout) for e in entries])
    parts = pages.float().unflatten(2, (store.parts, -1))
    return parts[torch.arange(len(entries)), :, entries % store.parts].transpose(1, 2)


def _layout(store: IndexStore) -> tuple[Field, ...]:
    assert store.index is not None
    return store.index.fields(store.head_size, store.entry_tokens)


def _fields(records: torch.Tensor, store: IndexStore) -> dict[str, torch.Tensor]:
    return unpack(_layout(store), records, store.dtype)


def tokens_of(units: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Units, [n, page_size, 2 * head_size] -> keys and values, [n, page_size, head_size]."""
    size = units.shape[2] // 2
    if layout == "rows":
        return units[..., :size], units[..., size:]
    values = units.flatten(1).chunk(2, dim=1)[1].unflatten(1, (-1, size))
    return keys_of(units, layout), values


def keys_of(page: torch.Tensor, layout: str) -> torch.Tensor:
    """The keys of a page of vLLM's CPU cache.

    Args:
        page: [kv_heads, page_size, 2 * head_size].
        layout: vLLM's attention ``isa``, or ``rows``.

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
    if layout == "rows":
        return page[..., :size]
    return keys.view(heads, size, tokens).transpose(1, 2)


def plan_decode(query: torch.Tensor, rows: DecodeRows, chooser: Chooser) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.plan_decode`."""
    store, selection = chooser.store, chooser.selection
    for r in range(len(rows)):
        seat = int(rows.seats[r])
        length, size = int(rows.seq_lens[r]), store.page_size
        pages = rows.block_table[r, : -(-length // size)].long()
        entries = (pages[:, None] * store.parts + torch.arange(store.parts)).flatten()
        entries = entries[: entry_count(length, store)]
        count = length if rows.per_token else len(pages)  # of units of selection
        sink, window, select = (int(t[r]) for t in (rows.sink, rows.window, rows.select))
        grouped = query[r].view(store.kv_heads, chooser.group, store.head_size)
        previous = selection.query[seat].view_as(grouped)
        for head in range(store.kv_heads):
            if select < 0:
                attended = torch.arange(count)
            else:
                chosen = torch.empty(0, dtype=torch.int64)
                if select > 0:
                    best = select_units(
                        grouped[head].float(), entries, head, chooser, (sink, count - window),
                        select, rows.per_token,
                    )  # fmt: skip
                    corrected = bool(rows.fresh[r]) or _turned(
                        grouped[head], previous[head], float(rows.threshold[r])
                    )
                    kept = selection.chosen[seat, head, :select]
                    chosen = best if corrected else kept.long()
                    rows.corrected[seat] += corrected
                    kept.copy_(best)
                attended = torch.cat(
                    [torch.arange(sink), chosen, torch.arange(count - window, count)]
                )
            page, offset = (attended // size, attended % size) if rows.per_token else (attended, 0)
            numbers = pages[page] * store.kv_heads + head
            listed = rows.lists[r * store.kv_heads + head]
            listed[: len(attended)] = numbers * size + offset if rows.per_token else numbers
        if select > 0:
            previous.copy_(grouped)


def entry_count(seq_len: int, store: IndexStore) -> int:
    """Entries of a context that count: unfinished ones only where records grow."""
    grows = store.index is not None and store.index.grows
    return -(-seq_len // store.entry_tokens) if grows else seq_len // store.entry_tokens


def select_units(
    query: torch.Tensor,
    entries: torch.Tensor,
    head: int,
    chooser: Chooser,
    between: tuple[int, int],
    select: int,
    per_token: bool,
) -> torch.Tensor:
    """The best units of selection between sink and window for one KV head.

    Args:
        query: float32 [group, head_size].
        entries: int64 [n]; those of the context that count.
        head: Number of the KV head.
        chooser: How to select.
        between: Where the sink ends and the window begins, in units.
        select: How many units to select.
        per_token: Whether units are single tokens; else they are pages.

    Returns:
        int64 [select]; positions in the context, rising.
    """
    store, parts = chooser.store, 1 if per_token else chooser.store.parts
    assert store.index is not None
    scores = score_entries(store.index, query, entries, head, chooser, per_token)
    norms = chooser.pooling.norms(scores)
    pooled = chooser.pooling.pool(scores.double() - norms, parts).nan_to_num(nan=-math.inf)
    sink, end = between
    candidates = sink + top_pages(pooled[sink:end], max(select, select * chooser.rerank))
    if len(candidates) == select:
        return candidates
    chosen = (candidates[:, None] * parts + torch.arange(parts)).flatten()
    scores = score_entries(Exact(), query, entries[chosen], head, chooser)
    pooled = chooser.pooling.pool(scores.double() - norms, parts).nan_to_num(nan=-math.inf)
    return candidates[top_pages(pooled, select)]


def score_entries(
    index: Index,
    query: torch.Tensor,
    entries: torch.Tensor,
    head: int,
    chooser: Chooser,
    per_token: bool = False,
) -> torch.Tensor:
    """float32 [group, n]; of entries of a KV head, or of their tokens, by whatever index."""
    store, record = chooser.store, {}
    if index == store.index:
        record = _fields(store.records[entries, head], store)
    if index.reads_keys:
        record["keys"] = keys_of_entries(entries, store)[:, :, head]
    if per_token:
        return index.score_tokens(query, record, chooser.scale).flatten(1)
    return index.score(query, record, chooser.scale)


def select_context(
    query: torch.Tensor, weights: torch.Tensor, rows: DecodeRows, selector: ContextSelector
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.select_context`."""
    for r in range(len(rows)):
        length = int(rows.seq_lens[r])
        sink, window, select = (int(t[r]) for t in (rows.sink, rows.window, rows.select))
        queries = query[: len(rows) * weights.shape[1]].unflatten(0, weights.shape)[r]
        scores = context_scores(queries, weights[r], rows.block_table[r], length, selector)
        best = sink + top_pages(scores[sink : length - window], select)
        selector.chosen[int(rows.seats[r]), :select] = best


def context_scores(
    queries: torch.Tensor,
    weights: torch.Tensor,
    blocks: torch.Tensor,
    length: int,
    selector: ContextSelector,
) -> torch.Tensor:
    """float64 [length]; of one request's tokens, or logarithms of these where one query counts.

    Args:
        queries: [n, kv_heads * group, head_size]; the latest last.
        weights: float32 [n].
        blocks: int32 [>= pages]; ids of the context's pages.
        length: Tokens of the context.
        selector: Of the layer.
    """
    store = selector.store
    assert store.cache is not None
    pages = store.cache[blocks[: -(-length // store.page_size)].long()]
    keys = torch.cat([keys_of(page, store.layout) for page in pages], 1)[:, :length].double()
    keys = keys.repeat_interleave(selector.group, 0)
    total = torch.zeros(length, dtype=torch.float64)
    for number, (query, weight) in enumerate(zip(queries.double(), weights.double(), strict=True)):
        context = length - (len(queries) - 1 - number)
        if weight <= 0 or context < 1:
            continue
        scores = torch.einsum("hd,htd->ht", query, keys[:, :context]) * selector.scale
        best = (scores - scores.logsumexp(-1, keepdim=True)).amax(0)
        if len(queries) == 1:
            return best
        total[:context] += weight * best.exp()
    return total


def list_context(rows: DecodeRows, selector: ContextSelector, kv_heads: int) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.list_context`."""
    size = selector.store.page_size
    for r in range(len(rows)):
        length = int(rows.seq_lens[r])
        sink, window, select = (int(t[r]) for t in (rows.sink, rows.window, rows.select))
        chosen = selector.chosen[int(rows.seats[r]), :select].long()
        attended = torch.cat([torch.arange(sink), chosen, torch.arange(length - window, length)])
        pages = rows.block_table[r, attended // size].long()
        for head in range(kv_heads):
            listed = rows.lists[r * kv_heads + head]
            listed[: len(attended)] = (pages * kv_heads + head) * size + attended % size


def stage_pages(
    source: torch.Tensor,
    pages: torch.Tensor,
    target: torch.Tensor,
    layout: str = "vec",
    rows: bool = False,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.stage_pages`."""
    _, kv_heads, page_size, width = source.shape
    block_size, size = target.shape[2], width // 2
    blocks = target[: len(pages) * page_size // block_size]
    parts = block_size // page_size
    chosen = source[pages.long()].view(len(blocks), parts, kv_heads, page_size, width)
    if rows:
        keys, values = chosen[..., :size].transpose(3, 4), chosen[..., size:]
    else:
        keys, values = chosen.flatten(3).chunk(2, dim=3)
        keys = keys.unflatten(3, (size, page_size))
        values = values.unflatten(3, (page_size, size))
    halves = blocks.view(len(blocks), kv_heads, 2, block_size * size)
    keys = keys.permute(0, 2, 3, 1, 4).flatten(3)  # [blocks, kv_heads, head_size, tokens]
    values = values.transpose(1, 2).flatten(2, 3)  # [blocks, kv_heads, tokens, head_size]
    if layout == "amx":
        keys = keys.unflatten(2, (-1, 2)).unflatten(4, (-1, 16)).permute(0, 1, 4, 2, 5, 3)
        values = values.unflatten(2, (-1, 2)).unflatten(4, (-1, 16)).permute(0, 1, 4, 2, 5, 3)
    halves[:, :, 0] = keys.flatten(2)
    halves[:, :, 1] = values.flatten(2)


def write_rows(
    key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.write_rows`."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, cache.shape[2])
            cache[page, :, offset] = torch.cat([key[token], value[token]], -1)


def attend(
    query: torch.Tensor,
    lists: TokenLists,
    cache: torch.Tensor,
    output: torch.Tensor,
    layout: str,
    scale: float,
    lse: torch.Tensor | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.attend`."""
    units = cache.flatten(0, -3)
    keys, values = (part.flatten(0, 1).double() for part in tokens_of(units, layout))
    group = query.shape[1] // lists.kv_heads
    for unit, length in enumerate(lists.lengths.tolist()):
        row, head = divmod(unit, lists.kv_heads)
        heads = slice(head * group, (head + 1) * group)
        stretches = lists.entries[unit, : -(-length // lists.run)].long() * lists.run
        chosen = (stretches[:, None] + torch.arange(lists.run)).flatten()[:length]
        scores = query[row, heads].double() @ keys[chosen].T * scale
        output[row, heads] = (scores.softmax(-1) @ values[chosen]).to(output.dtype)
        if lse is not None:
            lse[row, heads] = scores.logsumexp(-1).float()


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
        for request in rows.seats.tolist():
            self.release(request)
        lists = [self._entries(rows, r) for r in range(len(rows))]
        missing: list[tuple[int, int]] = []
        for request, units in zip(rows.seats.tolist(), lists, strict=True):
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
        for r, (request, units) in enumerate(zip(rows.seats.tolist(), lists, strict=True)):
            per_head = len(units) // self.kv_heads
            sink, window = int(rows.sink[r]), int(rows.window[r])
            pinned = self._pinned_by.setdefault(request, [])
            for head in range(self.kv_heads):
                own = units[head * per_head : (head + 1) * per_head]
                entry = rows.lists[r * self.kv_heads + head]
                entry[:per_head] = torch.tensor([self._slot_of[unit] for unit in own])
                if rows.select[r] >= 0:
                    pinned += own[:sink] + own[per_head - window :]
            for unit in pinned:
                self._unpinned.pop(unit, None)

    def prefetch(self, rows: DecodeRows, chooser: Chooser) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.prefetch`."""
        room = True
        for r, request in enumerate(rows.seats.tolist()):
            for head in range(self.kv_heads):
                chosen = chooser.selection.chosen[request, head, : max(0, int(rows.select[r]))]
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

    def release(self, seat: int) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.release`."""
        pins = Counter(unit for units in self._pinned_by.values() for unit in units)
        for unit in self._pinned_by.pop(seat, []):
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
        sink, window, select = (int(t[r]) for t in (rows.sink, rows.window, rows.select))
        pages = -(-int(rows.seq_lens[r]) // self.page_size)
        count = pages if select < 0 else sink + select + window
        table = rows.lists[r * self.kv_heads : (r + 1) * self.kv_heads, :count]
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
