"""From what a client sends to the pages that its request attends to, whatever the client sends.

Between the two lie the front end's validation, the table of requests, the metadata of a step and
the kernel; the engine's state has the size that the worker gives it.
"""

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.spec import ops as reference
from tests.support.steps import Runner, metadata_builder, request_table, split
from vllm_kvretrieval.engine.running import Note
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import (
    Chooser,
    DecodeRows,
    IndexRecords,
    Mode,
    Selection,
    cpu,
)
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.retrieval.families import HeadMethod
from vllm_kvretrieval.retrieval.heads import EVERYTHING
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.pooling import Pooling

HEADS, HEAD_SIZE, REQUESTS = 2, 64, 2
PAGES = 128  # of the longest context
ENGINES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "pages of 16": {"budget": 1024, "page_size": 16},
    "small": {"budget": 512},
    "no sink": {"budget": 512, "sink": 0},
    "given sink": {"budget": 2048, "sink": 96},
    "given window": {"budget": 2048, "window": 512},
    "both": {"budget": 1024, "sink": 32, "window": 32},
    "large sink": {"budget": 4064, "sink": 3584},
    "raised": {"budget": 512, "max_budget": 3072},
    "streamingllm": {"budget": 1024, "method": "streamingllm"},
    "uneven": {"budget": 1024, "budget_shares": [[0, 1], [3.7, 0.9], [1, 1]]},
    "all to one": {"budget": 512, "budget_shares": [[0, 0], [0, 9], [0, 0]]},
    "by head": {"budget": 512, "method": "razor", "heads": [[0, 0], [0, 1], [1, 0]]},
    "uneven and given": {"budget": 2048, "sink": 96, "budget_shares": [1, 2.5, 3]},
}
LAYERS, LAYER = 3, slice(2, 4)
"""The layers of a model, and the KV heads of the layer that exists."""


