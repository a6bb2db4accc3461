"""Layers whose home is host memory: their outputs are those of layers whose home is the device."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.spec import device as device_reference
from tests.spec import slots as slots_reference
from tests.support.side_work import AtOnce, Delayed, Interleaved
from vllm_kvretrieval.attention.cuda.far import FarTier
from vllm_kvretrieval.attention.cuda.homes import RawHome
from vllm_kvretrieval.attention.cuda.staging import Staging
from vllm_kvretrieval.kernels.device import (
    Column,
    DevicePlan,
    DeviceRequests,
    DeviceRows,
)
from vllm_kvretrieval.kernels.slots import DecodeWorkspace
from vllm_kvretrieval.kernels.types import Chooser, IndexRecords, Selection
from vllm_kvretrieval.methods import DeviceFacts
from vllm_kvretrieval.methods.scored import DeviceScored
from vllm_kvretrieval.options.methods import make_method
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.pooling import Pooling

OPS = SimpleNamespace(**vars(device_reference) | vars(slots_reference))
KV_HEADS, GROUP, HEAD_SIZE, PAGE = 2, 2, 16, 16
LAYERS, SEATS, PAGES, TABLE = 3, 4, 90, 14
SINK, WINDOW, SELECT = 1, 1, 2
DTYPE = torch.bfloat16
SCALE = HEAD_SIZE**-0.5
METHOD = make_method("freekv", "freekv", {}, PAGE)
NOTHING_OPEN = np.zeros(SEATS, dtype=np.int32)
SLOW = pytest.mark.slow


class Half:
    """A dense half: attention of every row to its whole context, in float64."""

    def build(self, common_prefix_len, common_attn_metadata):
        return common_attn_metadata

    def forward(self, layer, query, key, value, cache, metadata, output, *scales):
        starts = metadata.query_start_loc_cpu.tolist()
        for row, length in enumerate(metadata.seq_lens.tolist()):
            begin, end = starts[row : row + 2]
            if length == 0 or begin == end:
                continue
            pages = metadata.block_table_tensor[row, : -(-length // PAGE)].long()
            context = cache[pages].transpose(1, 2).flatten(0, 1)[:length].double()
            keys, values = context.repeat_interleave(GROUP, 1).chunk(2, dim=-1)
            scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), keys) * SCALE
            last = torch.arange(length - (end - begin), length)
            scores[:, torch.arange(length) > last[:, None]] = float("-inf")
            attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
            output[begin:end] = attended.to(output.dtype)


class Layers:
    """Some layers of a model, with a home on the device, or in host memory."""

    def __init__(self, side=None, capacity=5, buffer_pages=TABLE):
        self.ops = side.ops if isinstance(side, Interleaved) else OPS
        self.requests = DeviceRequests.empty(SEATS, "cpu")
        options = torch.tensor([SINK, WINDOW, SELECT])
        self.requests.table[:, : Column.SELECT + 1] = options
        self.requests.table[:, Column.THRESHOLD] = torch.tensor(0.0).view(torch.int32)
        self.requests.table[1, Column.EXACT] = 1
        self.caches = torch.zeros(LAYERS, PAGES, KV_HEADS, PAGE, 2 * HEAD_SIZE, dtype=DTYPE)
        shape = {"kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": DTYPE}
        self.choosers = []
        for cache in self.caches:
            store = IndexRecords.empty(
                MinMax(), pages=PAGES, page_size=PAGE, cache=cache, layout="token_major", **shape
            )
            store.records.zero_()
            selection = Selection.empty(seats=SEATS, group=GROUP, most_selected=SELECT, **shape)
            selection.query.fill_(1)
            self.choosers.append(Chooser(store, selection, Pooling.MEAN_SOFTMAX, SCALE))
        self.far, width = None, SINK + WINDOW + SELECT
        self.plan = DevicePlan.empty(
            rows=SEATS, kv_heads=KV_HEADS, group=GROUP, entries=TABLE, width=width, programs=1,
            device="cpu", positions=side is not None,
        )  # fmt: skip
        self.room, self.side = self.plan.another(), side
        if side is None:
            return
        buffers = torch.full((2, buffer_pages, *self.caches.shape[2:]), float("nan"), dtype=DTYPE)
        self.staging = Staging(side, buffers, Half)
        self.tier = FarTier(
            self.ops, side, self.staging, layers=LAYERS, seats=SEATS, rows=SEATS,
            kv_heads=KV_HEADS, capacity=capacity, width=width, slot_tokens=PAGE, looks_ahead=True,
            device="cpu",
        )  # fmt: skip
        self.far = [self.tier.add(RawHome(self.ops, cache)) for cache in self.caches]
        for layer in self.far:
            layer.slots.fill_(float("nan"))

    def step(self, common, fused, reads_written=False):
        """All layers; queries, keys and values are given for each."""
        lead = common.num_reqs
        if self.far is not None:
            staged = common.is_prefilling.numpy() & (np.diff(common.query_start_loc_cpu) > 1)
            of_rows = common, staged, common.req_idx, NOTHING_OPEN
            lead = self.tier.begin_step(*of_rows, reads_written=reads_written)
        rows = DeviceRows(
            torch.from_numpy(common.req_idx).int(),
            common.is_prefilling.int(),
            common.query_start_loc,
            common.seq_lens,
            common.slot_mapping,
            common.block_table_tensor,
            *torch.zeros(4, common.num_reqs, dtype=torch.int32),
        )
        self.ops.prepare_rows(rows, self.requests, PAGE, far=self.far is not None)
        first = common.replace(
            seq_lens=rows.dense_lens[:lead],
            query_start_loc_cpu=common.query_start_loc_cpu[: lead + 1],
        )
        pairs, outputs = common.num_reqs * KV_HEADS, []
        workspace = DecodeWorkspace.empty(
            rows=pairs, splits=1, group=GROUP, head_size=HEAD_SIZE, device="cpu"
        )
        for number, (query, key, value) in enumerate(fused):
            cache, chooser = self.caches[number], self.choosers[number]
            self.ops.write_kv(key, value, common.slot_mapping, cache, [chooser.store])
            output, half = torch.full_like(query, float("nan")), Half()
            half.forward(None, query, key, value, cache, first, output)
            lse = torch.zeros(pairs, GROUP)
            if self.far is None:
                self.ops.plan_decode(query, rows, self.requests, [chooser], self.plan)
                units, lengths = cache.flatten(0, 1), self.plan.lengths[:pairs]
                lists = self.plan.lists
                self.ops.select_ahead(rows, self.requests, 0, chooser, self.room)
                self.ops.sparse_decode(query, units, lists, lengths, SCALE, output, lse, workspace)
            else:
                far = self.far[number]
                methods = [
                    DeviceScored([METHOD], [chooser], DeviceFacts(0, True, None, chooser.scale))
                ]
                far.attend_to_selection(
                    query, key, value, rows, self.requests, methods, self.plan, self.room,
                    workspace, lse, SCALE, output,
                )  # fmt: skip
                far.attend_to_prompts(half, None, query, key, value, rows, output)
            outputs.append(output)
        if self.side is not None:
            self.side.wait()
        return outputs


class Batches:
    """Requests that come and go, one of them exact; prompts in chunks beside decode steps."""

    def __init__(self, seed):
        self.draw, self.running, self.waiting = random.Random(seed), {}, list(range(SEATS))
        self.pages = list(range(1, PAGES))

    def next(self):
        draw = self.draw
        while self.waiting and draw.random() < 0.6:
            seat = self.waiting.pop(0)
            taken = [self.pages.pop() for _ in range(TABLE)]
            prompt = draw.choice([draw.randint(1, 90), draw.randint(120, (TABLE - 2) * PAGE)])
            cached = draw.choice([0, prompt // PAGE // 2 * PAGE])
            self.running[seat] = SimpleNamespace(
                table=taken, prompt=prompt, done=min(cached, prompt - 1), cached=cached
            )
        rows = []
        for seat, request in self.running.items():
            left = request.prompt - request.done
            rows.append((seat, request, min(left, draw.choice([1, 40, 90, 90])) if left > 0 else 1))
        rows.sort(key=lambda row: row[2] > 1)
        return rows

    def end(self, rows):
        for seat, request, tokens in rows:
            request.done += tokens
            over = request.done >= TABLE * PAGE or self.draw.random() < 0.03
            if request.done > request.prompt and over:
                self.pages[:0] = request.table
                self.waiting.append(seat)
                del self.running[seat]


def describe(rows):
    tokens = [count for *_, count in rows]
    starts = np.concatenate(([0], np.cumsum(tokens)))
    lens = torch.tensor([request.done + count for _, request, count in rows]).int()
    tables = torch.tensor([request.table for _, request, _ in rows]).int()
    slots = [
        request.table[place // PAGE] * PAGE + place % PAGE
        for _, request, count in rows
        for place in range(request.done, request.done + count)
    ]
    return CommonAttentionMetadata(
        query_start_loc=torch.from_numpy(starts).int(),
        query_start_loc_cpu=torch.from_numpy(starts).int(),
        seq_lens=lens,
        num_reqs=len(rows),
        num_actual_tokens=sum(tokens),
        max_query_len=max(tokens),
        max_seq_len=int(lens.max()),
        block_table_tensor=tables,
        slot_mapping=torch.tensor(slots),
        is_prefilling=torch.tensor([request.done < request.prompt for _, request, _ in rows]),
        seq_lens_cpu_upper_bound=lens,
        req_idx=np.array([seat for seat, *_ in rows]),
    )


def draw_fused(common):
    """Queries, keys and values of a step, for each layer."""
    shape = LAYERS, common.num_actual_tokens, (2 + GROUP) * KV_HEADS, HEAD_SIZE
    fused = torch.randn(shape).to(DTYPE)
    return [f.split((GROUP * KV_HEADS, KV_HEADS, KV_HEADS), 1) for f in fused]


def prompts(*rows):
    """A step of prompts: for each its pages, the tokens before the step, and those of the step."""
    return describe(
        [
            (seat, SimpleNamespace(table=table, done=before, prompt=before + tokens), tokens)
            for seat, (table, before, tokens) in enumerate(rows)
        ]
    )


def interleaved(seed):
    return lambda: Interleaved(OPS, seed)


@pytest.mark.parametrize(
    ("side", "capacity", "buffer_pages"),
    [
        (Delayed, 5, TABLE),
        (AtOnce, 4, TABLE),
        (Delayed, 9, 40),
        (interleaved(0), 5, TABLE),
        *(
            pytest.param(interleaved(seed), *((5, TABLE), (9, 40))[seed % 2], marks=SLOW)
            for seed in range(1, 9)
        ),
    ],
)
def test_outputs_are_those_of_a_home_on_the_device(side, capacity, buffer_pages):
    torch.manual_seed(capacity)
    beside = side()
    near, far = Layers(), Layers(beside, capacity, buffer_pages)
    batches, waves, decodes = Batches(capacity), 0, 0
    for _ in range(40):
        rows = batches.next()
        if not rows:
            continue
        common = describe(rows)
        for seat, request, _ in rows:
            if request.done == request.cached:  # takes its seat; some of its prompt is there
                for layers in (near, far):
                    layers.requests.table[seat, Column.LAST_LEN] = 0
                cached = torch.tensor(request.table[: request.cached // PAGE]).long()
                content = torch.randn(LAYERS, len(cached), *near.caches.shape[2:]).to(DTYPE)
                for layers in (near, far):
                    layers.caches[:, cached] = content
        parts = draw_fused(common)
        for number, (expected, actual) in enumerate(
            zip(near.step(common, parts), far.step(common, parts), strict=True)
        ):
            assert not expected.isnan().any()
            assert torch.equal(expected, actual), f"layer {number}"
        assert beside.idle, "nothing is beside the model between steps"
        waves = max(waves, len(far.staging.waves))
        decodes += common.num_reqs - sum(count > 1 for *_, count in rows)
        batches.end(rows)
    looked_up, missed, ahead, held = far.tier.traffic.sum(0).tolist()
    assert decodes > 40
    assert (waves > 1) == (buffer_pages == TABLE), "contexts of several rows and a buffer"
    assert 0 < missed < looked_up
    assert held > 0
    assert bool(ahead) == (capacity > SINK + WINDOW + SELECT)
    assert torch.equal(near.requests.corrected, far.requests.corrected)


@pytest.mark.parametrize("buffer_pages", [TABLE, 40])
def test_contexts_that_the_step_itself_writes(buffer_pages):
    """One prompt fills the pages that are another's prefix, together or in two waves."""
    torch.manual_seed(0)
    near, far = Layers(), Layers(AtOnce(), buffer_pages=buffer_pages)
    first, pages = list(range(1, TABLE + 1)), range(30, 60)
    common = prompts((first, 0, 150), (first[:8] + list(pages)[: TABLE - 8], 128, 40))
    parts = draw_fused(common)
    expected, actual = near.step(common, parts), far.step(common, parts, reads_written=True)
    assert (len(far.staging.waves) > 1) == (buffer_pages == TABLE)
    assert torch.equal(torch.stack(expected), torch.stack(actual))


