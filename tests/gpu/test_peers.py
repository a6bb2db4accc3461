"""Attention over lists of slots, beside the kernels of other libraries that can do it."""

import pytest
import torch

from benchmarks.gpu import peers
from tests.support import triton_checks
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.slots import DecodeWorkspace

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)

KV_HEADS, HEAD_SIZE, SPLITS = 8, 128, 4
DTYPE = torch.bfloat16
SCALE = HEAD_SIZE**-0.5


@pytest.mark.parametrize("page", [32, 64])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("name", peers.PEERS)
def test_the_same_answers(name, group, page):
    """Rows of all lengths, over slots that come in no order."""
    if name not in peers.installed():
        pytest.skip(f"{name} is not installed")
    torch.manual_seed(group + page)
    requests, width = 4, 2048 // page
    rows = requests * KV_HEADS
    lengths = torch.randint(1, width * page + 1, (rows,)).tolist()
    lengths[:4] = 1, page, page + 1, width * page
    slots = torch.randn(rows * width, page, 2 * HEAD_SIZE, device="cuda").to(DTYPE)
    lists = torch.randperm(rows * width, device="cuda").int().view(rows, width)
    query = torch.randn(requests, KV_HEADS * group, HEAD_SIZE, device="cuda").to(DTYPE)
    out, lse = torch.empty_like(query), torch.empty(rows, group, device="cuda")
    workspace = DecodeWorkspace.empty(
        rows=rows, splits=SPLITS, group=group, head_size=HEAD_SIZE, device="cuda"
    )
    on_device = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    kernels.sparse_decode(query, slots, lists, on_device, SCALE, out, lse, workspace)
    try:
        attend = peers.PEERS[name](lists, lengths, page, group, HEAD_SIZE, SCALE)
    except (OSError, RuntimeError) as error:  # some compile their kernels at first use
        pytest.skip(f"{name} cannot make its kernel here: {error}")
    theirs = attend(query.view(rows, group, HEAD_SIZE), slots).view_as(out)
    triton_checks.close((out, lse), (theirs, lse), DTYPE)
