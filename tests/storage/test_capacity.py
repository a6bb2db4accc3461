"""Any options that are accepted are served: requests fit, and attend to what has been written.

Draws engines and requests at random, and runs them through the worker, the metadata builder, the
layers and the compiled ops; see ``support/bare_engine.py`` for how it shows that something else was
read. Which options and requests there are is drawn from a seed.
"""

import gc
import random
from typing import Any

import pytest
import torch

from tests.support.bare_engine import HEADS, LAYERS, MIB, BareEngine
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.retrieval.presets import OWN

REQUESTS, STEPS = 6, 40
SEEDS = range(16)
MORE_SEEDS = range(16, 1200)
METHODS = tuple(OWN)
DROPPING = ("entropykv", "snapkv", "h2o", "tova", "raas")
SELECTING = ("kvretrieval", "freekv", "quest", "arkvale", "infllm", "fier", "ttkv")


class Draw:
    """Options and requests, as one seed has them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.method = METHODS[seed % len(METHODS)]
        in_memory = self.method in ("razor", "oracle", "full")
        self.disk = seed // len(METHODS) % 2 == 1 and not in_memory

    def chance(self, share: float) -> bool:
        """Whether it comes out so."""
        return self.random.random() < share

    def one(self, *values: Any) -> Any:
        """Choose one of these values."""
        return self.random.choice(values)

    def shares(self, name: str) -> Any:
        """Shares of a budget by layer or KV head, with zeros, and with far more for one than for
        others."""
        numbers = [0, 0.05, 1, 1, 1, 3, 40]
        layers = [self.one(*numbers) for _ in range(LAYERS - self.dense)]
        heads = [[self.one(*numbers) for _ in range(HEADS)] for _ in layers]
        least, most = self.one(0, 0.125, 1), self.one(1, 1.3, 2, 9)
        entropy = {"entropy": {"least": least, "most": most}}
        rules = ("entropy", entropy, entropy) if name in DROPPING else ()
        if self.disk and (self.tokens or self.codec != "raw"):
            return self.one("uniform", *rules)  # others are refused
        return self.one("uniform", "pyramid", layers, heads, heads, *rules)

    def of_method(self, name: str) -> dict[str, Any]:
        """Options of a method; they may not go together."""
        options: dict[str, Any] = {}
        if name == "razor":
            layers = range(LAYERS - self.dense)
            options["heads"] = [[self.one(0, 1) for _ in range(HEADS)] for _ in layers]
        if self.chance(0.4) and name not in ("omnikv", "razor", "streamingllm", "raas"):
            options["budget_shares"] = self.shares(name)
        if name in DROPPING and self.chance(0.4):
            options["schedule"] = self.one("once", "running")
        if name in DROPPING and self.chance(0.3):
            options["observation"] = self.one("all", 1, 32)
        if name == "omnikv" and self.chance(0.4):
            options["observation"] = self.one("uniform", "exponential")
        if name in SELECTING and self.chance(0.3):
            options["schedule"] = self.one("every_step", "speculative")
        if name in SELECTING and self.chance(0.3):
            reading = () if self.disk else ("exact",)
            options["index"] = self.one("min_max", "mean", "low_rank", "one_bit", *reading)
        if name in SELECTING and self.tokens and self.chance(0.3):
            options |= {"unit": "token", "index": "one_bit"}
        if name in SELECTING and not self.disk and self.chance(0.2):
            options["rerank"] = 2
        return options

    def options(self) -> dict[str, Any]:
        """Options of an engine, which may contradict each other."""
        page = self.one(16, 32, 32, 64, 128) if self.chance(0.5) else OWN[self.method].page_size
        self.dense = 0 if self.method == "omnikv" else self.one(0, 1)
        # Whether methods of single tokens are wanted, which the engine's own may be.
        self.tokens = self.method in ("fier", "omnikv", *DROPPING) or self.chance(0.5)
        codecs = "raw", "k8v4", "k2v2", "k4v4_sparse", "k2v2_sparse"
        self.codec = self.one(*codecs) if self.disk and not self.tokens else "raw"
        budget = page * self.random.randint(1, 256 // page)
        options = {"page_size": page, "budget": budget} | self.of_method(self.method)
        if self.method == "omnikv":
            options["filters"] = [0]
            if not self.disk and self.chance(0.8):
                options |= {"prefill_budget": 8 * page, "prefill_chunk": self.one(16, 50, 100)}
        else:
            options["dense_layers"] = self.dense
        if self.chance(0.4):
            options["sink"] = page * self.random.randint(1, 3)
        if self.chance(0.4):
            options["window"] = page * self.random.randint(1, 3)
        if self.chance(0.3):
            options["max_budget"] = budget + page * self.random.randint(0, 512 // page)
        if self.chance(0.25):
            options["memory_fraction"] = self.one(0.1, 0.3, 0.6, 1.0)
        if self.chance(0.4):
            options["attention"] = self.one("own", "vllm")
        names = ["full", *SELECTING, *(("razor",) * (not self.disk))]
        names += DROPPING if self.tokens else ()
        names = [name for name in names if name != self.method]
        also = self.random.sample(names, self.random.randint(0, 4))
        options["also"] = {
            name: self.of_method(name) if name == "razor" or self.chance(0.5) else {}
            for name in also
        }
        return options | {"home": "disk" if self.disk else "device", "codec": self.codec}

    def request(self, config: RetrievalConfig, longest: int) -> tuple[dict[str, Any], int]:
        """The options of a request, and the tokens of its prompt, at the borders of pages and
        budgets."""
        page = config.page_size
        methods = [*config.methods, config.method, config.method]
        own: dict[str, Any] = {"method": self.one(*methods)}
        if self.chance(0.5):
            own["budget"] = page * self.random.randint(1, config.budget_limit // page)
        if config.allow_exact and self.chance(0.1):
            own["exact"] = True
        try:
            budget = RequestOptions.parse({"kv_retrieval": own}, config).budget.total * page
        except RetrievalConfigError:
            own.pop("budget", None)
            budget = config.budget
        prompt = self.one(
            1, 2, page - 1, page, page + 1, budget - 1, budget, budget + 1, budget + page,
            *(self.random.randint(1, longest) for _ in range(4)),
        )  # fmt: skip
        return own, min(max(prompt, 1), longest - 1)

    def engine(self, directory: str) -> BareEngine:
        """An engine whose options are accepted."""
        for _ in range(2000):
            options, longest = self.options(), self.one(257, 400, 512, 640)
            if options["home"] == "disk":
                options["home_path"] = directory
            bounds = {"max_model_len": longest, "step_tokens": self.one(100, 192)}
            dtype = self.one(torch.float32, torch.float32, torch.bfloat16)
            try:
                if options["home"] == "disk" and self.chance(0.7):
                    options["recall_cache_bytes"] = least_slots(self.method, options, bounds, dtype)
                return BareEngine(self.method, options, dtype=dtype, **bounds)
            except RetrievalConfigError:
                continue
        raise AssertionError("nothing was accepted")


def least_slots(
    method: str, options: dict[str, Any], bounds: dict[str, int], dtype: torch.dtype
) -> int:
    """Bytes of the smallest recall cache that is accepted."""
    low, high = 0, 64 * MIB
    while high - low > 256:
        size = (low + high) // 2
        try:
            given = options | {"recall_cache_bytes": size}
            BareEngine(method, given, dtype=dtype, plan_only=True, **bounds)
            high = size
        except RetrievalConfigError:
            low = size
    return high


def serve(seed: int, directory: str) -> BareEngine:
    """Run an engine's requests, more than there are seats, each for so many steps at most."""
    draw = Draw(seed)
    engine = draw.engine(directory)
    for _ in range(REQUESTS):
        options, prompt = draw.request(engine.config, engine.max_model_len)
        engine.add(options, prompt, min(STEPS, engine.max_model_len - prompt))
    interrupted = draw.one(None, 20, 45)
    for step in range(400):
        if step == interrupted and len(engine.running) > 1:
            engine.preempt()
        if not engine.step():
            break
    return engine


