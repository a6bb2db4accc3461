"""What Triton's interpreter cannot show of a GPU: CUDA graphs, mapped host memory, streams.

The first tests that a session with a GPU runs, beside FlashAttention over empty rows.
"""

import gc
import math
from types import SimpleNamespace

import pytest
import torch

from tests import triton_checks
from vllm_kvretrieval.engine.cuda.side import SideStream
from vllm_kvretrieval.kernels import device_reference
from vllm_kvretrieval.kernels import slots_reference as reference
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import Column, DevicePlan, DeviceRequests, DeviceRows
from vllm_kvretrieval.kernels.slots import DecodeWorkspace, Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.triton.mapped import map_host
from vllm_kvretrieval.kernels.types import Selection

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)

KV_HEADS, GROUP, HEAD_SIZE, PAGE = 4, 4, 128, 32
PAGES, SLOTS = 50, 160
WIDTH, SELECT = 12, 9
DTYPE = torch.bfloat16


class Layer:
    """A home in mapped host memory, slots, and a step of two requests that is captured once."""

    def __init__(self):
        shape = (PAGES, KV_HEADS, PAGE, 2 * HEAD_SIZE)
        host, device = map_host(math.prod(shape) * DTYPE.itemsize)
        self.host, self.home = (memory.view(DTYPE).view(shape) for memory in (host, device))
        self.host.copy_(torch.randn(shape))
        rows, context = 2, PAGES // 2
        with torch.device("cuda"):
            self.key, self.value = torch.zeros(2, rows, KV_HEADS, HEAD_SIZE, dtype=DTYPE)
            self.query = torch.zeros(rows, KV_HEADS * GROUP, HEAD_SIZE, dtype=DTYPE)
            self.rows = DeviceRows(
                torch.arange(rows, dtype=torch.int32),
                torch.zeros(rows, dtype=torch.int32),
                torch.arange(rows + 1, dtype=torch.int32),
                torch.zeros(rows, dtype=torch.int32),
                torch.zeros(rows, dtype=torch.int64),
                torch.randperm(PAGES).int().view(rows, context),
                *torch.zeros(3, rows, dtype=torch.int32),
            )
            step, traffic = torch.zeros(1).int(), torch.zeros(rows, len(Traffic)).long()
            self.lists, self.ahead = torch.zeros(2, rows * KV_HEADS, WIDTH, dtype=torch.int32)
            self.out, self.lse = torch.zeros_like(self.query), torch.zeros(rows * KV_HEADS, GROUP)
        self.residency = Residency.empty(
            kv_heads=KV_HEADS, slots=SLOTS // rows // KV_HEADS, step=step, traffic=traffic
        )
        self.slots = torch.zeros(SLOTS, PAGE, 2 * HEAD_SIZE, device="cuda", dtype=DTYPE)
        self.recalls = [Recalls.empty(rows * KV_HEADS * WIDTH, "cuda") for _ in range(2)]
        self.plan = DevicePlan.empty(
            rows=rows, kv_heads=KV_HEADS, group=GROUP, entries=1, width=WIDTH, programs=1,
            device="cuda", positions=True,
        )  # fmt: skip
        self.requests = DeviceRequests.empty(rows, "cuda")
        self.requests.table[:, Column.SELECT] = SELECT
        self.selection = Selection(
            self.query.clone(), torch.zeros(rows, KV_HEADS, SELECT, device="cuda").int()
        )
        self.workspace = DecodeWorkspace.empty(
            rows=rows * KV_HEADS, splits=4, group=GROUP, head_size=HEAD_SIZE, device="cuda"
        )
        self.side = SideStream()

    def step(self, ops=kernels):
        """What is missed first, then recall ahead on a side stream beside attention."""
        rows, home, slots = self.rows, self.home, self.slots
        self.residency.step.add_(1)
        for recalls in self.recalls:
            recalls.count.zero_()
        ops.write_kv(self.key, self.value, rows.slot_mapping, home, ())
        ops.write_tail(self.key, self.value, rows, self.residency, slots)
        missed, early = self.recalls
        ops.resolve(self.plan, rows, self.residency, missed, self.lists, PAGE)
        ops.recall_units(home, slots, missed.sources, missed.targets, missed.count)

        def ahead():
            ops.resolve_ahead(
                self.selection, rows, self.requests, self.residency, early, self.ahead, PAGE
            )
            ops.recall_units(home, slots, early.sources, early.targets, early.count, programs=8)

        self.side.submit(ahead)
        scale = HEAD_SIZE**-0.5
        arguments = self.query, slots, self.lists, self.plan.lengths, scale, self.out, self.lse
        ops.sparse_decode(*arguments, self.workspace)
        self.side.wait()

    def draw(self):
        """New inputs in the same tensors, as a running engine would put them there."""
        for tensor in (self.key, self.value, self.query):
            tensor.normal_()
        for row, table in enumerate(self.rows.block_table):
            length = int(torch.randint(WIDTH * PAGE, len(table) * PAGE, ()))
            pages = -(-length // PAGE)
            self.rows.seq_lens[row] = length
            self.rows.fresh[row] = torch.randint(0, 2, ())
            self.rows.slot_mapping[row] = table[pages - 1] * PAGE + (length - 1) % PAGE
            for head in range(KV_HEADS):
                pair = row * KV_HEADS + head
                listed = torch.randperm(pages - 1)[: WIDTH - 1].sort().values
                self.plan.lists[pair, :-1] = listed.int()
                self.plan.lists[pair, -1] = pages - 1
                self.plan.lengths[pair] = (WIDTH - 1) * PAGE + (length - 1) % PAGE + 1
                chosen = torch.randperm(pages - 1)[:SELECT].sort().values
                self.selection.chosen[row, head] = chosen.int()

    def state(self):
        """All that a step may change and a later one reads."""
        held = self.residency
        return [self.home, self.slots, held.held, held.stamp, held.step, held.traffic]


REFERENCE = SimpleNamespace(**vars(device_reference) | vars(reference))


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
        before = [tensor.clone() for tensor in layer.state()]
        graph.replay()
        torch.cuda.synchronize()
        after = [tensor.clone() for tensor in layer.state()]
        out, lse, lists = layer.out.clone(), layer.lse.clone(), layer.lists.clone()
        for tensor, old in zip(layer.state(), before, strict=True):
            tensor.copy_(old)
        layer.step(REFERENCE)
        torch.cuda.synchronize()
        assert torch.equal(lists, layer.lists)
        assert all(map(torch.equal, after, layer.state()))
        triton_checks.close((layer.out, layer.lse), (out, lse), DTYPE)


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


def test_recall_beside_attention():
    """Recall of one half of the slots beside attention to the other half, many times over."""
    layer = Layer()
    layer.draw()
    lists = torch.randint(SLOTS // 2, SLOTS, layer.lists.shape, device="cuda").int()
    layer.slots.normal_()
    sources = torch.randperm(PAGES * KV_HEADS, device="cuda")[: SLOTS // 2].int()
    targets = torch.randperm(SLOTS // 2, device="cuda").int()
    count = torch.tensor([SLOTS // 2], device="cuda", dtype=torch.int32)
    side = torch.cuda.Stream()
    outs = []
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(side):
            kernels.recall_units(layer.home, layer.slots, sources, targets, count)
        out = torch.empty_like(layer.out)
        kernels.sparse_decode(
            layer.query,
            layer.slots,
            lists,
            layer.plan.lengths,
            0.1,
            out,
            layer.lse,
            layer.workspace,
        )
        outs.append(out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.equal(layer.slots[targets.long()], layer.home.flatten(0, 1)[sources.long()])


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
