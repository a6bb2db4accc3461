"""Houses of many methods: each request gets its own, whatever its company has.

A house is an engine that serves many methods, named in ``also``. Every property below holds for
every method of every house: a new method enters by one line of :data:`HOUSES`. What a method
selects, drops or shares is held against its paper in a module of its own.

A small Llama with random weights, in float32: what matters here is whose pages and whose method a
request gets, and rounding would only blur that.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest

from tests.support.engine import (
    Request,
    alone,
    assert_resumed,
    assert_same,
    by,
    difference,
    drive,
    engine,
    model_of,
    preemptions,
    prompt,
    random_llama,
)
from tests.support.outside import MEDIAN, POINTS, install, installed
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.presets import OWN, presets

pytestmark = pytest.mark.engine

LAYERS, KV_HEADS = 4, 4
BUDGET = 160
SEQUENCES = 4
CHUNK = 256  # tokens per step
BLOCK = 128
STOCK: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": SEQUENCES,
    "max_num_batched_tokens": CHUNK,
    "num_gpu_blocks_override": 26,  # one of them vLLM's own
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}
PARTS = {"budget": BUDGET, "sink": 32, "window": 32, "attention": "own"}  # pages: 1, 1, and 3
TOLERANCE = 1e-3
HEADS = [[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0]]
"""Retrieval heads, of the layers that are not dense."""


@dataclass
class House:
    """An engine with many methods.

    Attributes:
        method: Its own.
        also: The other methods' options.
        options: What its own method has beside the parts of the budget.
        near_ties: What it may change that a query which is rounded otherwise, in another batch,
            selects another token that is nearly as good.
        read_anew: Methods that observe all of a prompt, and read no cached prefix.
        resumed: Methods that are preempted by `make test`: those with a state of a request.
        twins: Two methods that attend to the same.
    """

    method: str
    also: dict[str, dict[str, Any]]
    options: dict[str, Any]
    resumed: tuple[str, ...]
    near_ties: float = TOLERANCE
    read_anew: tuple[str, ...] = ()
    twins: tuple[str, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods, the engine's own first."""
        return self.method, *self.also

    def assert_same(self, answer, expected):
        """Compare up to rounding and near ties."""
        assert answer.tokens == expected.tokens
        changes = [abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True)]
        assert max(changes) < 5 * self.near_ties
        assert sum(change > self.near_ties for change in changes) <= len(changes) // 20


MINE = ("kvretrieval", "full", "kivi", "kvquant", "ttkv", "razor")
HOUSES = {
    "pages": House(
        "kvretrieval",
        {
            **{
                name: {}
                for name, preset in OWN.items()
                if preset.unit == "page" and name not in MINE
            },
            "twilight": {"mass": 0.3},
            "reranked": {"index": "mean", "rerank": 2},
            "fine": {"summary_size": 16, "schedule": "speculative"},
            "toy": {},
            "peaks": {"index": "peak", "pooling": "max"},
            "ruled": {},
        },
        {},
        resumed=("kvretrieval", "freekv", "toy", "ruled"),
        twins=("peaks", "ruled"),
    ),
    # As on most CPUs by default, with so large a remainder that random weights have one, too.
    "small pages": House(
        "kvretrieval",
        {
            "without": {"preset": "kvretrieval", "remainder": 0.0},
            "narrow": {"preset": "kvretrieval", "mass": 0.3},
            "streamingllm": {},
        },
        {**(presets()["kvretrieval"].finer or {}), "remainder": 0.05},
        resumed=("kvretrieval", "narrow"),
    ),
    "tokens": House(
        "fier",
        {
            "reusing": {
                "preset": "fier",
                "schedule": "speculative",
                "correction_threshold": -1.0,
            },
            "finer": {"preset": "fier", "summary_size": 16},
            "one_bit": {"unit": "page"},
            "freekv": {},
            "quest": {},
            "razor": {"heads": HEADS},
            **{name: {} for name in ("snapkv", "h2o", "tova", "raas", "entropykv")},
            "even": {"preset": "entropykv", "observation": 32, "budget_shares": "uniform"},
            "streamingllm": {},
        },
        {"dense_layers": 1},
        resumed=("fier", "reusing", "razor", "snapkv", "h2o", "raas", "entropykv"),
        near_ties=5e-3,
        read_anew=("h2o", "entropykv"),
    ),
    "shared layers": House(
        "omnikv",
        {"pages": {"preset": "freekv"}, "fier": {}, "streamingllm": {}},
        {"filters": [0]},
        resumed=("omnikv", "pages"),
        near_ties=5e-3,
    ),
}


DOCUMENT = prompt(600, 100)

model = model_of(random_llama, LAYERS, KV_HEADS)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return install(tmp_path_factory.mktemp("package"), MEDIAN, POINTS)


@pytest.fixture(scope="module")
def stock(model):
    """The answers of vLLM without retrieval. Its engine ends before ours starts."""
    with engine(model, **STOCK) as llm:
        short, long = Request(prompt(100, 0), BUDGET - 100), Request(DOCUMENT, 12)
        return {"short": drive(llm, [short])[0], "long": drive(llm, [long])[0]}


