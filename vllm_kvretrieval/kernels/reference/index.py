"""Page indexes: records of keys, and the layouts that keys are read from."""

import torch

from vllm_kvretrieval.kernels.types import IndexRecords
from vllm_kvretrieval.retrieval.index import Field, pack, unpack
from vllm_kvretrieval.retrieval.index.base import pack_means


def update_index(key: torch.Tensor, slot_mapping: torch.Tensor, store: IndexRecords) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.update_index`."""
    size = store.entry_tokens
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        entry, offset = divmod(slot, size)
        if store.index is not None and store.index.grows:
            new = build(key[None, token, None].expand(1, size, -1, -1).float(), store)[0]
            if offset:
                old, new = (fields_of(r, store) for r in (store.records[entry], new))
                merged = {
                    "minimum": torch.minimum(old["minimum"], new["minimum"]),
                    "maximum": torch.maximum(old["maximum"], new["maximum"]),
                }
                new = pack(_layout(store), merged, store.dtype, store.alignment)
            store.records[entry] = new
        elif offset == size - 1 and store.records.shape[-1]:
            number = torch.tensor([entry])
            values = values_of_entries(number, store) if store.means else None
            store.records[entry] = build(keys_of_entries(number, store), store, values)[0]


def index_pages(pages: torch.Tensor, lengths: torch.Tensor, store: IndexRecords) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.index_pages`."""
    assert store.cache is not None
    size = store.page_size
    for page, length in zip(pages.tolist(), lengths.tolist(), strict=True):
        keys = keys_of(store.cache[page], store.layout).transpose(0, 1)
        update_index(keys[:length], torch.arange(page * size, page * size + length), store)


def build(
    keys: torch.Tensor, store: IndexRecords, values: torch.Tensor | None = None
) -> torch.Tensor:
    """Build records.

    Args:
        keys: float32 [n, entry_tokens, kv_heads, head_size].
        store: Says what records hold.
        values: The values, shaped like ``keys``; needed if the store has means.

    Returns:
        uint8 [n, kv_heads, bytes].
    """
    assert store.index is not None
    record = store.index.build(keys.transpose(1, 2).flatten(0, 1))
    layout = _layout(store), record, store.dtype, store.alignment
    packed = pack(*layout) if record else keys.new_empty(0)
    if values is not None:
        by_head = values.transpose(1, 2).flatten(0, 1)
        means = pack_means(by_head.unflatten(1, (store.spans, -1)))
        packed = torch.cat([packed.view(len(means), -1).to(torch.uint8), means], 1)
    return packed.view(len(keys), store.kv_heads, -1)


def keys_of_entries(entries: torch.Tensor, store: IndexRecords) -> torch.Tensor:
    """Read the keys of entries from the cache, float32 [n, entry_tokens, kv_heads, head_size]."""
    assert store.cache is not None
    pages = torch.stack([keys_of(store.cache[p], store.layout) for p in pages_of(entries, store)])
    pages = pages.unflatten(0, (-1, store.spans)).transpose(1, 2).flatten(2, 3)
    parts = pages.float().unflatten(2, (store.parts, -1))
    return parts[torch.arange(len(entries)), :, entries % store.parts].transpose(1, 2)


def values_of_entries(entries: torch.Tensor, store: IndexRecords) -> torch.Tensor:
    """Read the values of entries from the cache, float32 [n, entry_tokens, kv_heads, head_size]."""
    assert store.cache is not None
    pages = store.cache[pages_of(entries, store)]
    values = tokens_of(pages.flatten(0, 1), store.layout)[1].float()
    values = values.unflatten(0, (-1, store.spans, store.kv_heads)).transpose(1, 2).flatten(2, 3)
    parts = values.unflatten(2, (store.parts, -1))
    return parts[torch.arange(len(entries)), :, entries % store.parts].transpose(1, 2)


def pages_of(entries: torch.Tensor, store: IndexRecords) -> torch.Tensor:
    """Ids of the pages of entries, int64 [n * spans]; the page of each if it has several."""
    first = entries // store.parts * store.spans
    return (first[:, None] + torch.arange(store.spans)).flatten()


def _layout(store: IndexRecords) -> tuple[Field, ...]:
    assert store.index is not None
    return store.index.fields(store.head_size, store.entry_tokens)


def fields_of(records: torch.Tensor, store: IndexRecords) -> dict[str, torch.Tensor]:
    """The fields of packed records, by name."""
    return unpack(_layout(store), records, store.dtype, store.alignment)


def tokens_of(units: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values, [n, page_size, head_size] each, of units, [n, page_size, 2 *
    head_size]."""
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
