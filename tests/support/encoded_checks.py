"""Checks of the ops of an encoded home against their specification, byte by byte.

The interpreter runs them on "cpu" (triton/test_encoded.py), a GPU on "cuda" (tests/gpu).
"""

import random
from types import SimpleNamespace

import torch

from tests.spec import encoded as reference
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import RECORD_ALIGNMENT, DeviceRows
from vllm_kvretrieval.kernels.encoded import EncodedUnits
from vllm_kvretrieval.kernels.slots import Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.types import IndexRecords
from vllm_kvretrieval.retrieval.codec import CODECS
from vllm_kvretrieval.retrieval.codec.sparse import Sparse, outlier_count
from vllm_kvretrieval.retrieval.index import unpack
from vllm_kvretrieval.retrieval.index.landmark import Landmark
from vllm_kvretrieval.retrieval.index.min_max import MinMax

SEATS, TABLE = 3, 9
"""Seats, and pages of the longest context."""


class Layer:
    """One implementation, with all that a layer has."""

    def __init__(self, ops, device, codec, kept, capacity, shape):
        kv_heads, page, head_size, dtype = shape
        self.ops, self.device = ops, device
        nbytes, pages = codec.unit_bytes(page, head_size, dtype), SEATS * TABLE
        # What has not been written is no number.
        opened = torch.full(
            (SEATS, kept + 1, kv_heads, page, 2 * head_size), float("nan"), dtype=dtype
        )
        self.store = EncodedUnits(
            codec,
            torch.zeros(pages, kv_heads, nbytes, dtype=torch.uint8, device=device),
            opened.to(device),
            torch.zeros(SEATS, dtype=torch.int32, device=device),
        )
        self.residency = Residency.empty(
            kv_heads=kv_heads,
            slots=capacity,
            step=torch.zeros(1, dtype=torch.int32, device=device),
            traffic=torch.zeros(SEATS, len(Traffic), dtype=torch.int64, device=device),
        )
        slots = SEATS * kv_heads * capacity, page, 2 * head_size
        self.slots = torch.zeros(slots, dtype=dtype, device=device)
        self.buffer = torch.zeros(
            TABLE * SEATS, kv_heads, page, 2 * head_size, dtype=dtype, device=device
        )
        self.index = IndexRecords.empty(
            MinMax(), pages=pages, kv_heads=kv_heads, head_size=head_size, page_size=page,
            dtype=dtype, layout="token_major", alignment=RECORD_ALIGNMENT,
        )  # fmt: skip
        self.built = IndexRecords.empty(
            Landmark(), pages=pages, kv_heads=kv_heads, head_size=head_size, page_size=page,
            entry_tokens=page // 2, dtype=dtype, layout="token_major", alignment=RECORD_ALIGNMENT,
        )  # fmt: skip
        for index in self.index, self.built:
            index.records = torch.zeros_like(index.records, device=device)

    def step(self, given, key, value, opened, recalls, waves):
        """What an engine launches for a step, without attention."""
        rows = DeviceRows(**{name: tensor.to(self.device) for name, tensor in given.items()})
        key, value = key.to(self.device), value.to(self.device)
        self.store.first.copy_(opened)
        self.ops.update_index(key, rows.slot_mapping, self.index)
        self.ops.write_open(key, value, rows, self.store, self.residency)
        self.ops.index_open(key, rows, self.store, self.built)
        held, sources, targets = recalls
        flat = self.residency.held.view(-1)
        self.residency.traffic[:, Traffic.HELD] = 0
        flat[targets.to(self.device).long()] = held.to(self.device)
        count = torch.tensor([len(sources)], dtype=torch.int32)
        listed = Recalls(*(t.to(self.device) for t in (sources, targets, count)))
        self.ops.recall_encoded(self.store, self.slots, self.residency, listed, programs=5)
        self.ops.stage_encoded(
            self.store, self.buffer, rows.block_table, *(w.to(self.device) for w in waves),
            rows.seats.clamp(min=0), programs=3,
        )  # fmt: skip
        self.ops.keep_open(key, value, rows, self.store)

    def state(self):
        """Everything that a step writes, as bytes or whole numbers; what is no number is alike."""
        numbers = [self.store.open, self.slots, self.buffer]
        tensors = [alike(self.store), self.index.records, self.residency.held]
        tensors += [self.residency.traffic]
        for tensor in numbers:
            bits = tensor.view(torch.int16)
            tensors.append(torch.where(tensor.isnan(), torch.full_like(bits, -1), bits))
        return [tensor.cpu() for tensor in tensors]


def same_records(ours, theirs):
    """Records that are built, up to the rounding of sums."""
    layout = ours.index.fields(ours.head_size, ours.entry_tokens)
    kept = ours.dtype, ours.alignment
    a, b = (unpack(layout, of.records.cpu().flatten(0, 1), *kept) for of in (ours, theirs))
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=2**-7, atol=1e-6, equal_nan=True)


