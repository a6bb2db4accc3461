"""The ops in plain torch: their specification. Slow, and meant to be read."""

import math
from collections import Counter, OrderedDict
from itertools import pairwise

import torch

from vllm_kvretrieval.kernels.kept import KeptTokens
from vllm_kvretrieval.kernels.rows import DecodeRows, Mode, PromptLists, TokenLists
from vllm_kvretrieval.kernels.types import (
    Chooser,
    ContextSelector,
    IndexStore,
    Merge,
    Selection,
)
from vllm_kvretrieval.retrieval.codec import Codec
from vllm_kvretrieval.retrieval.index import Field, Index, pack, unpack
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.keeping import STAMPED, Keeping


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
    values = units.flatten(1).chunk(2, dim=1)[1]
    if layout == "amx":  # [blocks of 16 channels, pairs of tokens, 16 channels, tokens of a pair]
        words = values.unflatten(1, (size // 16, -1, 16, 2))
        return keys_of(units, layout), words.permute(0, 2, 4, 1, 3).reshape(len(units), -1, size)
    return keys_of(units, layout), values.unflatten(1, (-1, size))


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
        length, size = int(rows.seq_lens[r]), store.page_size
        pages = rows.block_table[r, : -(-length // size)].long()
        entries = (pages[:, None] * store.parts + torch.arange(store.parts)).flatten()
        entries = entries[: entry_count(length, store)]
        count = length if rows.per_token else len(pages)  # of units of selection
        sink, window = int(rows.sink[r]), int(rows.window[r])
        mode, seat = Mode(int(rows.mode[r])), int(rows.seats[r])
        grouped = query[r].view(store.kv_heads, chooser.group, store.head_size)
        previous = selection.query[seat].view_as(grouped)
        for head in range(store.kv_heads):
            select = selected(rows, r, head, count, selection)
            chosen = torch.arange(sink, sink + select)
            everything = sink + select + window == count
            if mode is Mode.SELECT and select > 0:
                best = select_units(
                    grouped[head].float(), entries, head, chooser, (sink, count - window),
                    select, rows.per_token,
                )  # fmt: skip
                corrected = bool(rows.fresh[r]) or _turned(
                    grouped[head], previous[head], float(rows.threshold[r])
                )
                former = selection.chosen[seat, head, :select]
                chosen = best if corrected or everything else former.long()
                rows.corrected[seat] += corrected
                former.copy_(best)
            elif mode is Mode.GIVEN and not everything:
                chosen = selection.chosen[seat, head, :select].long()
            attended = torch.cat([torch.arange(sink), chosen, torch.arange(count - window, count)])
            page, offset = (attended // size, attended % size) if rows.per_token else (attended, 0)
            numbers = pages[page] * store.kv_heads + head
            listed = rows.lists[r * store.kv_heads + head]
            listed[: len(attended)] = numbers * size + offset if rows.per_token else numbers
            tokens = len(attended) if rows.per_token else len(attended) * size
            if not rows.per_token and attended[-1:].eq(count - 1).any():
                tokens -= len(pages) * size - length  # the tail page's rest
            rows.lengths[r * store.kv_heads + head] = tokens
            if select > 0 and mode is Mode.SELECT:
                previous[head] = grouped[head]


def selected(rows: DecodeRows, r: int, head: int, units: int, selection: Selection) -> int:
    """How many units between sink and window a KV head attends to, of so many in the context."""
    mode, select = Mode(int(rows.mode[r])), int(rows.select[r])
    if mode is Mode.SELECT and (select == 0 or selection.counts is None):
        return select
    between = units - int(rows.sink[r]) - int(rows.window[r])
    if mode is Mode.WHOLE:
        return between
    assert selection.counts is not None, "what is given is counted"
    return min(int(selection.counts[rows.seats[r], head]), between)


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
    query: torch.Tensor,
    weights: torch.Tensor,
    rows: DecodeRows,
    selector: ContextSelector,
    merge: Merge | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.select_context`."""
    lengths = rows.seq_lens.tolist()
    ratings = torch.full((*weights.shape, max(lengths)), -torch.inf, dtype=torch.float64)
    for r, length in enumerate(lengths):
        queries = query[: len(rows) * weights.shape[1]].unflatten(0, weights.shape)[r]
        ratings[r, :, :length] = context_ratings(queries, rows.block_table[r], length, selector)
    if merge is not None:
        merge(ratings)
    for r, length in enumerate(lengths):
        sink, window, select = (int(t[r]) for t in (rows.sink, rows.window, rows.select))
        scores = context_scores(ratings[r, :, :length], weights[r])
        best = sink + top_pages(scores[sink : length - window], select)
        selector.chosen[int(rows.seats[r]), :select] = best


def context_ratings(
    queries: torch.Tensor, blocks: torch.Tensor, length: int, selector: ContextSelector
) -> torch.Tensor:
    """float64 [n, length]; the logarithm of the highest attention that any head gives a token.

    Args:
        queries: [n, kv_heads * group, head_size]; the latest last. Each attends to one token more
            than the one before it; what it does not attend to has minus infinity.
        blocks: int32 [>= pages]; ids of the context's pages.
        length: Tokens of the context.
        selector: Of the layer.
    """
    store = selector.store
    assert store.cache is not None
    pages = store.cache[blocks[: -(-length // store.page_size)].long()]
    keys = torch.cat([keys_of(page, store.layout) for page in pages], 1)[:, :length].double()
    keys = keys.repeat_interleave(selector.group, 0)
    ratings = torch.full((len(queries), length), -torch.inf, dtype=torch.float64)
    for number, query in enumerate(queries.double()):
        context = length - (len(queries) - 1 - number)
        if context >= 1:
            scores = torch.einsum("hd,htd->ht", query, keys[:, :context]) * selector.scale
            best = (scores - scores.logsumexp(-1, keepdim=True)).amax(0)
            ratings[number, :context] = best
    return ratings


def context_scores(ratings: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """float64 [length]; of a request's tokens: :func:`context_ratings`, where one query counts.

    Args:
        ratings: float64 [n, length].
        weights: float32 [n].
    """
    if len(ratings) == 1:
        return ratings[0]
    return (ratings.exp() * weights.double()[:, None]).sum(0)


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
            rows.lengths[r * kv_heads + head] = len(attended)


def drop_tokens(weights: torch.Tensor, rows: DecodeRows, kept: KeptTokens, rule: Keeping) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.drop_tokens`."""
    for r in range(len(rows)):
        seat, last = int(rows.seats[r]), int(rows.seq_lens[r]) - 1
        for head in range(kept.chosen.shape[1]):
            count = int(kept.counts[seat, head])
            of_head = weights[r, min(head, weights.shape[1] - 1), :, : count + 1]
            chosen, ratings = kept.chosen[seat, head], kept.ratings[seat, head]
            positions = torch.cat([chosen[:count], torch.tensor([last], dtype=torch.int32)])
            rated = torch.cat([ratings[:count], torch.zeros(1)])
            if rule.rating == "stamp":
                rated[(of_head > STAMPED).any(0)] = last
            else:
                received = of_head.sum(0)
                rated = rated + received if rule.rating == "sum" else received
            budget = kept.budgets[seat, head].long()
            if count + 1 >= budget:
                spared = positions > last - rule.most_recent(budget)
                open_ = rated.masked_fill(spared | (positions < rule.sink), math.inf)
                pages = positions // rule.page
                best = {int(p): float(open_[pages == p].max()) for p in pages.unique()}
                goes = min(best, key=lambda page: best[page])
                if math.isinf(best[goes]):  # all are spared
                    behind = [p for p in best if int(positions[pages == p][0]) >= rule.sink]
                    goes = min(behind, default=int(pages[-1]))
                left = pages != goes
                positions, rated = positions[left], rated[left]
            chosen[: len(positions)], ratings[: len(rated)] = positions, rated


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


def stage_tokens(
    source: torch.Tensor, lists: TokenLists, target: torch.Tensor, layout: str = "vec"
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.stage_tokens`."""
    heads, (block_size, width) = lists.kv_heads, target.shape[2:]
    tokens, first = source.view(-1, width), 0
    for row, length in enumerate(lists.lengths[::heads].tolist()):
        entries = lists.entries[row * heads : (row + 1) * heads, :length].long()
        blocks = -(-length // block_size)
        padding = (0, 0, 0, blocks * block_size - length)
        listed = torch.nn.functional.pad(tokens[entries], padding)
        pages = listed.unflatten(1, (blocks, block_size)).transpose(0, 1).contiguous()
        order = torch.arange(blocks, dtype=torch.int32)
        stage_pages(pages, order, target[first : first + blocks], layout, rows=True)
        first += blocks


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
    weights: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.attend`."""
    units = cache.flatten(0, -3)
    keys, values = (part.flatten(0, 1).double() for part in tokens_of(units, layout))
    group = query.shape[1] // lists.kv_heads
    for unit, length in enumerate(lists.lengths.tolist()):
        row, head = divmod(unit, lists.kv_heads)
        heads = slice(head * group, (head + 1) * group)
        entries = lists.entries[unit if lists.per_head else row, : -(-length // lists.run)].long()
        units = entries if lists.per_head else entries * lists.kv_heads + head
        stretches = units * lists.run
        chosen = (stretches[:, None] + torch.arange(lists.run)).flatten()[:length]
        logits = query[row, heads].double() @ keys[chosen].T * scale
        if softcap:
            logits = softcap * (logits / softcap).tanh()
        if sinks is not None:
            logits = torch.cat([logits, sinks[heads].double()[:, None]], -1)
        found = logits.softmax(-1)[:, :length]
        output[row, heads] = (found @ values[chosen]).to(output.dtype)
        if lse is not None:
            lse[row, heads] = logits.logsumexp(-1).float()
        if weights is not None:
            weights[row, heads, :length] = found.float()


def attend_prompt(
    query: torch.Tensor,
    lists: PromptLists,
    cache: torch.Tensor,
    output: torch.Tensor,
    layout: str,
    scale: float,
    *,
    lse: torch.Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.attend_prompt`."""
    kv_heads, page_size = lists.kv_heads, cache.shape[-2]
    keys, values = (part.double() for part in tokens_of(cache.flatten(0, -3), layout))
    group = query.shape[1] // kv_heads
    for sequence, (start, end) in enumerate(pairwise(lists.starts.tolist())):
        limits = int(lists.seen[sequence]) + torch.arange(end - start)
        pages = -(-int(limits[-1]) // page_size)
        tokens = torch.arange(int(limits[-1]))
        visible = (tokens < limits[:, None]) & (tokens >= limits[:, None] - (window or len(tokens)))
        for head in range(kv_heads):
            row = sequence * kv_heads + head if lists.per_head else sequence
            units = lists.entries[row, :pages].long()
            units = units if lists.per_head else units * kv_heads + head
            heads = slice(head * group, (head + 1) * group)
            seen = (part[units].flatten(0, 1)[: len(tokens)] for part in (keys, values))
            key, value = seen
            logits = query[start:end, heads].double().transpose(0, 1) @ key.T * scale
            if softcap:
                logits = softcap * (logits / softcap).tanh()
            logits = logits.masked_fill(~visible, -torch.inf)
            if sinks is not None:
                sink = sinks[heads].double()[:, None, None].expand(-1, end - start, 1)
                logits = torch.cat([logits, sink], -1)
            weights = logits.softmax(-1)[..., : len(tokens)]
            output[start:end, heads] = (weights @ value).transpose(0, 1).to(output.dtype)
            if lse is not None:
                lse[start:end, heads] = logits.logsumexp(-1).T.float()


def top_pages(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the ``count`` highest scores, rising; of equal scores the earlier wins."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def _turned(query: torch.Tensor, previous: torch.Tensor, threshold: float) -> bool:
    """Whether a KV head must be corrected (FreeKV, section 3.3)."""
    if threshold >= 1 or threshold <= -1:
        return threshold >= 1
    similarity = torch.cosine_similarity(query.float(), previous.float(), dim=-1)
    return similarity.mean().item() < threshold


def encode_units(units: torch.Tensor, codec: Codec) -> torch.Tensor:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.encode_units`."""
    size, head_size = units.shape[1] // 2, units.shape[2]
    return codec.encode(*tokens_of(units.reshape(-1, size, 2 * head_size), "vec"))


def decode_units(data: torch.Tensor, codec: Codec, units: torch.Tensor) -> None:
    """See :meth:`vllm_kvretrieval.kernels.types.Ops.decode_units`."""
    size, head_size = units.shape[1] // 2, units.shape[2]
    keys, values = codec.decode(data, size, head_size, units.dtype)
    units.copy_(torch.cat([keys.transpose(1, 2).flatten(1), values.flatten(1)], 1).view_as(units))


class RecallCache:
    """See :class:`vllm_kvretrieval.kernels.types.RecallCache`; reads home in place, at once.

    Args:
        home: [units, 1, 2 * page_size, head_size]; the layer's KV cache.
        slots: How many units fast memory holds.
        kv_heads: KV heads of the layer.
        counts: int64 [S, 3]; per request, units attended to, missed, and read from home; added to.
        codec: Home is encoded by it, and ``home`` is where open pages lie; None: it is not.
    """

    def __init__(
        self,
        home: torch.Tensor,
        slots: int,
        kv_heads: int,
        counts: torch.Tensor,
        codec: Codec | None = None,
    ) -> None:
        self.slots = torch.empty(slots, *home.shape[1:], dtype=home.dtype)
        self.home, self.kv_heads, self.counts = home, kv_heads, counts
        self.page_size, self.codec = home.shape[2] // 2, codec
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
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.used`."""
        return len(self._slot_of)

    def write(self, slot_mapping: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.write`."""
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
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.close`."""
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

    def abandon(self, pages: list[int]) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.abandon`."""
        unfinished = [page for page in pages if page in self._open]
        self.drop_pages(unfinished)
        self._open.difference_update(unfinished)

    def stage(self, pages: torch.Tensor, target: torch.Tensor) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.stage`."""
        nothing = torch.zeros_like(self.home[0])
        units = [
            self.content(page * self.kv_heads + head) if page >= 0 else nothing
            for page in pages.tolist()
            for head in range(self.kv_heads)
        ]
        source = torch.stack(units).view(len(pages), self.kv_heads, self.page_size, -1)
        stage_pages(source, torch.arange(len(pages)), target)

    def content(self, unit: int) -> torch.Tensor:
        """What home holds."""
        if self.codec is None or unit // self.kv_heads in self._open:
            return self.home[unit]
        return self._closed[unit]

    def resolve(self, rows: DecodeRows) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.resolve`."""
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
        for request, unit in missing:
            if unit not in self._slot_of:  # else another row has missed it, too
                if not self._fetch(unit):
                    raise RuntimeError("the recall cache has fewer slots than one step attends to")
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

    def prefetch(self, rows: DecodeRows, chooser: Chooser) -> None:
        """See :meth:`vllm_kvretrieval.kernels.types.RecallCache.prefetch`."""
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

    def take_error(self) -> int:
        """Nor is there an error."""
        return 0

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
        differ = [u for u, s in self._slot_of.items() if not self.slots[s].equal(self.content(u))]
        return f"units {differ} differ from home" if differ else ""

    def _units(self, page: int) -> range:
        return range(page * self.kv_heads, (page + 1) * self.kv_heads)

    def _lists(self, rows: DecodeRows, r: int) -> list[list[int]]:
        """Units that a row attends to, by KV head."""
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
        """Whether there was a slot for it."""
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
