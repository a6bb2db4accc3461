"""FlashAttention over steps whose rows attend to selections: empty to it, but for the first.

FlashAttention 3 divides by what all rows together have when it plans their work, so no step may
have nothing. Rows that attend to everything read host memory in place where the cache is there: in
pages of 128 by TMA, which takes them as tiles.
"""

import pytest
import torch

from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import Column, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.triton.mapped import map_host

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)
flash = pytest.importorskip("vllm.vllm_flash_attn", reason="needs vLLM's CUDA wheel")

PAGE, KV_HEADS, GROUP, HEAD_SIZE, PAGES = 32, 2, 4, 128, 20
DTYPE = torch.bfloat16


def prepared(exact: list[bool], page: int) -> DeviceRows:
    """Rows of long contexts, of which some attend to all of it; as ``prepare_rows`` leaves them."""
    count = len(exact)
    requests = DeviceRequests.empty(count, "cuda")
    requests.table[:, : Column.SELECT + 1] = 1
    requests.table[:, Column.EXACT] = torch.tensor(exact).int()
    with torch.device("cuda"):
        rows = DeviceRows(
            torch.arange(count).int(),
            torch.zeros(count).int(),
            torch.arange(count + 1).int(),
            torch.randint(4 * page, PAGES * page, (count,)).int(),
            torch.zeros(count).long(),
            torch.randperm(count * PAGES).int().view(count, PAGES),
            *torch.zeros(4, count).int(),
        )
    kernels.prepare_rows(rows, requests, page)
    return rows


def random_cache(pages: int, page: int, in_host_memory: bool) -> torch.Tensor:
    """[pages, kv_heads, page, 2 * head_size], as the device sees it."""
    cache = torch.randn(pages, KV_HEADS, page, 2 * HEAD_SIZE, device="cuda").to(DTYPE)
    if not in_host_memory:
        return cache
    _, mapped = map_host(cache.nbytes)
    return mapped.view(DTYPE).view(cache.shape).copy_(cache)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "exact",
    [[False], [False] * 8, [False] * 33, [True] + [False] * 7, [False] * 6 + [True, True]],
    ids=["one", "eight", "many", "first", "last"],
)
def test_rows_that_are_empty(exact, captured):
    """They keep no program from ending, and from what others attend to."""
    check(exact, captured, PAGE, in_host_memory=False)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("page", [PAGE, 128])
def test_rows_that_read_host_memory(page, captured):
    """As exact requests do with home=host, beside rows that are empty."""
    check([True, False, True, True], captured, page, in_host_memory=True)


def check(exact, captured, page, *, in_host_memory):
    """Compare what rows attend to with the same in torch."""
    torch.manual_seed(len(exact))
    count, rows = len(exact), prepared(exact, page)
    assert int(rows.dense_lens.sum()) > 0
    cache = random_cache(count * PAGES, page, in_host_memory)
    keys, values = cache.transpose(1, 2).chunk(2, dim=-1)
    query = torch.randn(count, KV_HEADS * GROUP, HEAD_SIZE, device="cuda").to(DTYPE)
    out = torch.full_like(query, float("nan"))
    hopper = torch.cuda.get_device_capability()[0] == 9
    plan = None
    if hopper:
        plan = flash.get_scheduler_metadata(
            batch_size=count, max_seqlen_q=1, max_seqlen_k=PAGES * page,
            num_heads_q=KV_HEADS * GROUP, num_heads_kv=KV_HEADS, headdim=HEAD_SIZE,
            cache_seqlens=rows.dense_lens, qkv_dtype=DTYPE, cu_seqlens_q=rows.query_start,
            page_size=page, causal=True, window_size=(-1, -1), num_splits=32 if captured else 0,
        )  # fmt: skip

    def attend():
        flash.flash_attn_varlen_func(
            q=query, k=keys, v=values, out=out, max_seqlen_q=1, cu_seqlens_q=rows.query_start,
            max_seqlen_k=PAGES * page, seqused_k=rows.dense_lens, block_table=rows.block_table,
            softmax_scale=HEAD_SIZE**-0.5, causal=True, fa_version=3 if hopper else 2,
            scheduler_metadata=plan, num_splits=32 if captured else 0,
        )  # fmt: skip

    attend()
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        out.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    for row in (row for row in range(count) if exact[row] or row == 0):
        length = int(rows.seq_lens[row]) if exact[row] else 1
        pages = rows.block_table[row, : -(-length // page)].long()
        k, v = (t[pages].flatten(0, 1)[:length].float() for t in (keys, values))
        q = query[row].float().view(KV_HEADS, GROUP, HEAD_SIZE)
        weights = (torch.einsum("hgd,nhd->hgn", q, k) * HEAD_SIZE**-0.5).softmax(-1)
        expected = torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)
        torch.testing.assert_close(out[row].float(), expected, atol=0.02, rtol=0.02)
