"""Prefill from the staging buffer: the copy against its specification, and the plan of it."""

from dataclasses import replace

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from tests.spec import ops as reference
from vllm_kvretrieval.attention.cpu.staging import BLOCK_SIZE, PrefillStaging
from vllm_kvretrieval.kernels import TokenLists, cpu

pytestmark = pytest.mark.threads

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("page_size", "size"), [(16, 64), (32, 64), (32, 80), (64, 128), (128, 96)]
)
def test_rows_become_what_vllm_writes(dtype, page_size, size):
    """Tokens written as rows and staged equal tokens that vLLM's own op writes in blocks."""
    torch.manual_seed(3)
    tokens = 3 * BLOCK_SIZE
    isa = _get_attn_isa(dtype, page_size, size)
    if isa == "amx":
        torch.cpu._init_amx()
    key, value = torch.randn(2, tokens, HEADS, size).to(dtype)
    pages = torch.randperm(tokens // page_size).int()
    rows = torch.zeros(len(pages), HEADS, page_size, 2 * size, dtype=dtype)
    slots = (pages.long()[:, None] * page_size + torch.arange(page_size)).flatten()
    cpu.write_cache(key, value, slots, rows, "token_major")
    in_blocks = torch.zeros(3, HEADS, BLOCK_SIZE, 2 * size, dtype=dtype)
    halves = in_blocks.view(3, HEADS, -1, size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *halves, torch.arange(tokens), isa)
    for kernels in (cpu, reference):
        staged = torch.empty_like(in_blocks)
        kernels.stage_pages(rows, pages, staged, isa, token_major=True)
        assert torch.equal(staged, in_blocks)


@pytest.mark.parametrize("size", [32, 80, 256])
@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_rows_for_amx_equal_reference(page_size, size):
    """The layout is tested on every machine."""
    torch.manual_seed(4)
    source = torch.randn(60, HEADS, page_size, 2 * size).bfloat16()
    pages = torch.randperm(60)[: 3 * BLOCK_SIZE // page_size].int()
    expected = torch.zeros(4, HEADS, BLOCK_SIZE, 2 * size).bfloat16()
    actual = expected.clone()
    reference.stage_pages(source, pages, expected, "amx", token_major=True)
    cpu.stage_pages(source, pages, actual, "amx", token_major=True)
    assert torch.equal(expected, actual)
    assert actual[:3].any()


def lists_of(lengths, pages):
    """Any tokens of a cache, of each head its own."""
    rows, width = len(lengths), max(lengths) + 3
    entries = torch.empty(rows, HEADS, width, dtype=torch.int32)
    for head in range(HEADS):
        unit = torch.randint(pages, (rows, width)) * HEADS + head
        entries[:, head] = unit * PAGE + torch.randint(PAGE, (rows, width))
    lengths = torch.tensor(lengths, dtype=torch.int32).repeat_interleave(HEADS)
    return TokenLists(entries.flatten(0, 1), lengths, 1, HEADS)


@pytest.mark.parametrize("size", [32, 80])
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(torch.bfloat16, "vec"), (torch.bfloat16, "amx"), (torch.float32, "vec16")],
)
def test_tokens_equal_reference(dtype, layout, size):
    torch.manual_seed(5)
    source = torch.randn(60, HEADS, PAGE, 2 * size).to(dtype)
    lists = lists_of([300, 1, 128, 31], 60)
    expected = torch.full((7, HEADS, BLOCK_SIZE, 2 * size), torch.nan, dtype=dtype)
    actual = expected.clone()
    reference.stage_tokens(source, lists, expected, layout)
    cpu.stage_tokens(source, lists, actual, layout)
    assert torch.equal(actual[:6], expected[:6])
    assert actual[6].isnan().all()
    assert not actual[:6].isnan().any()