def alike(store):
    """The units of a cache; outliers that are no numbers have the same bits, which differ."""
    units, (page, row) = store.units.clone(), store.open.shape[3:]
    if isinstance(store.codec, Sparse):
        end, size = units.shape[2], store.open.element_size()
        for rows in ((page, row // 2), (row // 2, page)):
            count = outlier_count(*rows)
            listed = units[..., end - count * size : end]
            numbers = listed.contiguous().view(store.open.dtype)
            listed.copy_(numbers.nan_to_num(nan=7.0).view(torch.uint8))
            end -= count * (2 + size)
    return units


class Requests:
    """Requests with cached prefixes, whose prompts come in chunks, and which then decode."""

    def __init__(self, page, kept, seed):
        self.draw, self.page, self.kept = random.Random(seed), page, kept
        self.tables = torch.randperm(SEATS * TABLE).int().view(SEATS, TABLE)
        self.running = {}

    def rows(self):
        """Of the next step: seats, and tokens before it and of it. Those of one token come first,
        as in an engine; some steps have no others."""
        draw, size = self.draw, self.page
        for seat in range(SEATS):
            if seat not in self.running and draw.random() < 0.5:
                prompt = draw.randint(1, (TABLE - 3) * size)
                cached = draw.randint(0, max(prompt - 1, 0) // size)
                self.running[seat] = SimpleNamespace(done=cached * size, prompt=prompt, own=cached)
        decodes, rows = draw.random() < 0.4, []
        for seat, request in self.running.items():
            left = request.prompt - request.done
            tokens = min(left, draw.choice([1, size, 2 * size + 3])) if left > 0 else 1
            if left <= 0 and request.done % size not in (0, size - 1) and draw.random() < 0.7:
                request.done += (-request.done - 1) % size  # nothing is seen of these tokens
            if not decodes or tokens == 1:
                rows.append((seat, request.done, tokens))
        rows.sort(key=lambda row: row[2] > 1)
        return rows

    def opened(self):
        """int32 [SEATS]; the first page that each reads from its ring."""
        found = torch.zeros(SEATS, dtype=torch.int32)
        for seat, request in self.running.items():
            found[seat] = max(request.own, request.done // self.page - self.kept)
        return found

    def end(self, rows):
        for seat, before, tokens in rows:
            self.running[seat].done = before + tokens
            if before + tokens >= TABLE * self.page - self.page or self.draw.random() < 0.05:
                del self.running[seat]


def describe(rows, tables, page):
    """The tensors of ``DeviceRows``, with a row of padding."""
    seats = [seat for seat, *_ in rows] + [-1]
    counts = [tokens for *_, tokens in rows] + [1]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lens = torch.tensor([before + tokens for _, before, tokens in rows] + [7]).int()
    slots = [
        int(tables[seat, place // page]) * page + place % page
        for seat, before, tokens in rows
        for place in range(before, before + tokens)
    ]
    count = len(seats)
    given = {
        "seats": torch.tensor(seats).int(),
        "prefilling": torch.zeros(count, dtype=torch.int32),
        "query_start": starts,
        "seq_lens": lens,
        "slot_mapping": torch.tensor([*slots, -1]),
        "block_table": tables[torch.tensor(seats)],
    }
    names = "choosers", "fresh", "dense_lens", "certain"
    return given | {name: torch.zeros(count, dtype=torch.int32) for name in names}


def life(device, *, codec, kept, page, kv_heads, head_size, dtype, steps=16, seed=0):
    """Step for step what the specification does."""
    torch.manual_seed(seed)
    shape, capacity, codec = (kv_heads, page, head_size, dtype), 5, CODECS[codec]
    sides = [
        Layer(ops, where, codec, kept, capacity, shape)
        for ops, where in ((reference, "cpu"), (kernels, device))
    ]
    requests = Requests(page, kept, seed)
    filled = single = dropped = copied = 0
    for number in range(steps):
        rows, opened = requests.rows(), requests.opened()
        if not rows:
            continue
        given = describe(rows, requests.tables, page)
        tokens = len(given["slot_mapping"])
        fused = torch.randn(tokens + 2, 2 * kv_heads + 1, head_size) * 3
        fused[:, :kv_heads] *= torch.randn(head_size).exp()
        if number % 5 == 0:
            draw = requests.draw
            fused[draw.randrange(tokens), draw.randrange(2 * kv_heads)] = float("inf")
            fused[draw.randrange(tokens), :, 1] = 0.0
        key, value, _ = fused.to(dtype).split((kv_heads, kv_heads, 1), 1)
        recalls, waves = choose(requests, rows, kv_heads, capacity)
        held = sides[0].residency.held.clone()
        for side in sides:
            side.step(given, key[:tokens], value[:tokens], opened, recalls, waves)
        for expected, actual in zip(sides[0].state(), sides[1].state(), strict=True):
            assert torch.equal(expected, actual), f"step {number}"
        same_records(*(side.built for side in sides))
        untouched = torch.ones(held.numel(), dtype=torch.bool)
        untouched[recalls[2].long()] = False
        dropped += int((sides[0].residency.held != held).flatten()[untouched].sum())
        single += sum(count == 1 for *_, count in rows)
        filled += sum((before + n) // page - before // page for _, before, n in rows)
        copied += int((recalls[0] >= opened[recalls[2] // capacity // kv_heads]).sum())
        requests.end(rows)
    assert min(filled, single, dropped, copied) > 1, "all kinds of steps"


def choose(requests, rows, kv_heads, capacity):
    """Pages to be recalled into some slots of each row, and contexts to be staged, of all rows."""
    draw, held, sources, targets = requests.draw, [], [], []
    for seat, before, tokens in rows:
        if tokens > 1:
            continue
        for head in range(kv_heads):
            pages = before // requests.page + 1
            wanted = draw.sample(range(pages), min(pages, draw.randint(1, 3)))
            into = draw.sample(range(capacity), len(wanted))
            held += wanted
            sources += [int(requests.tables[seat, p]) * kv_heads + head for p in wanted]
            targets += [(seat * kv_heads + head) * capacity + slot for slot in into]
    lengths = [before for _, before, _ in rows] + [0]
    starts, size = [0], requests.page
    for length in lengths[:-1]:
        starts.append(starts[-1] + -(-length // size))
    numbers = (torch.tensor(n, dtype=torch.int32) for n in (held, sources, targets))
    return tuple(numbers), tuple(torch.tensor(n).int() for n in (lengths, starts))