@pytest.mark.parametrize("count", range(1, 6))
def test_addresses_are_aligned(count):
    """Else Triton would compile anew, by how many prompts there are, and where they begin."""
    far = Layers(AtOnce())
    tables = [list(range(3 * row, 3 * row + 3)) for row in range(count + 1)]
    rows = [(table, 5, 20 if row else 1) for row, table in enumerate(tables)]
    staged = np.array([tokens > 1 for *_, tokens in rows])
    seats = np.arange(count + 1)
    of_rows = prompts(*rows), staged, seats, NOTHING_OPEN
    assert far.tier.begin_step(*of_rows, reads_written=False) == 1
    (wave,) = far.staging.waves
    half = wave.metadata
    of_kernel = wave.block_table, wave.lengths, wave.starts, wave.seats, wave.slot_mapping
    of_half = half.query_start_loc, half.seq_lens, half.block_table_tensor
    assert all(tensor.data_ptr() % 16 == 0 for tensor in of_kernel + of_half)
    assert wave.block_table.tolist() == tables[1:]
    assert half.seq_lens.tolist() == [25] * count
    assert half.query_start_loc.tolist() == [20 * row for row in range(count + 1)]
    assert half.block_table_tensor.tolist() == [[2 * row, 2 * row + 1] for row in range(count)]
