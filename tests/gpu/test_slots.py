"""The ops over slots on a GPU: compiled, with mapped host memory, streams and CUDA graphs."""

import gc

import pytest
import torch

from tests import slot_checks, triton_checks
from vllm_kvretrieval.kernels import device_reference
from vllm_kvretrieval.kernels import slots_reference as reference
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.slots import DecodeWorkspace
from vllm_kvretrieval.kernels.triton.mapped import map_host

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)

KV_HEADS, GROUP, HEAD_SIZE, PAGE = 4, 4, 128, 32
PAGES, SLOTS = 50, 80
DTYPE = torch.bfloat16


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("programs", [1, 16, 200])
def test_recall(head_size, page, programs):
    triton_checks.recall(
        "cuda",
        head_size=head_size,
        page=page,
        kv_heads=8,
        counts=(0, 1, 17, 56),
        programs=programs,
    )


@pytest.mark.parametrize(
    ("capacity", "select", "uneven"),
    [(18, 6, False), (20, 7, True), (64, 12, False), (200, 50, False)],
)
def test_resolve(capacity, select, uneven):
    slot_checks.resolve("cuda", capacity=capacity, select=select, uneven=uneven, steps=30)


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_write_tail(kv_heads, head_size):
    slot_checks.tail("cuda", kv_heads=kv_heads, head_size=head_size, capacity=40)


@pytest.mark.parametrize("programs", [1, 16, 200])
@pytest.mark.parametrize(("kv_heads", "head_size", "page"), [(3, 96, 16), (8, 128, 32)])
def test_stage_context(kv_heads, head_size, page, programs):
    shape = {"kv_heads": kv_heads, "head_size": head_size, "page": page}
    slot_checks.stage("cuda", programs=programs, **shape)


def test_far_units():
    slot_checks.far_units("cuda")


@pytest.mark.parametrize("dtype", triton_checks.DTYPES)
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize(("group", "splits"), [(1, 1), (4, 4), (7, 32), (16, 4)])
def test_sparse_decode(head_size, group, splits, dtype):
    triton_checks.decode(
        "cuda",
        lengths=[0, 1, 31, 32, 33, 1000, 2048, 0, 64, 5000, 127, 700],
        kv_heads=3,
        group=group,
        head_size=head_size,
        splits=splits,
        dtype=dtype,
        launches=3,
    )


@pytest.mark.parametrize("dtype", triton_checks.DTYPES)
@pytest.mark.parametrize("magnitude", [0.0, 1e-4, 60.0])
def test_extreme_values(dtype, magnitude):
    triton_checks.decode(
        "cuda",
        lengths=[0, 1, 33, 2048, 500, 64],
        kv_heads=2,
        group=4,
        head_size=128,
        splits=4,
        dtype=dtype,
        magnitude=magnitude,
    )


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


