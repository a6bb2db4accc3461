"""Prefill from the staging buffer: the copy against its specification, and the plan of it."""

import pytest
import torch
from vllm import _custom_ops as ops

from vllm_kvretrieval.attention.cpu.staging import BLOCK_SIZE, PrefillStaging
from vllm_kvretrieval.kernels import cpu, reference

PAGE, HEADS, SIZE = 32, 2, 64
STARTS = torch.tensor([0, 300, 900], dtype=torch.int32)
LENS = torch.tensor([5 * BLOCK_SIZE - 3, 700], dtype=torch.int32)
BLOCKS = 5 + 6


def pages_of(dtype, count=60, page_size=PAGE):
    return torch.randn(count, HEADS, page_size, 2 * SIZE).to(dtype)


def block_table():
    return torch.stack([torch.randperm(60)[:24] for _ in LENS]).int()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_copy_equals_reference(dtype, page_size):
    torch.manual_seed(0)
    source = pages_of(dtype, page_size=page_size)
    pages = torch.randperm(60)[: 6 * BLOCK_SIZE // page_size].int()
    expected = torch.zeros(7, HEADS, BLOCK_SIZE, 2 * SIZE, dtype=dtype)
    actual = expected.clone()
    reference.stage_pages(source, pages, expected)
    cpu.stage_pages(source, pages, actual)
    assert torch.equal(expected, actual)


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="another layout of keys with AMX")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("page_size", "isa", "size"),
    [(32, "vec", SIZE), (32, "vec16", SIZE), (16, "vec16", SIZE), (32, "vec16", 80)],
)
def test_blocks_are_what_vllm_writes(dtype, page_size, isa, size):
    """Tokens written in pages by vLLM's own op and staged equal tokens written in blocks."""
    torch.manual_seed(1)
    tokens = 3 * BLOCK_SIZE
    key, value = torch.randn(2, tokens, HEADS, size).to(dtype)
    pages = torch.randperm(tokens // page_size).int()
    in_pages = torch.zeros(len(pages), HEADS, page_size, 2 * size, dtype=dtype)
    in_blocks = torch.zeros(3, HEADS, BLOCK_SIZE, 2 * size, dtype=dtype)
    slots = (pages.long()[:, None] * page_size + torch.arange(page_size)).flatten()
    for cache, slot_mapping in ((in_pages, slots), (in_blocks, torch.arange(tokens))):
        halves = cache.view(cache.shape[0], HEADS, -1, size).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, *halves, slot_mapping, isa)
    staged = torch.empty_like(in_blocks)
    cpu.stage_pages(in_pages, pages, staged)
    assert torch.equal(staged, in_blocks)


def test_plan_lays_contexts_out_one_after_the_other():
    torch.manual_seed(2)
    staging = PrefillStaging(PAGE, HEADS, SIZE, torch.float32, BLOCKS * BLOCK_SIZE)
    table = block_table()
    source = pages_of(torch.float32)
    plan = staging.plan(table, LENS, STARTS)
    assert plan is not None
    reference.stage_pages(source, plan.pages, staging.buffer)
    values = staging.buffer[:, :, BLOCK_SIZE // 2 :].reshape(-1, HEADS, BLOCK_SIZE, SIZE)
    for request, length in enumerate(LENS.tolist()):
        for token in (0, 31, 32, 500, length - 1):
            page = source[table[request, token // PAGE], :, PAGE // 2 :]
            expected = page.reshape(HEADS, PAGE, SIZE)[:, token % PAGE]
            block = plan.block_table[request, token // BLOCK_SIZE]
            assert torch.equal(values[block, :, token % BLOCK_SIZE], expected)


def test_what_does_not_fit_or_pay_is_read_in_place():
    table = block_table()
    small = PrefillStaging(PAGE, HEADS, SIZE, torch.float32, (BLOCKS - 1) * BLOCK_SIZE)
    assert small.plan(table, LENS, STARTS) is None
    large = PrefillStaging(PAGE, HEADS, SIZE, torch.float32, BLOCKS * BLOCK_SIZE)
    assert large.plan(table, LENS, STARTS) is not None
    assert large.plan(table, LENS, torch.tensor([0, 20, 50], dtype=torch.int32)) is None
