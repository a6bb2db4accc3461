"""The page index made from vLLM's KV cache, against the one that is kept as keys are written."""

from dataclasses import replace

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from tests.test_kernels import DTYPES, copy_of, make_state
from vllm_kvretrieval.kernels import cpu, reference

current_platform.import_kernels()
PAGES, HEADS, LISTED = 12, 2, 9
BITS = {2: torch.int16, 4: torch.int32}
SHAPES = [  # layout, head size, page size, summary size
    ("vec", 64, 32, 32),
    ("vec", 128, 32, 8),
    ("vec", 256, 64, 32),
    ("vec", 64, 128, 128),
    ("vec16", 80, 32, 16),
    ("vec16", 64, 16, 16),
    ("vec16", 80, 16, 8),
    ("amx", 64, 32, 32),
    ("amx", 128, 64, 8),
    ("amx", 256, 32, 16),
]


def cache_of(dtype, layout, head_size, page_size, lengths):
    """Keys, the slots they have, and vLLM's KV cache with them in it and noise elsewhere."""
    pages = torch.randperm(PAGES)[:LISTED]
    slots = [
        p * page_size + t for p, n in zip(pages.tolist(), lengths, strict=True) for t in range(n)
    ]
    fused = torch.randn(len(slots), HEADS + 2, head_size)
    fused[fused.abs() < 0.7] *= 0  # zeros of either sign: the later one counts
    key = fused.to(dtype)[:, 1 : 1 + HEADS]
    kv_cache = torch.randn(PAGES, HEADS, page_size, 2 * head_size).to(dtype) * 9
    keys, values = kv_cache.view(PAGES, HEADS, 2 * page_size, head_size).chunk(2, dim=2)
    slot_mapping = torch.tensor(slots)
    ops.cpu_attn_reshape_and_cache(key, key, keys, values, slot_mapping, layout)
    return key, slot_mapping, kv_cache, pages.int()


def state_of(dtype, head_size, page_size, summary_size):
    state = make_state(PAGES * page_size // 32 + 1, 1, HEADS, 1, head_size, dtype)
    index = torch.randn(PAGES * page_size // summary_size, HEADS, 2, head_size).to(dtype)
    return replace(state, index=index, page_size=page_size, summary_size=summary_size)


def same_bits(a, b):
    bits = BITS[a.element_size()]
    return a.view(bits).equal(b.view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "head_size", "page_size", "summary_size"), SHAPES)
def test_index_is_that_of_writes(isa, dtype, layout, head_size, page_size, summary_size):
    torch.manual_seed(0)
    lengths = [page_size] * 4 + torch.randint(1, page_size + 1, (LISTED - 4,)).tolist()
    key, slot_mapping, kv_cache, pages = cache_of(dtype, layout, head_size, page_size, lengths)
    written = state_of(dtype, head_size, page_size, summary_size)
    loaded, specified = copy_of(written), copy_of(written)
    cpu.update_index(key, slot_mapping, written)
    arguments = kv_cache, pages, torch.tensor(lengths).int()
    cpu.index_pages(*arguments, loaded, layout)
    assert same_bits(written.index, loaded.index)
    reference.index_pages(*arguments, specified, layout)
    assert specified.index.equal(loaded.index)


@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_many_pages(isa, layout):
    """So many that threads share them."""
    torch.manual_seed(1)
    state = make_state(600, 1, 3, 1, 64, torch.bfloat16)
    kv_cache = torch.randn(600, 3, 32, 128).to(torch.bfloat16)
    arguments = kv_cache, torch.randperm(600)[:500].int(), torch.full((500,), 32).int()
    expected = copy_of(state)
    reference.index_pages(*arguments, expected, layout)
    cpu.index_pages(*arguments, state, layout)
    assert expected.index.equal(state.index)
    cpu.index_pages(kv_cache, torch.empty(0).int(), torch.empty(0).int(), state, layout)
    assert expected.index.equal(state.index)


def test_what_does_not_fit_is_refused():
    state = state_of(torch.bfloat16, 64, 32, 32)
    before = state.index.clone()
    kv_cache = torch.randn(PAGES, HEADS, 32, 128).to(torch.bfloat16)
    page, length = torch.tensor([3]).int(), torch.tensor([32]).int()
    fits = [kv_cache, page, length, state, "vec"]
    for place, wrong, message in (
        (4, "neon", "'neon' lays out keys is not known"),
        (0, kv_cache.half(), "kv_cache must be torch.bfloat16"),
        (0, kv_cache[:-1], r"\(12, 2, 32, 128\) and contiguous, got"),
        (0, kv_cache.transpose(0, 1).contiguous().transpose(0, 1), "and contiguous, got"),
        (1, page.long(), "pages must be torch.int32"),
        (2, length.long(), "lengths must be torch.int32"),
        (2, length.repeat(2), r"\(2,\) lengths for \(1,\) pages"),
        (1, page + 9, r"pages\[0\] is 12 with 32 tokens, the cache has 12 pages of 32"),
        (1, -page, r"pages\[0\] is -3 with"),
        (2, length + 1, "with 33 tokens"),
        (2, length - 32, "with 0 tokens"),
        (3, replace(state, summary_size=4, index=state.index.repeat(8, 1, 1, 1)), "only 8 to 128"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.index_pages(*fits[:place], wrong, *fits[place + 1 :])
    assert same_bits(state.index, before)
