"""Any options that are accepted are served: requests fit, and attend to what has been written.

Draws engines and requests at random, and runs them through the worker, the metadata builder, the
layers and the compiled ops; see ``tests/bare_engine.py`` for how it shows that something else was
read. Which options and requests there are is drawn from a seed.
"""

import gc
import random
from typing import Any

import pytest
import torch

from tests.bare_engine import HEADS, LAYERS, MIB, BareEngine
from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.request_options import RequestOptions
from vllm_kvretrieval.retrieval.presets import OWN

REQUESTS, STEPS = 6, 40
SEEDS = range(64)
MORE_SEEDS = range(64, 1200)
METHODS = tuple(OWN)
DROPPING = ("entropykv", "snapkv", "h2o", "tova", "raas")
SELECTING = ("kvretrieval", "freekv", "quest", "arkvale", "infllm", "fier", "ttkv")


class Draw:
    """Options and requests, as one seed has them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.method = METHODS[seed % len(METHODS)]
        self.disk = seed // len(METHODS) % 2 == 1 and self.method not in ("razor", "oracle")

    def chance(self, share: float) -> bool:
        """Whether it comes out so."""
        return self.random.random() < share

    def one(self, *values: Any) -> Any:
        """One of these."""
        return self.random.choice(values)

    def shares(self) -> Any:
        """Of a budget: with zeros, with far more for one than for others, by layer or KV head."""
        numbers = [0, 0.05, 1, 1, 1, 3, 40]
        layers = [self.one(*numbers) for _ in range(LAYERS - self.dense)]
        heads = [[self.one(*numbers) for _ in range(HEADS)] for _ in layers]
        least, most = self.one(0, 0.125, 1), self.one(1, 1.3, 2, 9)
        entropy = {"entropy": {"least": least, "most": most}}
        return self.one("uniform", "pyramid", layers, heads, "entropy", entropy)

    def of_method(self, name: str) -> dict[str, Any]:
        """Options of a method; they may not go together."""
        options: dict[str, Any] = {}
        if name == "razor":
            layers = range(LAYERS - self.dense)
            options["heads"] = [[self.one(0, 1) for _ in range(HEADS)] for _ in layers]
        if self.chance(0.4) and name not in ("omnikv", "razor", "streamingllm"):
            options["budget_shares"] = self.shares()
        if name in DROPPING and self.chance(0.4):
            options["schedule"] = self.one("once", "running")
        if name in DROPPING and self.chance(0.3):
            options["observation"] = self.one("all", 1, 32)
        if name == "omnikv" and self.chance(0.4):
            options["observation"] = self.one("uniform", "exponential")
        if name in SELECTING and self.chance(0.3):
            options["schedule"] = self.one("every_step", "speculative")
        if name in SELECTING and self.chance(0.3):
            options["index"] = self.one(
                "min_max", "mean", "low_rank", "representative", "one_bit", "exact"
            )
        if name in SELECTING and self.chance(0.2):
            options |= {"unit": "token", "index": self.one("one_bit", "exact")}
        if name in SELECTING and self.chance(0.2):
            options["rerank"] = 2
        return options

    def options(self) -> dict[str, Any]:
        """Of an engine; they may not go together."""
        page = self.one(16, 32, 32, 64, 128) if self.chance(0.5) else OWN[self.method].page_size
        self.dense = 0 if self.method == "omnikv" else self.one(0, 1)
        budget = page * self.random.randint(1, 256 // page)
        options = {"page_size": page, "budget": budget} | self.of_method(self.method)
        if self.method == "omnikv":
            options["filters"] = [0]
            if not self.disk and self.chance(0.4):
                options |= {"prefill_budget": 6 * page, "prefill_chunk": self.one(16, 50, 100)}
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
        names = [name for name in METHODS if name not in (self.method, "omnikv")]
        also = self.random.sample(names, self.random.randint(0, 4))
        options["also"] = {
            name: self.of_method(name) if name == "razor" or self.chance(0.5) else {}
            for name in also
        }
        return options | self.home()

    def home(self) -> dict[str, Any]:
        """Where the KV cache is."""
        if not self.disk:
            return {"home": "device", "codec": "raw"}
        return {"home": "disk", "codec": self.one("raw", "raw", "k8v4", "k2v2")}

    def request(self, config: RetrievalConfig, longest: int) -> tuple[dict[str, Any], int]:
        """What a client sends, and tokens of its prompt; at the borders of pages and budgets."""
        page = config.page_size
        own: dict[str, Any] = {"method": self.one(*config.methods)}
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
        """One whose options are accepted."""
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