def run(engine: BareEngine) -> None:
    """Serve all requests of an engine to their ends."""
    requests = engine.finished + engine.left
    while engine.step():
        pass
    assert engine.finished == requests
    assert engine.memory.overrun() == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_accepted_is_served(seed, tmp_path):
    engine = serve(seed, str(tmp_path))
    assert engine.finished == REQUESTS
    assert engine.memory.overrun() == 0
    del engine
    gc.collect()  # homes that are mapped are few in a process


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_more_of_what_is_accepted_is_served(seed, tmp_path):
    test_what_is_accepted_is_served(seed, tmp_path)


# ------------------------------------------------------------------------------- known cases


@pytest.mark.parametrize(
    ("method", "options", "named"),
    [
        ("h2o", {"sink": 64}, "h2o"),
        ("h2o", {"sink": 64, "home": "disk"}, "h2o"),
        ("tova", {"window": 96}, "tova"),
        ("snapkv", {"window": 96, "home": "disk"}, "snapkv"),
        ("raas", {"sink": 32, "window": 32}, "raas"),
        ("snapkv", {"sink": 32, "window": 64}, "snapkv"),
        ("kvretrieval", {"window": 96, "also": ["snapkv"]}, "snapkv"),
        ("tova", {"budget_shares": "pyramid", "sink": 64}, "tova"),
        ("entropykv", {"schedule": "running"}, "entropykv"),
        ("h2o", {"budget_shares": [[1, 0], 5, [40, 0.1], 1]}, "h2o"),
    ],
)
def test_what_is_kept_has_room(method, options, named, tmp_path):
    """Whatever of the budget is sink and window, and however it is shared."""
    place = {"home_path": str(tmp_path)} if "home" in options else {}
    engine = BareEngine(method, {"budget": 256} | options | place)
    for prompt in (1, 255, 256, 257, 400):
        engine.add({"method": named}, prompt, STEPS)
    run(engine)