class Layer:
    """A home in mapped host memory, slots, and a step that is captured once."""

    def __init__(self):
        shape = (PAGES, KV_HEADS, PAGE, 2 * HEAD_SIZE)
        nbytes = DTYPE.itemsize
        for size in shape:
            nbytes *= size
        host, device = map_host(nbytes)
        self.host, self.home = (memory.view(DTYPE).view(shape) for memory in (host, device))
        self.host.copy_(torch.randn(shape))
        self.slots = torch.zeros(SLOTS, PAGE, 2 * HEAD_SIZE, device="cuda", dtype=DTYPE)
        self.sources = torch.zeros(SLOTS, device="cuda", dtype=torch.int32)
        self.targets = torch.arange(SLOTS, device="cuda", dtype=torch.int32)
        self.count = torch.zeros(1, device="cuda", dtype=torch.int32)
        self.key, self.value = torch.zeros(2, 2, KV_HEADS, HEAD_SIZE, device="cuda", dtype=DTYPE)
        self.slot_mapping = torch.full((2,), -1, device="cuda")
        rows = 2 * KV_HEADS
        self.query = torch.zeros(2, KV_HEADS * GROUP, HEAD_SIZE, device="cuda", dtype=DTYPE)
        self.lists = torch.zeros(rows, 10, device="cuda", dtype=torch.int32)
        self.lengths = torch.zeros(rows, device="cuda", dtype=torch.int32)
        self.out = torch.zeros_like(self.query)
        self.lse = torch.zeros(rows, GROUP, device="cuda")
        self.workspace = DecodeWorkspace.empty(
            rows=rows, splits=4, group=GROUP, head_size=HEAD_SIZE, device="cuda"
        )

    def step(self, ops=kernels):
        """Recall on a side stream beside the write-through, then attention."""
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            ops.recall_units(
                self.home, self.slots, self.sources, self.targets, self.count, programs=8
            )
        write_kv = kernels.write_kv if ops is kernels else device_reference.write_kv
        write_kv(self.key, self.value, self.slot_mapping, self.home, [])
        main.wait_stream(side)
        ops.sparse_decode(
            self.query,
            self.slots,
            self.lists,
            self.lengths,
            HEAD_SIZE**-0.5,
            self.out,
            self.lse,
            self.workspace,
        )

    def draw(self):
        """New inputs in the same tensors, as a running engine would put them there."""
        units = PAGES * KV_HEADS
        recalled = int(torch.randint(0, SLOTS // 2, ()))
        self.sources[:recalled] = torch.randperm(units - KV_HEADS * 2)[:recalled].int().cuda()
        self.targets[:recalled] = torch.randperm(SLOTS // 2)[:recalled].int().cuda()
        self.count.fill_(recalled)
        for tensor in (self.key, self.value, self.query):
            tensor.normal_()
        # The tails are the last two pages, which no list recalls.
        offsets = torch.randint(0, PAGE, (2,))
        self.slot_mapping.copy_(offsets + torch.tensor([PAGES - 2, PAGES - 1]) * PAGE)
        self.lists.copy_(torch.randint(0, SLOTS, self.lists.shape))
        self.lengths.copy_(torch.randint(0, 10 * PAGE, self.lengths.shape))


def test_a_step_in_a_cuda_graph():
    """Captured once, replayed with other lists, lengths and tokens, all of them on the device."""
    torch.manual_seed(0)
    layer = Layer()
    layer.step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.step()
    for _ in range(20):
        layer.draw()
        before_home, before_slots = layer.host.clone(), layer.slots.clone()
        graph.replay()
        torch.cuda.synchronize()
        home, slots = layer.host.clone(), layer.slots.clone()
        out, lse = layer.out.clone(), layer.lse.clone()
        layer.host.copy_(before_home)
        layer.slots.copy_(before_slots)
        layer.step(reference)
        torch.cuda.synchronize()
        assert torch.equal(home, layer.host)
        assert torch.equal(slots, layer.slots)
        triton_checks.close((layer.out, layer.lse), (out, lse), DTYPE)


def test_recall_beside_attention():
    """Recall of one half of the slots beside attention to the other half, many times over."""
    layer = Layer()
    layer.draw()
    layer.lists.copy_(torch.randint(SLOTS // 2, SLOTS, layer.lists.shape))
    layer.slots.normal_()
    layer.count.fill_(SLOTS // 2)
    layer.targets[: SLOTS // 2] = torch.randperm(SLOTS // 2).int().cuda()
    side = torch.cuda.Stream()
    outs = []
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(side):
            kernels.recall_units(
                layer.home, layer.slots, layer.sources, layer.targets, layer.count, programs=16
            )
        out = torch.empty_like(layer.out)
        kernels.sparse_decode(
            layer.query,
            layer.slots,
            layer.lists,
            layer.lengths,
            0.1,
            out,
            layer.lse,
            layer.workspace,
        )
        outs.append(out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, outs[0]) for out in outs)
    listed = slice(SLOTS // 2)
    arrived = layer.slots[layer.targets[listed].long()]
    assert torch.equal(arrived, layer.home.flatten(0, 1)[layer.sources[listed].long()])