def test_tokens_in_order_are_pages():
    """Listing whole pages token by token gives the same as pages."""
    torch.manual_seed(6)
    source = pages_of(torch.float32, count=9)
    pages = torch.randperm(9)[:8].int()
    units = pages[None].long() * HEADS + torch.arange(HEADS)[:, None]
    entries = (units[..., None] * PAGE + torch.arange(PAGE)).flatten(1).int()
    lengths = torch.full((HEADS,), 2 * BLOCK_SIZE, dtype=torch.int32)
    by_pages, by_tokens = torch.zeros(2, 2, HEADS, BLOCK_SIZE, 2 * SIZE)
    cpu.stage_pages(source, pages, by_pages, token_major=True)
    cpu.stage_tokens(source, TokenLists(entries, lengths, 1, HEADS), by_tokens)
    assert torch.equal(by_pages, by_tokens)


def test_tokens_that_are_not_staged():
    source = torch.randn(4, HEADS, PAGE, 2 * SIZE)
    target = torch.full((2, HEADS, BLOCK_SIZE, 2 * SIZE), 7.0)

    def lists(length=200, **changed):
        return replace(lists_of([length], 4), **changed)

    entries = lists().entries
    beyond, before = entries.clone(), entries.clone()
    beyond[1, 199], before[0, 0] = 4 * HEADS * PAGE, -1
    for wrong, options, why in [
        (lists(entries=beyond), {}, r"entries\[1\]\[199\] is 256, the cache has 256"),
        (lists(entries=before), {}, r"entries\[0\]\[0\] is -1"),
        (lists(lengths=torch.tensor([200, 199]).int()), {}, "row 0: its lists have 200 and 199"),
        (lists(lengths=torch.zeros(2).int()), {}, "a list holds from 1 to 203"),
        (lists(lengths=torch.full((2,), 204).int()), {}, "a list holds from 1 to 203"),
        (lists(lengths=torch.full((4,), 9).int()), {}, "4 lengths for 2 lists"),
        (lists(lengths=torch.full((3,), 9).int()), {}, "3 lists for 2 KV heads"),
        (lists(257), {}, "the lists fill 3 blocks, there are 2"),
        (lists(run=32), {}, "with run=32 are not the single tokens"),
        (lists(kv_heads=1), {}, "for 1 KV heads"),
        (lists(entries=entries.long()), {}, "entries must be torch.int32"),
        (lists(), {"layout": "token_major"}, "cannot be staged in the layout 'token_major'"),
        (lists(), {"layout": "amx"}, "no layout for keys in torch.float32"),
    ]:
        with pytest.raises(ValueError, match=why):
            cpu.stage_tokens(source, wrong, target, **options)
    for other in (target[..., :SIZE].contiguous(), target[:, :, :16].contiguous()):
        with pytest.raises(ValueError, match="cannot be laid out as"):
            cpu.stage_tokens(source, lists(20), other)
    with pytest.raises(ValueError, match="of one dtype"):
        cpu.stage_tokens(source.half(), lists(), target)
    assert (target == 7).all()


def test_layouts_that_are_not_staged():
    source = torch.randn(4, HEADS, 32, 2 * SIZE)
    pages, target = torch.arange(4).int(), torch.empty(1, HEADS, BLOCK_SIZE, 2 * SIZE)
    for layout, rows, why in [
        ("amx", False, "cannot be staged in the layout 'amx', token_major=False"),
        ("neon", True, "cannot be staged in the layout 'neon'"),
        ("token_major", True, "cannot be staged in the layout 'token_major'"),
        ("amx", True, "no layout for keys in torch.float32"),
    ]:
        with pytest.raises(ValueError, match=why):
            cpu.stage_pages(source, pages, target, layout, rows)


