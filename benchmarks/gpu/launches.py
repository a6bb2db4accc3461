"""Launches of every kernel, with the sizes that are served, for benchmarks.gpu.compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import (
    RECORD_ALIGNMENT,
    DevicePlan,
    DeviceRequests,
    DeviceRows,
)
from vllm_kvretrieval.kernels.encoded import EncodedUnits
from vllm_kvretrieval.kernels.slots import DecodeWorkspace, Origins, Recalls, Residency, Traffic
from vllm_kvretrieval.kernels.triton.index import build_entries, grows
from vllm_kvretrieval.kernels.triton.mass import cut_lists
from vllm_kvretrieval.kernels.triton.one_bit import score_bits
from vllm_kvretrieval.kernels.triton.resolve import MOST_SLOTS
from vllm_kvretrieval.kernels.triton.tokens import pool_tokens, score_tokens
from vllm_kvretrieval.kernels.types import Chooser, IndexRecords, KeptTokens, Selection
from vllm_kvretrieval.retrieval.codec import CODECS
from vllm_kvretrieval.retrieval.codec.quantised import Quantised
from vllm_kvretrieval.retrieval.index.base import Index
from vllm_kvretrieval.retrieval.index.bounding import Bounding
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.landmark import Landmark
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean import Mean
from vllm_kvretrieval.retrieval.index.mean_std import MeanStd
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.index.one_bit import OneBit
from vllm_kvretrieval.retrieval.index.representative import Representative
from vllm_kvretrieval.retrieval.pooling import Pooling
from vllm_kvretrieval.retrieval.presets import presets

HEAD_SIZES = tuple(range(16, 257, 16))
COMMON = 128
"""The head size of what is compiled for one only."""
ONE_HEAD = "one KV head"
"""Names launches of layers with one; to Triton a number that is 1 is a constant."""
DTYPES = (torch.bfloat16, torch.float16)
CAPACITIES = (128, 256, 1024)
CONTEXTS = (1024, 4096, 65536)
"""Pages; 4096 are 128K tokens, and more are ranked in tiles."""
INDEXES = (MinMax(), Mean(), MeanStd(), LowRank(), Bounding(), Representative(), Exact())
PAGE = 32
MARKED, OUTLIERS = 8, 0.158
"""Tokens of an entry of ShadowKV, and its share of outliers."""
LONG_PAGE, CODEC = 128, "k8v4"
"""Pages and codec of TTKV."""
QUANTISED = tuple(name for name, codec in CODECS.items() if isinstance(codec, Quantised))
"""Codecs that have kernels."""
OPEN_PAGES = 5
"""Of a request, that are not yet encoded."""
DROPPING, DROPPED_SIZES, BUDGET = ("h2o", "tova", "raas"), (64, 128, 256), 2048
"""Methods whose steps drop tokens, head sizes that these are compiled for, and their budget."""
PER_LAYER = "tova"
"""The one that drops the same tokens in all KV heads."""
KV_HEADS, GROUP = 8, 4


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Calls of the ops that cover every kernel and head size, under the names of the results.

    The last launch of a call is the one that it is about.
    """
    for head_size in HEAD_SIZES:
        size = f"d{head_size}"
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            yield f"sparse_decode {size} {name}", partial(_decode, head_size, dtype)
        yield f"sparse_decode far {size}", partial(_decode, head_size, far=True)
        yield f"recall_units {size}", partial(_recall, head_size)
        yield f"stage_context {size}", partial(_stage, head_size)
        for index in INDEXES:
            name = f"{index.name} {size}"
            step = Step(index, head_size)
            if step.grows:
                yield f"write_kv {name}", step.write
            elif step.builds:
                yield f"index {name}", step.build
            else:
                yield f"write_kv {size}", step.write
            if step.builds and head_size == COMMON:
                yield f"index_pages {name}", step.build_pages
            yield f"plan_decode {name}", step.select
            if head_size == COMMON:
                yield f"select_ahead {name}", step.select_ahead
        step = Step(OneBit(), head_size)
        yield f"index one_bit {size}", step.build
        yield f"scores one_bit tokens {size}", step.score_tokens
        yield f"scores exact tokens {size}", Step(Exact(), head_size, entry=1).score_tokens
    for shared in (False, True):
        step = Step(Exact(), COMMON, entry=1) if shared else Step(OneBit(), COMMON)
        name = "tokens of all heads" if shared else "tokens"
        yield f"pool {name}", partial(step.pool_tokens, shared=shared)
        yield f"rank {name}", step.filter_tokens if shared else step.plan_tokens
    yield "list_kept", Step(Exact(), COMMON).list_kept
    for name in DROPPING:
        yield f"drop_tokens {name}", partial(_drop, name)
    yield "drop_tokens of several workers", partial(_drop, PER_LAYER, workers=True)
    yield "receive_tokens", _receive
    for head_size in DROPPED_SIZES:
        scored = partial(_decode, head_size, page=1, scored=BUDGET)
        yield f"sparse_decode tokens scored d{head_size}", scored
    yield f"sparse_decode tokens d{COMMON}", partial(_decode, COMMON, page=1)
    for listed in (0, BUDGET):
        name = f"sparse_decode far tokens{' scored' if listed else ''} d{COMMON}"
        yield name, partial(_decode, COMMON, page=1, far=True, scored=listed)
    for name, width in (("", BUDGET), (" of long lists", CONTEXTS[-1])):
        held = partial(_resolve, MOST_SLOTS, False, in_place=True, page=1, width=width)
        yield f"resolve tokens{name} C{MOST_SLOTS}", held
    yield "list_kept positions", partial(Step(Exact(), COMMON).list_kept, positions=True)
    for shared in (False, True):
        step = Step(Exact(), COMMON, entry=1) if shared else Step(OneBit(), COMMON)
        lists = step.filter_tokens if shared else step.plan_tokens
        name = "tokens of all heads" if shared else "tokens"
        yield f"rank {name} positions", partial(lists, positions=True)
    for splits in (8, 32):
        yield f"sparse_decode of {splits} parts d{COMMON}", partial(_decode, COMMON, splits=splits)
    yield "sparse_decode sinks d64", partial(_decode, 64, sinks=True)  # gpt-oss
    for head_size in (128, 256):  # Gemma 2
        yield f"sparse_decode softcap d{head_size}", partial(_decode, head_size, softcap=50.0)
    for capacity in CAPACITIES:
        yield f"resolve C{capacity}", partial(_resolve, capacity, False)
        yield f"resolve in place C{capacity}", partial(_resolve, capacity, False, in_place=True)
        yield f"resolve_ahead C{capacity}", partial(_resolve, capacity, True)
    yield "prepare_rows", lambda: kernels.prepare_rows(_rows(), _requests(), PAGE)
    for pages in CONTEXTS[::2]:
        step, name = Step(MinMax(), COMMON), f"{MinMax().name} of {pages} pages d{COMMON}"
        yield f"plan_decode {name}", partial(step.select, pages)
        yield f"select_ahead {name}", partial(step.select_ahead, pages)
    for pooling in (Pooling.RELATIVE, Pooling.MAX, Pooling.SUM):
        step = Step(MinMax(), COMMON, pooling=pooling)
        yield f"plan_decode {pooling.name.lower()} d{COMMON}", step.select
    for head_size in HEAD_SIZES:
        step, name = _marked(head_size), f"{Landmark().name} d{head_size}"
        yield f"index {name}", step.build
        yield f"plan_decode {name}", step.select
    yield f"select_ahead {Landmark().name} d{COMMON}", _marked(COMMON).select_ahead
    for pages in CONTEXTS[::2]:
        name = f"{Landmark().name} of {pages} pages d{COMMON}"
        yield f"plan_decode {name}", partial(_marked(COMMON).select, pages)
    step = Step(Mean(), COMMON)
    yield f"cut {CONTEXTS[1]} pages", step.cut
    step = Step(MinMax(), COMMON)
    yield f"plan_decode positions d{COMMON}", partial(step.select, positions=True)
    for head_size in HEAD_SIZES:
        yield from _calls_of_codec(CODEC, head_size)
    for codec in (name for name in QUANTISED if name != CODEC):
        for name, call in _calls_of_codec(codec, COMMON, PAGE):
            if not name.startswith("keep_open"):  # which encodes nothing
                yield name, call
    yield f"update_index {MinMax().name} d{COMMON}", Step(MinMax(), COMMON).update
    yield from _calls_of_one_head()


