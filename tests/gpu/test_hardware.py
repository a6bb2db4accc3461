"""What Triton's interpreter cannot show of a GPU: CUDA graphs, mapped host memory, streams.

The first tests that a session with a GPU runs, beside FlashAttention over empty rows.
"""

import gc
import math

import pytest
import torch

from tests.support.device_chain import CONTEXT, DTYPE, PAGE, SEATS, Chain
from vllm_kvretrieval.attention.cuda.side import SideStream
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.slots import DecodeWorkspace
from vllm_kvretrieval.kernels.triton.mapped import map_host

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)

KV_HEADS, GROUP, HEAD_SIZE = 4, 4, 128


def mapped_home():
    """Random pages in host memory, as the device sees them."""
    shape = (SEATS * CONTEXT, KV_HEADS, PAGE, 2 * HEAD_SIZE)
    host, device = map_host(math.prod(shape) * DTYPE.itemsize)
    host.view(DTYPE).view(shape).copy_(torch.randn(shape))
    return device.view(DTYPE).view(shape)


def test_host_memory_is_seen_from_both_sides():
    nbytes = 3 * 2**20 + 5  # torch's pinned allocator would round this up
    host, device = map_host(nbytes)
    assert host.device.type == "cpu"
    assert device.is_cuda
    assert host.nbytes == device.nbytes == nbytes
    assert not host.any()
    host.random_()
    assert torch.equal(device.cpu(), host)
    device.fill_(7)
    torch.cuda.synchronize()
    assert (host == 7).all()


def test_host_memory_lives_as_long_as_a_view_of_it():
    view = map_host(2**20)[1].view(torch.int32)[10:20]
    gc.collect()
    view.fill_(3)
    torch.cuda.synchronize()
    assert view.cpu().tolist() == [3] * 10
    del view
    gc.collect()
    torch.cuda.synchronize()
    host, device = map_host(2**20)  # nothing that was unregistered is in the way
    host.fill_(1)
    assert device.sum().item() == 2**20


@pytest.mark.parametrize("home", ["device", "host"])
def test_a_step_in_a_cuda_graph(home):
    """Freekv's step is captured once and replayed with other inputs, all of them on the device."""
    torch.manual_seed(0)
    pages = mapped_home()
    far = home == "host"
    chain = Chain("cuda", pages if far else pages.clone(), SideStream(), GROUP, far)
    chain.prepare()
    chain.step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.step()

    def replay():
        graph.replay()
        torch.cuda.synchronize()

    chain.check(replay, 20)


def test_recall_beside_attention():
    """Recall of one half of the slots beside attention to the other half, many times over."""
    home, rows, width = mapped_home(), 4, 12
    units = len(home) * KV_HEADS
    with torch.device("cuda"):
        slots = torch.randn(units, PAGE, 2 * HEAD_SIZE).to(DTYPE)
        query = torch.randn(rows, KV_HEADS * GROUP, HEAD_SIZE).to(DTYPE)
        lists = torch.randint(units // 2, units, (rows * KV_HEADS, width)).int()
        lengths = torch.full((rows * KV_HEADS,), width * PAGE - 5).int()
        sources, targets = (torch.randperm(n)[: units // 2].int() for n in (units, units // 2))
        count = torch.tensor([units // 2], dtype=torch.int32)
        lse = torch.empty(rows * KV_HEADS, GROUP)
    workspace = DecodeWorkspace.empty(
        rows=rows * KV_HEADS, splits=4, group=GROUP, head_size=HEAD_SIZE, device="cuda"
    )
    side = torch.cuda.Stream()
    outs = []
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(side):
            kernels.recall_units(home, slots, sources, targets, count)
        out = torch.empty_like(query)
        kernels.sparse_decode(query, slots, lists, lengths, 0.1, out, lse, workspace)
        outs.append(out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.equal(slots[targets.long()], home.flatten(0, 1)[sources.long()])


def test_merging_gives_the_same_bits_every_time():
    """Whichever program comes last merges: a race between them would show as a difference."""
    rows, width = 64, 64
    slots = torch.randn(rows * width, PAGE, 2 * HEAD_SIZE, device="cuda").to(DTYPE)
    lists = torch.randperm(rows * width, device="cuda").int().view(rows, width)
    lengths = torch.randint(1, width * PAGE, (rows,), device="cuda").int()
    query = torch.randn(rows // KV_HEADS, KV_HEADS * GROUP, HEAD_SIZE, device="cuda").to(DTYPE)
    workspace = DecodeWorkspace.empty(
        rows=rows, splits=8, group=GROUP, head_size=HEAD_SIZE, device="cuda"
    )
    results = []
    for _ in range(200):
        out, lse = torch.empty_like(query), torch.empty(rows, GROUP, device="cuda")
        workspace.out.fill_(float("nan"))
        kernels.sparse_decode(query, slots, lists, lengths, 0.1, out, lse, workspace)
        results.append((out, lse))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