@pytest.fixture(scope="module", params=HOUSES)
def house(request):
    return HOUSES[request.param]


@pytest.fixture(scope="module")
def llm(house, model, package, stock):
    options = PARTS | house.options | {"also": house.also, "max_budget": 256}
    with (
        installed(package) if "toy" in house.also else nullcontext(),
        engine(
            model,
            attention_backend=house.method,
            additional_config={"kv_retrieval": options},
            **STOCK,
        ) as llm,
    ):
        yield llm


@pytest.fixture(scope="module")
def computed(llm, house):
    """The answer of each method about the document, alone."""
    return {name: alone(llm, Request(DOCUMENT, 12, by(name))) for name in house.methods}


def test_each_method_attends_to_something_else(computed, house):
    for a, b in combinations(computed, 2):
        assert computed[a].logprobs[0] == pytest.approx(computed[b].logprobs[0], abs=TOLERANCE)
        if {a, b} == {*house.twins}:
            assert computed[a].tokens == computed[b].tokens
            assert computed[a].logprobs == computed[b].logprobs
            continue
        assert difference(computed[a], computed[b]) > 5 * TOLERANCE, (a, b)


def test_a_crowd_of_different_methods(llm, house):
    """More requests than run at once, of different lengths, methods, arrivals and ends."""
    lengths = (600, 60, 1100, 500, 700, 520, 650, 150, 900, 430, 800, 480)
    options = [by(house.methods[i % len(house.methods)]) for i in range(len(lengths))]
    options += [by(method) for method in house.methods[len(lengths) :]]
    options[2] |= {"budget": 128}
    options[4] |= {"budget": 256}
    options[8] |= {"exact": True}
    options[1] = {}
    crowd = [
        Request(prompt(lengths[i % len(lengths)], i), 10 + 5 * (i % 5), own, arrives=4 * i)
        for i, own in enumerate(options)
    ]
    crowd[3].aborts = crowd[3].arrives + 12
    crowd[10].aborts = crowd[10].arrives + 1
    expected = [alone(llm, request) for request in crowd]
    answers = drive(llm, crowd)
    for answer, request, asked in zip(answers, expected, crowd, strict=True):
        if asked.aborts is None:
            house.assert_same(answer, request)
        else:
            assert answer.tokens == request.tokens[: len(answer.tokens)]
            assert len(answer.tokens) < len(request.tokens)
    steps = [{*answer.steps} for answer in answers]
    assert sum(len(a & b) > 3 for a, b in combinations(steps, 2)) > 8, "methods shared steps"


def test_prefix_hits_across_methods(llm, house, computed):
    """The index of each is ready on pages that requests of others have written."""
    llm.reset_prefix_cache()
    writer = house.methods[-1]
    requests = {name: Request(DOCUMENT, 12, by(name), cache=True) for name in house.methods}
    first = drive(llm, [requests[writer]])[0]
    assert first.cached == 0
    house.assert_same(first, computed[writer])
    answers = drive(llm, list(requests.values()))
    for name, answer in zip(requests, answers, strict=True):
        cached = 0 if name in house.read_anew else len(DOCUMENT) // BLOCK * BLOCK
        assert answer.cached == cached, name
        house.assert_same(answer, computed[name])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=str)
def test_preemption(llm, house, every, monkeypatch):
    """Three requests outgrow the cache; the last one, of each method in turn, is resumed.

    See the test of the same name in ``test_batching.py``.
    """
    preempted = preemptions(llm, monkeypatch)
    neighbours = [Request(prompt(n, n), 16, by(house.method)) for n in (1021, 1020)]
    beside = [alone(llm, request) for request in neighbours]
    for name in house.methods if every else house.resumed:
        last = Request(prompt(950, 950), 16, by(name))
        expected = alone(llm, last)
        *others, answer = drive(llm, [*neighbours, last])
        assert [request_id.split("-")[0] for request_id in preempted] == ["2"], name
        preempted.clear()
        for neighbour, request in zip(others, beside, strict=True):
            house.assert_same(neighbour, request)
        assert_resumed(llm, last, answer, expected, 5 * house.near_ties)


def test_exact_and_short_requests_are_stock_vllms(llm, house, stock, computed):
    """All methods do so, beside sparse requests of the same method."""
    crowd = []
    for name in house.methods:
        crowd += [
            Request(prompt(100, 0), BUDGET - 100, by(name)),
            Request(DOCUMENT, 12, by(name, exact=True)),
            Request(DOCUMENT, 12, by(name)),
        ]
    answers = drive(llm, crowd)
    for i, name in enumerate(house.methods):
        short, exact, sparse = answers[3 * i : 3 * i + 3]
        assert_same(short, stock["short"], TOLERANCE)
        assert_same(exact, stock["long"], TOLERANCE)
        house.assert_same(sparse, computed[name])
        assert difference(sparse, stock["long"]) > 10 * TOLERANCE, name