def _calls_of_one_head() -> Iterator[tuple[str, Callable[[], None]]]:
    """Of every kernel that is told the number of KV heads."""
    kept = f"{ONE_HEAD} d{COMMON}"
    step, capacity = Step(MinMax(), COMMON, kv_heads=1), CAPACITIES[1]
    yield f"sparse_decode {kept}", partial(_decode, COMMON, DTYPES[0], kv_heads=1)
    yield f"write_kv {MinMax().name} {kept}", step.write
    yield f"plan_decode {MinMax().name} {kept}", step.select
    yield f"index {Mean().name} {kept}", Step(Mean(), COMMON, kv_heads=1).build
    yield f"list_kept {ONE_HEAD}", Step(Exact(), COMMON, kv_heads=1).list_kept
    yield f"drop_tokens {ONE_HEAD}", partial(_drop, DROPPING[0], kv_heads=1)
    yield from _calls_of_codec(CODEC, COMMON, kv_heads=1)
    for name, ahead in (("resolve", False), ("resolve_ahead", True)):
        yield f"{name} C{capacity} {ONE_HEAD}", partial(_resolve, capacity, ahead, kv_heads=1)


def _marked(head_size: int) -> Step:
    """A layer of ShadowKV, whose entries are half a page."""
    pooling, tokens = Pooling.MAX_SOFTMAX, MARKED
    return Step(
        Landmark(), head_size, 128, pooling, entry=tokens, page=2 * tokens, outliers=OUTLIERS
    )


