"""The entries of a page index whose records are built, and their keys."""

import triton
import triton.language as tl


@triton.jit
def entry_to_build(entries, FROM_SLOTS: tl.constexpr, ENTRY: tl.constexpr):
    """The entry that this program builds; negative: none.

    Args:
        entries: int32 or int64 [n]; numbers of entries, or if ``FROM_SLOTS``, where tokens went, of
            which those count that end an entry.
    """
    entry = tl.load(entries + tl.program_id(0)).to(tl.int64)
    if FROM_SLOTS:
        ends = (entry >= 0) & (entry % ENTRY == ENTRY - 1)
        entry = tl.where(ends, entry // ENTRY, -1)
    return entry


@triton.jit
def keys_of_entry(
    cache,
    entry,
    head,
    kv_heads,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """Pointers [ENTRY] to the keys of an entry's tokens, in a KV head."""
    PARTS: tl.constexpr = PAGE // ENTRY
    unit = entry // PARTS * kv_heads + head
    return cache + (unit * PAGE + entry % PARTS * ENTRY + tl.arange(0, ENTRY)) * (2 * HEAD_SIZE)