def test_slots_for_what_entropy_gives_a_layer(tmp_path):
    """More than the budget, where a layer looks wider than the others."""
    options = {"budget": 64, "home": "disk", "home_path": str(tmp_path)}
    options["budget_shares"] = {"entropy": {"least": 0, "most": 3.5}}
    options["recall_cache_bytes"] = least_slots("entropykv", options, {}, torch.float32)
    engine = BareEngine("entropykv", options)
    capacity = engine.worker.planner.tiers.slots[0] // (engine.worker.planner.seats * HEADS)
    assert capacity == 3.5 * 64
    settle, most = engine.worker.requests.kept.settle, []

    def one_layer_looks_everywhere(seat, method):
        engine.worker.requests.kept.watched(seat).entropies[:] = torch.tensor([9, 0, 0, 0])
        settle(seat, method)
        most.append(int(engine.worker.requests.selected[seat].max()))

    engine.worker.requests.kept.settle = one_layer_looks_everywhere
    for prompt in (400, 64, 65):
        engine.add({}, prompt, 20)
    run(engine)
    assert max(most) == 3.5 * 64


@pytest.mark.parametrize("home", ["device", "disk"])
def test_heads_that_keep_nothing(home, tmp_path):
    """A budget of a page, and a prompt of whole pages: beside its new token nothing has room."""
    place = {"home_path": str(tmp_path)} if home == "disk" else {}
    options = {"budget": 64, "page_size": 16, "home": home} | place
    engine = BareEngine("raas", options)
    for prompt in (16, 32, 31, 160):
        engine.add({"budget": 16}, prompt, STEPS)
    run(engine)


@pytest.mark.parametrize("method", ["snapkv", "h2o", "freekv", "streamingllm"])
def test_a_stage_of_a_pipeline_without_retrieval_layers(method):
    engine = BareEngine(method, {"budget": 128, "dense_layers": LAYERS}, stages=2)
    assert not engine.worker.retrieval_layers
    for prompt in (300, 1, 128):
        engine.add({}, prompt, 20)
    run(engine)


@pytest.mark.parametrize("attention", ["own", "vllm"])
@pytest.mark.parametrize("page", [16, 128, 256])
def test_full_attention(page, attention):
    options = {"page_size": page, "attention": attention, "budget": max(256, 2 * page)}
    engine = BareEngine("full", options)
    assert not any(impl.indexes for impl in engine.worker.retrieval_layers.values())
    for prompt in (300, 1, 128):
        engine.add({}, prompt, 20)
    run(engine)


def test_state_is_no_larger_than_contexts():
    """However much a request may ask for."""
    options = {"budget": 128, "max_budget": 40960, "also": ["h2o", "freekv"]}
    engine = BareEngine("fier", options, max_model_len=400)
    for impl in engine.worker.retrieval_layers.values():
        assert impl.choosers[0].selection.chosen.shape[2] == 400
        assert {w._kept.ratings.shape[2] for w in impl.watchers.values()} == {400}
    assert engine.builder.planner.facts.lists.shape[1] == 400
    for method in ("fier", "h2o", "freekv"):
        engine.add({"budget": 40960, "method": method}, 350, STEPS)
    run(engine)