@pytest.mark.parametrize("house", ["pages"], indirect=True)
def test_budgets(llm):
    """Each request attends to as many pages as its own budget has."""
    budgets, steps, heads = (96, 160, 256), 11, (LAYERS - 1) * KV_HEADS
    for name in ("kvretrieval", "quest", "toy"):
        drive(llm, [Request(prompt(40, 0), 1, {})])
        llm.collective_rpc(lambda worker: tuple(worker.requests.take_counts()))
        drive(llm, [Request(DOCUMENT, 12, by(name, budget=budget)) for budget in budgets])
        drive(llm, [Request(prompt(40, 0), 1, {})])
        (counts,) = llm.collective_rpc(lambda worker: worker.requests.take_counts()._asdict())
        assert counts["sparse_steps"] == len(budgets) * steps, name
        assert counts["attended"] == heads * steps * sum(budgets) // 32, name
        assert counts["corrected"] == len(budgets) * steps * heads, name


@pytest.mark.parametrize("house", ["pages"], indirect=True)
def test_masses(llm):
    """Each request attends to the fewest pages that reach its own mass."""

    def attended(**options):
        drive(llm, [Request(prompt(40, 0), 1, {})])
        llm.collective_rpc(lambda worker: tuple(worker.requests.take_counts()))
        answer = alone(llm, Request(DOCUMENT, 12, options))
        drive(llm, [Request(prompt(40, 0), 1, {})])
        (counts,) = llm.collective_rpc(lambda worker: worker.requests.take_counts()._asdict())
        return counts["attended"] / ((LAYERS - 1) * KV_HEADS * 11), answer

    masses = (1, 0.6, 0.3, 1e-6)
    pages, answers = zip(*(attended(mass=mass, budget=256) for mass in masses), strict=True)
    assert pages[0] == 256 / 32
    assert pages[-1] == 3, "sink, window and the best page"
    assert pages[0] > pages[1] > pages[2] > pages[3]
    assert len({answer.logprobs[-1] for answer in answers}) == len(masses)
    crowd = [Request(DOCUMENT, 12, {"mass": mass, "budget": 256}) for mass in masses]
    for answer, expected in zip(drive(llm, crowd), answers, strict=True):
        assert_same(answer, expected, TOLERANCE)


@pytest.mark.parametrize("house", ["pages"], indirect=True)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "method='best' cannot be served .* runs kvretrieval; use one of kvr"),
        ({"method": "mean"}, "method='mean' cannot be served"),
        ({"method": "quest", "correction_threshold": 0.5}, "has no effect with quest"),
        ({"method": "fine", "budget": 288}, "budget=288 exceeds the server's limit of 256"),
        ({"method": "fine", "budget": 64}, "budget=64 is too small"),
        ({"method": "fine", "pooling": "max"}, "of a request has no option 'pooling'"),
        ({"method": "fine", "mass": 0.9}, "mass=0.9 cannot be reached with fine"),
        ({"method": "quest", "mass": 0.9}, "mass=0.9 cannot be reached with quest"),
        ({"method": "streamingllm", "mass": 0.9}, "mass=0.9 has no effect with streamingllm"),
        ({"mass": 0}, "mass=0 must be more than 0"),
        ({"mass": 1.5}, "mass=1.5 must be a number between"),
    ],
    ids=str,
)
def test_refused_requests(llm, options, message):
    request = Request(DOCUMENT, 4, options)
    with pytest.raises(RetrievalConfigError, match=message):
        drive(llm, [request])
    assert not llm.llm_engine.has_unfinished_requests()


# ----------------------------------------------------------------------- another package's method


@pytest.mark.parametrize("house", ["pages"], indirect=True)
def test_another_packages_method_by_itself(model, package, computed, capfd):
    """Named as the backend, as a user of the package starts it."""
    with (
        installed(package),
        engine(
            model,
            attention_backend="toy",
            additional_config={"kv_retrieval": PARTS | {"summary_size": 16}},
            **STOCK,
        ) as llm,
    ):
        crowd = [
            Request(DOCUMENT, 12, {}),
            Request(prompt(300, 1), 20, by("toy"), arrives=2),
            Request(prompt(700, 2), 8, {"budget": 128}, arrives=3),
            Request(DOCUMENT, 12, by("streamingllm"), arrives=4),
        ]
        expected = [alone(llm, request) for request in crowd]
        for answer, request in zip(drive(llm, crowd), expected, strict=True):
            assert_same(answer, request, TOLERANCE)
    assert_same(expected[3], computed["streamingllm"], TOLERANCE)
    assert difference(expected[0], expected[3]) > 10 * TOLERANCE, "it selects pages"
    assert difference(expected[0], computed["toy"]) > 10 * TOLERANCE, "of finer entries"
    log = capfd.readouterr()
    said = "toy: decode attends to at most 160 tokens per KV head (sink 32, window 32, selected 96"
    assert said in log.out + log.err
    assert "GiB (median per 16 tokens)" in log.out + log.err