class Engine:
    """The part of an engine between a request and its page list, with one layer."""

    def __init__(self, method: str = "freekv", **options: Any) -> None:
        self.config = RetrievalConfig.from_options(method, options)
        self.runner = Runner()
        fixed = {
            name: EVERYTHING * torch.tensor(m.heads.flags, dtype=torch.int32).flatten()
            for name, m in self.config.methods.items()
            if isinstance(m, HeadMethod)
        }
        longest = PAGES * self.config.page_size
        self.table = request_table(
            self.config, REQUESTS, [HEADS] * LAYERS, self.runner, longest, fixed=fixed
        )
        self.builder = metadata_builder(self.table, HEADS)
        page_size = self.config.page_size
        # As in RetrievalCPUWorker._choosers.
        shape: dict[str, Any] = {"kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32}
        store = IndexRecords.empty(
            MinMax(),
            pages=REQUESTS * PAGES,
            page_size=page_size,
            entry_tokens=self.config.own.entry_tokens,
            **shape,
        )
        most, counts = self.table.room.most_chosen(LAYER), self.table.selected
        counts = None if counts is None else counts[:, LAYER]
        selection = Selection.empty(
            seats=REQUESTS, group=1, most_selected=most, counts=counts, **shape
        )
        selection.query.zero_()  # what nobody has written is not compared
        self.chooser = Chooser(store, selection, Pooling.MEAN_SOFTMAX, 0.125)
        self.random = torch.Generator().manual_seed(0)
        bounds = torch.empty(*store.records.shape[:2], 2, HEAD_SIZE)
        bounds.normal_(generator=self.random)
        bounds = bounds.sort(dim=2).values  # minimum, maximum
        store.records.copy_(bounds.flatten(2).view(torch.uint8))
        self.twin = copy.deepcopy(self.chooser)
        self.twin.selection.counts = counts

    def step(self, lens: list[int]) -> None:
        """One decode step."""
        got = split(self.builder, lens)
        for plan in [] if got is None else got.decode:
            self.plan(plan.rows)

    def plan(self, rows: DecodeRows) -> None:
        """The kernel's page lists are the reference's, and are well formed."""
        rows.lists.fill_(-1)
        query = torch.randn(len(rows), HEADS, HEAD_SIZE, generator=self.random)
        cpu.plan_decode(query, rows, self.chooser)
        lists = rows.lists.clone()
        rows.lists.fill_(-1)
        reference.plan_decode(query, rows, self.twin)
        assert torch.equal(lists, rows.lists)
        ours, expected = self.chooser.selection, self.twin.selection
        assert torch.equal(ours.chosen, expected.chosen)
        assert torch.equal(ours.query, expected.query)
        for unit, units in enumerate(lists):
            row, head = divmod(unit, HEADS)
            attended = units[units >= 0]
            assert (attended % HEADS == head).all()
            positions = attended // HEADS - rows.block_table[row, 0]
            tokens = int(rows.seq_lens[row])
            pages = -(-tokens // self.config.page_size)
            sink, window, select = (int(t[row]) for t in (rows.sink, rows.window, rows.select))
            assert (positions.diff() > 0).all(), "each page once, in order"
            counts, given = self.chooser.selection.counts, rows.mode[row] == Mode.GIVEN
            if counts is not None and (given or select > 0):
                share = counts[rows.seats[row], head]
                assert abs(int(share) - self.share(head) * (1 if given else select)) < 1
                select = min(int(share), pages - sink - window)
            count = sink + select + window
            assert len(positions) == count
            most = max(self.config.budget_limit, tokens)
            assert count * self.config.page_size <= most or counts is not None
            assert positions[:sink].tolist() == list(range(sink))
            assert positions[count - window :].tolist() == list(range(pages - window, pages))

    def share(self, head: int) -> float:
        """The share of a KV head of the layer; the mean of all heads is 1."""
        if self.config.heads:
            return self.config.heads[1][head] * EVERYTHING
        given = [n if isinstance(n, list) else [n] * HEADS for n in self.config.budget_shares]
        return given[1][head] * HEADS * LAYERS / sum(map(sum, given))

    def run(self, options: list[dict[str, Any]]) -> None:
        """Requests with these options, each beside the one before, over their budgets and not."""
        self.table.release(list(self.runner.notes))
        self.runner.notes.clear()
        for i, own in enumerate(options):
            names = [f"r{max(i - 1, 0)}", f"r{i}"]
            self.table.release({f"r{i - 2}"})
            self.runner.batch(*dict.fromkeys(names), **{names[-1]: own})
            longest = PAGES * self.config.page_size
            for length in (longest - 2, longest - 1):
                self.step([length, length - 3 * self.config.page_size][: len(set(names))])


def admissible(config: RetrievalConfig, method: str) -> list[dict[str, Any]]:
    """Options with every budget that a request may ask for."""
    options = []
    for budget in range(1, config.budget_limit + 2):
        own = {"budget": budget, "method": method}
        try:
            RequestOptions.parse({"kv_retrieval": own}, config)
        except RetrievalConfigError:
            continue
        options.append(own)
    return options


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES.keys())
def test_every_admissible_budget(options):
    """A smaller budget may select more pages: sink and window are rounded down to pages."""
    engine = Engine(**options)
    for method in {engine.config.method, "streamingllm"}:
        requests = admissible(engine.config, method)
        assert len(requests) >= 2
        assert requests[-1]["budget"] == engine.config.budget_limit
        engine.run(requests)


def test_a_smaller_budget_may_select_more():
    """The premise of the tests above: sizes of state must consider smaller budgets, too."""
    config = RetrievalConfig.from_options("freekv", {})
    assert config.page_budget(2016).select == 57 > config.page_budget(2048).select == 56
    assert config.most_selected["freekv"] == 57


WORDS = ("budget", "correction_threshold", "exact", "method", "sink", "page_size")
NUMBERS = st.one_of(
    st.integers(-64, 5000),
    st.integers(0, 160).map(lambda pages: 32 * pages),
    st.floats(),
    st.integers(),
)
VALUES = st.one_of(
    NUMBERS,
    st.booleans(),
    st.none(),
    st.sampled_from(["freekv", "streamingllm", "quest", "", "512", "true"]),
    st.text(max_size=5),
    st.lists(NUMBERS, max_size=3),
)
XARGS = st.one_of(
    st.dictionaries(st.sampled_from(WORDS).map("kv_retrieval_{}".format), VALUES, max_size=4),
    st.fixed_dictionaries({"kv_retrieval": st.dictionaries(st.sampled_from(WORDS), VALUES)}),
    st.dictionaries(st.text(max_size=20), VALUES, max_size=3),
    st.fixed_dictionaries({"kv_retrieval": VALUES}),
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(ENGINES)), xargs=st.lists(XARGS, min_size=1, max_size=3))
def test_whatever_a_client_sends(name, xargs):
    """It is refused in words, or attends to pages of its own context, within the limit."""
    engine = ENGINE_OF.setdefault(name, Engine(**ENGINES[name]))
    accepted, messages = [], list[str]()
    for own in xargs:
        try:
            options = RequestOptions.parse(own, engine.config)
        except RetrievalConfigError as error:
            messages.append(str(error))
            continue
        assert options.budget.total * engine.config.page_size <= engine.config.budget_limit
        accepted.append(own)
    ours = "kv_retrieval", "options of a request: "  # the latter of a name that is misspelt
    assert all(message.startswith(ours) for message in messages)
    for own in accepted:
        engine.table.release({"r0"})
        engine.runner.notes["r0"] = Note(own, prompt=0, tokens=0)
        engine.runner.batch("r0")
        longest = PAGES * engine.config.page_size
        for length in (longest - 2, longest - 1):
            engine.step([length])


ENGINE_OF: dict[str, Engine] = {}