def _calls_of_codec(
    codec: str, head_size: int, page: int = LONG_PAGE, kv_heads: int = KV_HEADS
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Of the kernels of an encoded home."""
    row = 2 * head_size
    shape = 1, OPEN_PAGES, kv_heads, page, row
    nbytes = CODECS[codec].unit_bytes(page, head_size, torch.bfloat16)
    store = EncodedUnits(
        CODECS[codec],
        torch.empty(1, kv_heads, nbytes, dtype=torch.uint8),
        torch.empty(shape, dtype=torch.bfloat16),
        torch.empty(1, dtype=torch.int32),
    )
    residency = _residency(CAPACITIES[0], kv_heads)
    slots = torch.empty(kv_heads * CAPACITIES[0], page, row, dtype=torch.bfloat16)
    tokens = torch.empty(1, kv_heads, head_size, dtype=torch.bfloat16)
    recalls, buffer = Recalls.empty(16, "cpu"), store.open[0]
    numbers = torch.empty(1, dtype=torch.int32)
    of_rows = numbers[:, None], numbers, numbers, numbers
    name = f"{codec} d{head_size}" if kv_heads > 1 else f"{codec} {ONE_HEAD} d{head_size}"
    yield (
        f"write_open {name}",
        partial(kernels.write_open, tokens, tokens, _rows(), store, residency),
    )
    yield f"keep_open {name}", partial(kernels.keep_open, tokens, tokens, _rows(), store)
    if codec == CODEC and page == LONG_PAGE and head_size == COMMON:
        for index in INDEXES:
            if not index.grows and not index.reads_keys:
                built = Step(index, head_size, kv_heads=kv_heads, entry=page, page=page).records
                opened = partial(kernels.index_open, tokens, _rows(), store, built)
                yield f"index_open {index.name} {name.removeprefix(f'{codec} ')}", opened
    yield (
        f"recall_encoded {name}",
        partial(kernels.recall_encoded, store, slots, residency, recalls),
    )
    yield f"stage_encoded {name}", partial(kernels.stage_encoded, store, buffer, *of_rows)


def _slots(
    head_size: int, dtype: torch.dtype = torch.bfloat16, kv_heads: int = KV_HEADS
) -> torch.Tensor:
    return torch.empty(kv_heads, PAGE, 2 * head_size, dtype=dtype)


def _decode(
    head_size: int,
    dtype: torch.dtype = torch.bfloat16,
    kv_heads: int = KV_HEADS,
    *,
    page: int = PAGE,
    splits: int = 4,
    far: bool = False,
    sinks: bool = False,
    softcap: float = 0.0,
    scored: int = 0,
) -> None:
    query = torch.empty(1, kv_heads * GROUP, head_size, dtype=dtype)
    rows = {"rows": kv_heads, "group": GROUP, "head_size": head_size}
    lists, slots = torch.empty(kv_heads, 64, dtype=torch.int32), _slots(head_size, dtype, kv_heads)
    kernels.sparse_decode(
        query,
        slots.view(-1, page, 2 * head_size),
        lists,
        torch.empty(kv_heads, dtype=torch.int32),
        head_size**-0.5,
        query,
        torch.empty(kv_heads, GROUP),
        DecodeWorkspace.empty(**rows, splits=splits, device="cpu"),
        sinks=torch.empty(kv_heads * GROUP, dtype=dtype) if sinks else None,
        softcap=softcap,
        scores=torch.empty(kv_heads, GROUP, scored) if scored else None,
        origins=Origins(slots[None], lists, beyond=page == 1) if far else None,
    )


def _kept(kv_heads: int) -> KeptTokens:
    shape = 1, kv_heads, BUDGET
    counts = torch.empty(2, 1, kv_heads, dtype=torch.int32)
    return KeptTokens(torch.empty(shape, dtype=torch.int32), torch.empty(shape), *counts)


def _drop(name: str, kv_heads: int = KV_HEADS, *, workers: bool = False) -> None:
    keeping = presets()[name].keeping
    assert keeping is not None
    scores = torch.empty(kv_heads, GROUP, BUDGET)
    received = torch.empty(1, BUDGET) if workers else None
    given = scores, scores[..., 0].contiguous(), _rows(), 0, _kept(kv_heads)
    kernels.drop_tokens(*given, keeping, received=received)


def _receive(kv_heads: int = KV_HEADS) -> None:
    scores = torch.empty(kv_heads, GROUP, BUDGET)
    given = scores, scores[..., 0].contiguous(), _rows(), 0, _kept(kv_heads)
    kernels.receive_tokens(*given, torch.empty(1, BUDGET))


def _recall(head_size: int) -> None:
    units = torch.empty(16, dtype=torch.int32)
    count = torch.empty(1, dtype=torch.int32)
    kernels.recall_units(_slots(head_size)[None], _slots(head_size), units, units, count)


def _stage(head_size: int) -> None:
    home, numbers = _slots(head_size)[None], torch.empty(1, dtype=torch.int32)
    kernels.stage_context(home, home, numbers[:, None], numbers, numbers)


def _rows(pages: int = 1) -> DeviceRows:
    """A row of a context of so many pages."""
    one = torch.empty(1, dtype=torch.int32)
    table = torch.empty(1, pages, dtype=torch.int32)
    starts, slots = torch.empty(2, dtype=torch.int32), torch.empty(1, dtype=torch.int64)
    return DeviceRows(one, one, starts, one, slots, table, one, one, one, one)


def _requests() -> DeviceRequests:
    return DeviceRequests.empty(1, "cpu")


def _residency(capacity: int, kv_heads: int = KV_HEADS) -> Residency:
    step = torch.empty(1, dtype=torch.int32)
    traffic = torch.empty(1, len(Traffic), dtype=torch.int64)
    return Residency.empty(kv_heads=kv_heads, slots=capacity, step=step, traffic=traffic)


def _resolve(
    capacity: int,
    ahead: bool,
    kv_heads: int = KV_HEADS,
    *,
    in_place: bool = False,
    page: int = PAGE,
    width: int | None = None,
) -> None:
    width = width or capacity // 2
    step = Step(MinMax(), 128, width, kv_heads=kv_heads)
    recalls = Recalls.empty(kv_heads * width, "cpu")
    lists = torch.empty(kv_heads, width, dtype=torch.int32)
    residency = _residency(capacity, kv_heads)
    if ahead:
        of_row = step.chooser.selection, _rows(), _requests()
        kernels.resolve_ahead(*of_row, residency, recalls, lists, PAGE)
    else:
        tokens = torch.empty(1, kv_heads, COMMON, dtype=torch.bfloat16)
        slots = torch.empty(kv_heads * capacity, page, 2 * COMMON, dtype=torch.bfloat16)
        home = torch.empty(1, kv_heads, PAGE, 2 * COMMON, dtype=torch.bfloat16)
        missing = Origins(home, lists, beyond=width > capacity) if in_place else recalls
        plan = step.plan(1, positions=True)
        kernels.resolve(tokens, tokens, plan, _rows(), residency, missing, slots, lists)


class Step:
    """A layer of one method, and calls of the ops of its decode step."""

    def __init__(
        self,
        index: Index,
        head_size: int,
        width: int = 64,
        pooling: Pooling = Pooling.MEAN_SOFTMAX,
        kv_heads: int = KV_HEADS,
        entry: int = PAGE,
        page: int = PAGE,
        outliers: float = 0.0,
    ) -> None:
        cache = torch.empty(1, kv_heads, page, 2 * head_size, dtype=torch.bfloat16)
        shape = {"kv_heads": kv_heads, "head_size": head_size, "dtype": torch.bfloat16}
        store = IndexRecords.empty(
            index,
            pages=1,
            page_size=page,
            entry_tokens=entry,
            cache=cache,
            layout="token_major",
            alignment=RECORD_ALIGNMENT,
            **shape,
        )
        selection = Selection.empty(seats=1, group=GROUP, most_selected=width, **shape)
        self.chooser = Chooser(store, selection, pooling, 1.0, outliers=outliers)
        self._cache, self._store, self._width = cache, store, width
        self._query = selection.query

    def plan(self, pages: int, positions: bool = False) -> DevicePlan:
        """An empty plan for a row with a number of pages."""
        return DevicePlan.empty(
            rows=1,
            kv_heads=self._store.kv_heads,
            group=GROUP,
            entries=pages * self._store.parts,
            width=self._width,
            programs=16,
            device="cpu",
            positions=positions,
            outliers=self.chooser.outliers > 0,
        )

    @property
    def records(self) -> IndexRecords:
        """The index, without a cache."""
        return replace(self._store, cache=None)

    def update(self) -> None:
        """An index that grows, and no cache."""
        keys = self._query[:, : self._store.kv_heads]
        kernels.update_index(keys, _rows().slot_mapping, self._store)

    def write(self) -> None:
        """The cache, and an index that grows."""
        tokens = self._query[:, : self._store.kv_heads]
        indexes = [self._store] if grows(self._store) else []
        kernels.write_kv(tokens, tokens, _rows().slot_mapping, self._cache, indexes)

    @property
    def grows(self) -> bool:
        """Whether records grow with each key."""
        return grows(self._store)

    @property
    def builds(self) -> bool:
        """Whether there are records."""
        return self._store.records.shape[2] > 0

    def build(self) -> None:
        """Records of entries that are complete."""
        build_entries(_rows().slot_mapping, self._store)

    def build_pages(self) -> None:
        """Records of pages that arrived by other means."""
        kernels.index_pages(torch.zeros(1, dtype=torch.int32), self._store)

    def score_tokens(self) -> None:
        """The first launch of `plan_tokens`, or of `filter_tokens`."""
        score = score_bits if self.builds else score_tokens
        score(self._query, _rows(), _requests(), 0, self._store, 1.0, self.plan(CONTEXTS[1]))

    def pool_tokens(self, *, shared: bool) -> None:
        """The second launch of `plan_tokens`, or of `filter_tokens`."""
        plan, pooling = self.plan(CONTEXTS[1]), int(self.chooser.pooling)
        pool_tokens(_rows(), _requests(), 0, self._store, plan, pooling, shared=shared)

    def plan_tokens(self, *, positions: bool = False) -> None:
        """Its last launch."""
        plan = self.plan(CONTEXTS[1], positions)
        kernels.plan_tokens(self._query, _rows(), _requests(), {0: self.chooser}, plan)

    def filter_tokens(self, *, positions: bool = False) -> None:
        """Its last launch."""
        given = self._query, _rows(), _requests(), 0, (), self._store, 1.0
        kernels.filter_tokens(*given, self.plan(CONTEXTS[1], positions))

    def list_kept(self, *, positions: bool = False) -> None:
        """Tokens that are kept of prompts."""
        held = self.chooser.selection
        counts = torch.empty(1, self._store.kv_heads, dtype=torch.int32)
        held = replace(held, counts=counts, ends=torch.empty(1, dtype=torch.int32))
        plan = self.plan(1, positions)
        kernels.list_kept(_rows(CONTEXTS[1]), _requests(), (0,), (1,), held, PAGE, plan)

    def cut(self) -> None:
        """What a mass needs of a selection."""
        cut_lists(_rows(), _requests(), 0, self.chooser, self.plan(CONTEXTS[1]))

    def select(self, pages: int = CONTEXTS[1], positions: bool = False) -> None:
        """Scores and selection before attention."""
        plan = self.plan(pages, positions)
        kernels.plan_decode(self._query, _rows(pages), _requests(), [self.chooser], plan)

    def select_ahead(self, pages: int = CONTEXTS[1]) -> None:
        """The same beside it."""
        kernels.select_ahead(_rows(pages), _requests(), 0, self.chooser, self.plan(pages))
