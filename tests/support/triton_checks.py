"""Checks of the Triton kernels against their specification, on whichever device is asked for.

The interpreter runs them on "cpu" (triton/test_triton_kernels.py), a GPU on "cuda" (tests/gpu).
Host memory and device memory are both ordinary tensors here; what is special about mapped memory
is tested on the GPU alone.
"""

import torch

from tests.spec import slots as reference
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.slots import DecodeWorkspace

DTYPES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative error, by norm, of attention with operands of a dtype."""


def recall(device, *, head_size, page, kv_heads, counts, programs, dtype=torch.bfloat16):
    """Every listed unit arrives whole; every other slot keeps what it held."""
    torch.manual_seed(head_size + page + kv_heads)
    home = torch.randn(7, kv_heads, page, 2 * head_size, device=device).to(dtype)
    sources = torch.randperm(7 * kv_heads, device=device).int()
    targets = torch.randperm(7 * kv_heads + 3, device=device)[: len(sources)].int()
    held = torch.randn(7 * kv_heads + 3, page, 2 * head_size, device=device).to(dtype)
    for count in counts:
        listed = torch.tensor([count], dtype=torch.int32, device=device)
        expected, actual = held.clone(), held.clone()
        reference.recall_units(home, expected, sources, targets, listed)
        kernels.recall_units(home, actual, sources, targets, listed, programs=programs)
        assert torch.equal(expected, actual), f"{count} units"


def decode(
    device,
    *,
    lengths,
    kv_heads,
    group,
    head_size,
    splits,
    page=32,
    dtype=torch.bfloat16,
    magnitude=1.0,
    launches=1,
    sinks=False,
    softcap=0.0,
    queries=1,
    counts=None,
    scored=None,
):
    """Output and log-sum-exp of ragged lists, of which entries past the length are poison.

    ``counts`` says how many queries each request has, up to ``queries``; None: one. ``scored`` says
    of how many tokens of a list the scores are asked for; None: of none.
    """
    torch.manual_seed(head_size + group + splits + sum(lengths))
    rows, width = len(lengths), -(-max(*lengths, 1) // page) + 1
    requests = rows // kv_heads
    starts = torch.tensor([0, *(counts or [1] * requests)], device=device).cumsum(0).int()
    slots = torch.randn(3 * width, page, 2 * head_size, device=device).to(dtype) * magnitude
    slots[[0, -1]] = float("nan")  # what no row may reach
    slot_lists = torch.randint(1, 3 * width - 1, (rows, width), device=device, dtype=torch.int32)
    for row, length in enumerate(lengths):
        slot_lists[row, -(-length // page) :] = 3 * width - 1
        if length % page:  # the rest of a partly filled page is poison, too: give it a slot
            tail = slots[slot_lists[row, length // page]].clone()
            tail[length % page :] = float("nan")
            slots = torch.cat([slots, tail[None]])
            slot_lists[row, length // page] = len(slots) - 1
    tokens = int(starts[-1])
    fused = torch.randn(tokens + 1, kv_heads * group + 2, head_size, device=device).to(dtype)
    query = fused[:, 2:] * magnitude
    arguments = (
        query,
        slots,
        slot_lists,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        head_size**-0.5,
    )
    workspace = DecodeWorkspace.empty(
        rows=rows + 1, splits=splits, group=queries * group, head_size=head_size, device=device
    )
    workspace.out.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    # Without a value, and next to nothing to much of the softmax, as a head's scores are.
    scores = 4 * torch.randn(kv_heads * group, device=device).to(dtype)
    options = {"sinks": scores if sinks else None, "softcap": softcap}
    if counts:
        options |= {"starts": starts, "queries": queries}
    asked = starts.diff().repeat_interleave(kv_heads)
    there = torch.arange(queries, device=device) < asked[:, None]
    results, noted = [], []
    for op in (reference.sparse_decode, *[kernels.sparse_decode] * launches):
        out = torch.full_like(query, float("nan"))
        lse = torch.full((rows, queries * group), float("nan"), device=device)
        if scored is not None:
            options["scores"] = torch.full((rows, group, scored), float("nan"), device=device)
            noted.append(options["scores"])
        op(*arguments, out, lse, workspace, **options)
        assert out[tokens:].isnan().all(), "nothing else is written"
        by_query = lse.view(rows, queries, group)
        assert by_query[~there].isnan().all(), "nor of queries that a request lacks"
        results.append((out[:tokens], by_query[there]))
    for actual in results[1:]:
        close(results[0], actual, dtype)
        for first, again in zip(results[1], actual, strict=True):
            assert torch.equal(first, again), "parts are merged in one order, whoever is last"
    for scores in noted:  # nothing is written behind a list
        torch.testing.assert_close(scores, noted[0], rtol=1e-3, atol=1e-3, equal_nan=True)
    assert not workspace.arrivals.any(), "the arrivals are counted from zero at the next launch"


def close(expected, actual, dtype):
    """Outputs and log-sum-exps agree as far as operands of a dtype allow; every one is written."""
    (out, lse), (actual_out, actual_lse) = expected, actual
    empty = lse == float("-inf")
    assert torch.equal(actual_lse == float("-inf"), empty), "rows without tokens"
    torch.testing.assert_close(actual_lse[~empty], lse[~empty], rtol=1e-3, atol=1e-3)
    # A row's error counts by itself: a large row does not hide a small one's.
    error = (actual_out.double() - out.double()).norm(dim=-1)
    size = out.double().norm(dim=-1)
    assert not error.isnan().any(), "every element is written"
    worst = (error / size.clamp(min=1e-6)).max().item()
    assert worst < TOLERANCE[dtype], f"relative error {worst:.2e}"
