"""FlashAttention over steps whose rows attend to selections: empty to it, but for the first.

FlashAttention 3 divides by what all rows together have when it plans their work, so no step may
have nothing.
"""

import pytest
import torch

from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import Column, DeviceRequests, DeviceRows

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)
flash = pytest.importorskip("vllm.vllm_flash_attn", reason="needs vLLM's CUDA wheel")

PAGE, KV_HEADS, GROUP, HEAD_SIZE, PAGES = 32, 2, 4, 128, 20
DTYPE = torch.bfloat16


def prepared(exact: list[bool]) -> DeviceRows:
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
            torch.randint(4 * PAGE, PAGES * PAGE, (count,)).int(),
            torch.zeros(count).long(),
            torch.randperm(count * PAGES).int().view(count, PAGES),
            *torch.zeros(3, count).int(),
        )
    kernels.prepare_rows(rows, requests, PAGE)
    return rows


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "exact",
    [[False], [False] * 8, [False] * 33, [True] + [False] * 7, [False] * 6 + [True, True]],
    ids=["one", "eight", "many", "first", "last"],
)
def test_rows_that_are_empty(exact, captured):
    """They keep no program from ending, and from what others attend to."""
    torch.manual_seed(len(exact))
    count, rows = len(exact), prepared(exact)
    assert int(rows.dense_lens.sum()) > 0
    shape = count * PAGES, KV_HEADS, PAGE, 2 * HEAD_SIZE
    keys, values = torch.randn(shape, device="cuda").to(DTYPE).transpose(1, 2).chunk(2, dim=-1)
    query = torch.randn(count, KV_HEADS * GROUP, HEAD_SIZE, device="cuda").to(DTYPE)
    out = torch.full_like(query, float("nan"))
    hopper = torch.cuda.get_device_capability()[0] == 9
    plan = None
    if hopper:
        plan = flash.get_scheduler_metadata(
            batch_size=count, max_seqlen_q=1, max_seqlen_k=PAGES * PAGE,
            num_heads_q=KV_HEADS * GROUP, num_heads_kv=KV_HEADS, headdim=HEAD_SIZE,
            cache_seqlens=rows.dense_lens, qkv_dtype=DTYPE, cu_seqlens_q=rows.query_start,
            page_size=PAGE, causal=True, window_size=(-1, -1), num_splits=32 if captured else 0,
        )  # fmt: skip

    def attend():
        flash.flash_attn_varlen_func(
            q=query, k=keys, v=values, out=out, max_seqlen_q=1, cu_seqlens_q=rows.query_start,
            max_seqlen_k=PAGES * PAGE, seqused_k=rows.dense_lens, block_table=rows.block_table,
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
        pages = rows.block_table[row, : -(-length // PAGE)].long()
        k, v = (t[pages].flatten(0, 1)[:length].float() for t in (keys, values))
        q = query[row].float().view(KV_HEADS, GROUP, HEAD_SIZE)
        weights = (torch.einsum("hgd,nhd->hgn", q, k) * HEAD_SIZE**-0.5).softmax(-1)
        expected = torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)
        torch.testing.assert_close(out[row].float(), expected, atol=0.02, rtol=0.02)