def test_pages_that_are_not_staged():
    source, target = pages_of(torch.float32, count=9), torch.full((2, HEADS, BLOCK_SIZE, 128), 7.0)
    pages = torch.arange(8).int()
    for entry, wrong in (7, 9), (2, -1), (0, 2**31 - 1):
        beyond = pages.clone()
        beyond[entry] = wrong
        with pytest.raises(ValueError, match=rf"pages\[{entry}\] is {wrong}, the cache has 9"):
            cpu.stage_pages(source, beyond, target)
    for count in 7, 9, 12:
        with pytest.raises(ValueError, match=f"{count} pages do not fill blocks of 4"):
            cpu.stage_pages(source, torch.zeros(count).int(), target)
    others = target[:, :1], target[..., :SIZE], target[:, :, :48], target[:, :, :16]
    for other in others:
        with pytest.raises(ValueError, match="cannot be laid out as"):
            cpu.stage_pages(source, pages, other.contiguous())
    assert (target == 7).all()


def test_plan_names_pages_of_the_context_only():
    """Whatever a block table holds behind it."""
    table = torch.full((2, 24), -1, dtype=torch.int32)
    for row, length in zip(table, LENS.tolist(), strict=True):
        row[: -(-length // PAGE)] = 7
    staging = PrefillStaging(PAGE, HEADS, SIZE, torch.float32, BLOCKS * BLOCK_SIZE)
    (plan,) = staging.plan(table, LENS, STARTS)
    assert plan.pages.tolist() == [7] * (BLOCKS * BLOCK_SIZE // PAGE)


def test_plan_lays_contexts_out_one_after_the_other():
    torch.manual_seed(2)
    staging = PrefillStaging(PAGE, HEADS, SIZE, torch.float32, BLOCKS * BLOCK_SIZE)
    table = block_table()
    source = pages_of(torch.float32)
    (plan,) = staging.plan(table, LENS, STARTS)
    assert plan.requests == slice(0, 2)
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
    assert small.plan(table, LENS, STARTS) == []
    large = PrefillStaging(PAGE, HEADS, SIZE, torch.float32, BLOCKS * BLOCK_SIZE)
    assert len(large.plan(table, LENS, STARTS)) == 1
    assert large.plan(table, LENS, torch.tensor([0, 20, 50], dtype=torch.int32)) == []


def test_large_pages_are_blocks_of_their_own():
    lens, starts = torch.tensor([300, 256, 513]).int(), torch.tensor([0, 300, 556, 1069]).int()
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    staging = PrefillStaging(256, HEADS, SIZE, torch.float32, 600, encoded=True)
    assert staging.buffer.shape == (3, HEADS, 256, 2 * SIZE)
    assert staging.pages.data_ptr() == staging.buffer.data_ptr()
    first, second = staging.plan(table, lens, starts)
    assert (first.requests, second.requests) == (slice(0, 2), slice(2, 3))
    assert (first.pages.tolist(), second.pages.tolist()) == ([0, 1, 4], [8, 9, 10])
    assert first.block_table.tolist() == [[0, 1], [2, 2]]
    cpu.stage_pages(pages_of(torch.float32, page_size=256), second.pages.int(), staging.buffer)


def test_rows_are_staged_always_in_turns_that_fit():
    lens = torch.tensor([100, 500, 30, 641, 300, 10, 7], dtype=torch.int32)  # blocks 1 4 1 6 3 1 1
    starts = torch.tensor([0, *lens.cumsum(0)], dtype=torch.int32)
    table = torch.arange(7 * 24, dtype=torch.int32).view(7, 24)
    staging = PrefillStaging(PAGE, HEADS, SIZE, torch.float32, 6 * BLOCK_SIZE, token_major=True)
    turns = staging.plan(table, lens, starts)
    assert [turn.requests for turn in turns] == [slice(0, 3), slice(3, 4), slice(4, 7)]
    assert [len(turn.pages) for turn in turns] == [24, 24, 20]
    assert turns[0].block_table[:, 0].tolist() == [0, 1, 5]
    assert turns[2].pages[:2].tolist() == [96, 97]
    alone = staging.plan(table[:1], lens[:1], torch.tensor([0, 1], dtype=torch.int32))
    assert len(alone) == 1
