"""Parts of one softmax, in different memories, are put together to what one list would give."""

from typing import Any

import pytest
import torch

from vllm_kvretrieval.attention.cpu.impl import RetrievalAttentionImpl
from vllm_kvretrieval.kernels import TokenLists, cpu
from vllm_kvretrieval.storage.base import Part

HEADS, GROUP, SIZE, PAGE = 2, 3, 64, 32
ROWS = 2


def layer(sinks):
    """As much of a layer as attends to lists."""
    layer: Any = object.__new__(RetrievalAttentionImpl)
    layer.kernels, layer.scale, layer.logits_soft_cap, layer.sinks = cpu, SIZE**-0.5, 0.0, sinks
    return layer


def read_late(lists, memory):
    """A part whose memory holds nothing before it has been waited for."""
    units = torch.full_like(memory, torch.nan)
    return Part(lists, units, lambda: units.copy_(memory))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("borders", [(700,), (1, 400), (5, 6, 690)])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 9, HEADS * GROUP)])
def test_parts_are_one_softmax(dtype, borders, sinks):
    torch.manual_seed(len(borders))
    cache = torch.randn(60, PAGE, 2 * SIZE).to(dtype)
    query = (3 * torch.randn(ROWS, HEADS * GROUP, SIZE)).to(dtype)
    tokens = torch.stack([torch.randperm(60 * PAGE)[:900] for _ in range(ROWS * HEADS)]).int()
    tokens[1, :300] = tokens[1, 0]  # a part whose share is far from its size
    lists = [
        TokenLists(part.contiguous(), torch.full((len(part),), part.shape[1]).int(), 1, HEADS)
        for part in tokens.tensor_split(borders, dim=1)
    ]
    whole = TokenLists(tokens, torch.full((len(tokens),), 900).int(), 1, HEADS)
    expected, merged = torch.empty(query.shape), torch.empty_like(query)
    layer(sinks)._attend_to_reached(query, [Part(whole, cache)], expected, "token_major")
    layer(sinks)._attend_to_reached(
        query, [read_late(p, cache) for p in lists], merged, "token_major"
    )
    # Once, at the end, is the result rounded; with bfloat16 products weights are, too.
    products = dtype == torch.bfloat16 and cpu.isa() in ("avx512_amx", "avx512_bf16")
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    torch.testing.assert_close(
        merged.float(), expected, atol=2e-2 if products else 1e-5, rtol=1e-5 + rounding
    )
