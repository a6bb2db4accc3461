"""The drafter beside plain specifications, and the options that steer it; without an engine."""

import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.support.model_configs import GEMMA, LFM, LLAMA
from vllm_kvretrieval.drafting import pace
from vllm_kvretrieval.drafting.lookup import LONGEST, find
from vllm_kvretrieval.drafting.pace import GOOD, MODEL, TRIES, VERIFY, Cost, Pace
from vllm_kvretrieval.engine.cpu.step_costs import OWN, VLLMS, CpuStepCosts
from vllm_kvretrieval.engine.drafter import PATH, Drafter, Reading, Row
from vllm_kvretrieval.engine.running import Note
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions

MOST = 4
ALONE = VERIFY.among(1)


def specified(tokens: list[int]) -> tuple[int, int]:
    """End and length of the match, by comparing every place with the end of the context."""
    best = (0, 0)
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, LONGEST) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, (length, end))
    return best[1], best[0]


def test_a_lookup_takes_the_last_of_the_longest_matches():
    rng = random.Random(0)
    for _ in range(400):
        alphabet, size = rng.randint(1, 6), rng.randint(1, 120)
        tokens = [rng.randrange(alphabet) for _ in range(size)]
        if rng.random() < 0.5:
            tokens += tokens[rng.randrange(size) :]
        match, (end, length) = find(np.array(tokens, dtype=np.int32)), specified(tokens)
        assert match.length == length
        assert match.end == end or length == 0
        assert 0 <= match.end < len(tokens)


def test_of_two_versions_the_later_one_is_drafted():
    """VLLM's ``ngram`` drafts the earlier one (``tests/surprises``)."""
    tokens = np.array([1, 2, 3, 7, 1, 2, 3, 8, 9, 1, 2, 3], dtype=np.int32)
    assert tokens[find(tokens).end] == 8


def test_drafts_are_as_long_as_pays():
    """Against all lengths: none yields more tokens in its time."""
    rng = random.Random(0)
    for _ in range(300):
        own, kind = Pace(), rng.randrange(MODEL + 1)
        cost = Cost(rng.choice([0.0, 0.15, 0.5]), rng.choice([0.02, 0.1, 0.3, 0.6]))
        for _ in range(rng.randrange(30)):
            drafted = rng.randint(1, 8)
            own.note(kind, drafted, rng.randint(0, drafted))
        likely, plan = own.acceptance(kind), own.plan(kind, 8, cost)
        times = [1 + cost.once + m * cost.token for m in range(1, 9)]
        tokens = [sum(likely**n for n in range(m + 1)) for m in range(1, 9)]
        rates = [pace.NOTHING.rate, *(of / time for of, time in zip(tokens, times, strict=True))]
        assert 0 < likely <= 1
        assert plan.rate == pytest.approx(max(rates))
        assert rates[plan.tokens] == pytest.approx(max(rates))
    assert Pace().plan(-1, 8, ALONE) == pace.NOTHING
    assert Pace().plan(MODEL, 0, ALONE) == pace.NOTHING


def step_costs(own: bool = True, slow: bool = False, **options: Any) -> CpuStepCosts:
    """Of the small Llama."""
    config = retrieving(drafts=MOST, **options)
    runner = SimpleNamespace(model_config=config.model_config, vllm_config=config)
    return CpuStepCosts(runner, slow, own)


def test_a_draft_costs_more_in_a_larger_batch_and_over_a_longer_context():
    costs = step_costs()
    few, part = Reading(1, True), Reading(1024, False)
    assert costs.verifying([few])[0].among(1) == pytest.approx(ALONE, rel=0.01)
    of_batches = [costs.verifying([few] * n)[0] for n in (1, 2, 4, 16)]
    for cost_of in (lambda cost: cost.token, lambda cost: cost.among(1).once):
        assert [*map(cost_of, of_batches)] == sorted(map(cost_of, of_batches))
    assert of_batches[-1].token < 1
    assert [cost.among(n).once for cost, n in zip(of_batches, (1, 2, 4, 16), strict=True)] == [
        pytest.approx(ALONE.once, rel=0.4)
    ] * 4, "it is the step's, however many share it"
    for own, most in ((True, OWN), (False, VLLMS)):
        costs = step_costs(own)
        assert costs.verifying([part]) == step_costs().verifying([part])
        verified = [costs.verifying([Reading(n, True)])[0] for n in (10**3, 10**5, 10**9)]
        for n, bound in enumerate(most.among(1)):
            found = [cost.among(1)[n] for cost in verified]
            assert found == sorted(found, reverse=bound < ALONE[n])
            assert found[-1] == pytest.approx(bound, rel=0.01)


def test_a_step_over_the_budget_is_cheap_where_contexts_are_long_or_far():
    costs, far = step_costs(), step_costs(slow=True)
    assert costs.drafting([500], 1024) == 1
    shares = [costs.drafting([length], 1024) for length in (2000, 10**5, 10**8)]
    assert shares == sorted(shares, reverse=True)
    assert far.drafting([10**5], 1024) < shares[1]
    assert shares[-1] < 0.01


def test_drafts_stop_where_they_are_wrong_and_are_tried_again():
    own, cost, kind, steps = Pace(), ALONE, Pace.kind(6), 2000
    taken = 0.0
    for _ in range(steps):
        count = own.plan(kind, MOST, cost).tokens or int(own.probe(kind, MOST, cost))
        if count:
            taken += cost.once + count * cost.token
            own.note(kind, count, 0)
    assert taken / steps < 1.2 * TRIES, "the time that wrong drafts take"
    for _ in range(steps):  # now they are right
        count = own.plan(kind, MOST, cost).tokens or int(own.probe(kind, MOST, cost))
        if count:
            own.note(kind, count, count)
    assert own.plan(kind, MOST, cost).tokens == MOST


def test_what_could_never_pay_is_not_tried():
    for cost, tried in ((Cost(0.5, 0.2), True), (Cost(0.5, GOOD), False)):
        own = Pace()
        for _ in range(8):
            own.note(MODEL, MOST, 0)
        assert any(own.probe(MODEL, MOST, cost) for _ in range(500)) == tried
    assert not Pace().probe(-1, MOST, ALONE)


def configured(backend: str = "kvretrieval", model: dict[str, Any] | None = None, **options: Any):
    """The configuration of an engine for a model that consists of a config.json."""
    return EngineArgs(
        model=configured.path(model or LLAMA),  # type: ignore[attr-defined]
        attention_backend=options.pop("attention_backend", backend),
        skip_tokenizer_init=True,
        max_num_seqs=4,
        **options,
    ).create_engine_config()


@pytest.fixture(autouse=True)
def model_path(tmp_path):
    def path(model: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(model))
        return str(tmp_path)

    configured.path = path  # type: ignore[attr-defined]


def retrieving(**options: Any):
    return configured(additional_config={"kv_retrieval": options})


class FakeCosts:
    """A step over whole contexts takes a time, whatever they are, and drafts little of it."""

    def __init__(self, step: float = 1.0, verify: Cost = VERIFY) -> None:
        self._step, self._verify = step, verify

    def drafting(self, lengths: Sequence[int], budget: int) -> float:
        return self._step

    def verifying(self, readings: Sequence[Reading]) -> Sequence[Cost]:
        return [self._verify] * len(readings)


class Steps:
    """Steps of requests that repeat a text of their prompt, and a drafter that follows them."""

    def __init__(self, config: Any, extra_args: dict[str, Any] | None = None) -> None:
        self.drafter = Drafter(config)
        self.notes: dict[str, Note] = {}
        self.extra_args, self.model = extra_args, None
        self.tokens = np.zeros((4, config.model_config.max_model_len), dtype=np.int32)
        self.lengths = np.zeros(4, dtype=np.int32)
        self.batch: list[str] = []
        self.drafts: dict[str, list[int]] = {}
        self.drafter.attach(self.notes, lambda: self.batch, FakeCosts(), None)

    def add(self, name: str, prompt: list[int]) -> None:
        self.notes[name] = Note(self.extra_args, len(prompt), len(prompt))
        self.tokens[len(self.batch), : len(prompt)] = prompt
        self.lengths[len(self.batch)] = len(prompt)
        self.batch.append(name)

    def step(self, texts: dict[str, list[int]], ended: tuple[str, ...] = ()) -> None:
        """A step in which each request with a text goes on with it, as far as drafts are right."""
        self.drafter.begin_step({n: d for n, d in self.drafts.items() if d}, ended)
        sampled: list[list[int]] = []
        for place, name in enumerate(self.batch):
            text, right = texts.get(name, []), 0
            draft = self.drafts.get(name, [])
            while right < min(len(draft), len(text) - 1) and draft[right] == text[right]:
                right += 1
            new, length = text[: right + 1], self.lengths[place]
            self.tokens[place, length : length + len(new)] = new
            self.lengths[place] += len(new)
            sampled.append(new)
            del text[: right + 1]
        drafts = self.drafter.propose(sampled, self.lengths, self.tokens, slot_mappings=None)
        self.drafts = dict(zip(self.batch, drafts, strict=True))


def test_a_copy_takes_few_steps():
    steps, text = Steps(retrieving(drafts=MOST)), list(range(100, 140))
    steps.add("a", [*text, 1, 2, 3])
    left, count = list(text), 0
    while left:
        steps.step({"a": left})
        count += 1
    assert count <= 40 // (MOST + 1) + 4
    assert all(len(draft) <= MOST for draft in steps.drafts.values())


def test_requests_are_drafted_for_by_themselves():
    """One reads its prompt, one is new to its text, one copies; places in the batch change."""
    steps = Steps(retrieving(drafts=MOST))
    for name in "abc":
        steps.add(name, [*range(10, 40), *range(10, 30)])
    steps.step({"b": [900], "c": [30]})
    assert [len(steps.drafts[name]) for name in "abc"] == [0, 0, MOST]
    assert steps.drafts["c"] == [31, 32, 33, 34]
    rows, lengths = steps.tokens.copy(), steps.lengths.copy()
    steps.batch = ["c", "b"]
    steps.tokens[:2], steps.lengths[:2] = rows[[2, 1]], lengths[[2, 1]]
    steps.step({"c": [31, 32, 33, 34, 35]}, ended=("a",))
    assert steps.drafts == {"c": [36, 37, 38, 39], "b": []}
    assert steps.drafter._paces.keys() == {"b", "c"}
    steps.step({}, ended=("b", "c"))
    assert not steps.drafter._paces
    assert not steps.drafter._drafted


@pytest.mark.parametrize(
    ("copying", "drafted"), [("abcd", "abcd"), ("abc", "abc"), ("ab", ""), ("", "")]
)
def test_drafts_of_a_step_share_its_cost(copying, drafted):
    """Three pay together where two do not."""
    steps = Steps(retrieving(drafts=MOST))
    steps.drafter.attach(steps.notes, lambda: steps.batch, FakeCosts(1.0, Cost(0, 0.1, 6.0)), None)
    for name in "abcd":
        steps.add(name, [*range(10, 40), *range(10, 30)])
    steps.step({name: [30 if name in copying else 900] for name in "abcd"})
    assert {name for name in "abcd" if steps.drafts[name]} == {*drafted}


@pytest.mark.parametrize(("extra", "most"), [({}, MOST), ({"drafts": 2}, 2), ({"drafts": 0}, 0)])
def test_a_request_may_have_fewer_drafts(extra, most):
    steps = Steps(retrieving(drafts=MOST), {"kv_retrieval": extra})
    steps.add("a", [*range(10, 30), *range(10, 26)])
    steps.step({"a": [26]})
    assert steps.drafts["a"] == [27, 28, 29, 10][:most]


def test_no_draft_goes_beyond_the_longest_context():
    config = retrieving(drafts=MOST)
    longest = config.model_config.max_model_len
    for left in range(4):
        steps = Steps(config)
        steps.add("a", ([*range(50)] * longest)[: longest - left - 1])
        steps.step({"a": [int(steps.tokens[0, longest - left - 51])]})
        assert len(steps.drafts["a"]) <= max(0, left - 1)


class FakeModel:
    """Drafts that say how long they were wanted."""

    def __init__(self, room: int = 10**6) -> None:
        self._room = room
        self.asked: list[Row] = []

    def room(self, place: int) -> int:
        return self._room

    def draft(self, rows: Sequence[Row]) -> list[list[int]]:
        self.asked += rows
        return [[7] * row.drafts for row in rows]


@pytest.mark.parametrize(
    ("prompt", "cost", "room", "asks"),
    [
        ([5, 6, 8, 9], 0.2, 10**6, True),
        ([5, 6, 8, 9], 1.0, 10**6, False),  # within the budget
        ([5, 6, 8, 9], 0.2, 4, False),  # no block to write to
        ([5, 6, 8, 9], 0.2, 5, True),
        ([*range(10, 60), *range(10, 40)], 0.2, 10**6, False),  # a lookup is likely
    ],
)
def test_the_model_drafts_where_that_pays_more(prompt, cost, room, asks):
    steps = Steps(retrieving(lossless=True))
    steps.add("a", prompt)
    model = FakeModel(room)
    steps.drafter.attach(steps.notes, lambda: steps.batch, FakeCosts(cost), model)
    steps.step({"a": [prompt[-1] + 1]})
    assert bool(model.asked) == asks
    if asks:
        (row,) = model.asked
        assert (row.request, row.place, row.length, row.last) == ("a", 0, len(prompt) + 1, 10)
        assert row.drafts == len(steps.drafts["a"]) <= room - len(prompt)
    elif cost < 1 and room > 4:
        assert steps.drafts["a"][0] == 41


def test_the_platform_names_the_drafter():
    config = retrieving(drafts=3)
    assert config.speculative_config.method == "custom_class"
    assert config.speculative_config.model == PATH
    assert config.num_speculative_tokens == 3
    assert not config.use_v2_model_runner
    assert retrieving(drafts=0).speculative_config is None
    assert retrieving().speculative_config is None
    assert retrieving(lossless=True).num_speculative_tokens == 5
    assert retrieving(lossless=True, home="disk").num_speculative_tokens == 10


NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "two drafters": (
        {"speculative_config": NGRAM},
        r"drafts=4 and --speculative-config \(method ngram\) both draft",
    ),
    "a pipeline": (
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        "cannot be served with --pipeline-parallel-size 2",
    ),
}


@pytest.mark.parametrize(("options", "message"), ENGINES.values(), ids=ENGINES.keys())
def test_engines_that_cannot_draft(options, message):
    with pytest.raises(ValueError, match=message):
        configured(additional_config={"kv_retrieval": {"drafts": 4}}, **options)


def test_the_v2_runner_takes_no_drafter(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match=r"V1 model runner, not with V2; .*drafts=4 out"):
        retrieving(drafts=4)


BESIDE_A_DRAFT_MODEL: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a file": ({"home": "disk"}, {}, "home=disk, which holds layers of one model; use home=device"),
    "any home": ({"home": "auto"}, {}, "home=auto, which holds layers of one model"),
    "a store": ({"store": "/tmp"}, {}, "kv_retrieval.store, which knows one model's weights"),
    "small pages": ({"page_size": 16}, {}, "page_size=16, since vLLM's attention reads multiples"),
    "adapters": ({}, {"enable_lora": True}, "LoRA adapters, .*; leave --enable-lora out"),
    "windows": ({}, {"model": GEMMA}, "the sliding windows of .*; leave it out"),
    "states": ({}, {"model": LFM}, "the states of .* would keep what these have changed"),
    "stages": (
        {},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        "--pipeline-parallel-size; use --tensor-parallel-size",
    ),
}


def drafting_with(method: str, path: Any, **options: Any) -> Any:
    """The configuration of an engine with a draft model of a config.json at ``path``."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA))
    by = {"method": method, "model": str(path), "num_speculative_tokens": 2}
    return configured(speculative_config=by, **options)


@pytest.mark.parametrize(
    ("retrieval", "options", "message"),
    BESIDE_A_DRAFT_MODEL.values(),
    ids=BESIDE_A_DRAFT_MODEL.keys(),
)
def test_draft_models_that_cannot_be_served(tmp_path, retrieval, options, message):
    additional = {"kv_retrieval": retrieval}
    with pytest.raises(ValueError, match=message):
        drafting_with("draft_model", tmp_path / "draft", additional_config=additional, **options)


def test_other_draft_models(tmp_path):
    """They are named, with those that are served."""
    with pytest.raises(ValueError, match=r"drafts of 'eagle3'; use one of ngram, .*, mtp as"):
        drafting_with("eagle3", tmp_path / "draft")


def test_a_draft_model_leaves_pages_as_vllms_attention_reads_them(tmp_path):
    for dtype in ("bfloat16", "float32"):
        config = drafting_with("draft_model", tmp_path / "draft", dtype=dtype)
        served = RetrievalConfig.from_vllm(config)
        assert served is not None
        assert served.page_size % 32 == 0


def test_options_without_a_method_are_refused_beside_a_draft_model(tmp_path):
    """Though vLLM makes a configuration without one for the draft model."""
    additional = {"kv_retrieval": {"budget": 1024}}
    with pytest.raises(ValueError, match="has no effect without a retrieval backend"):
        drafting_with(
            "draft_model",
            tmp_path / "draft",
            attention_backend=None,
            additional_config=additional,
        )


def test_lora_beside_lossless():
    lossless = {"kv_retrieval": {"lossless": True}}
    with pytest.raises(ValueError, match="lossless=True cannot be served with LoRA adapters"):
        configured(enable_lora=True, additional_config=lossless)
    configured(enable_lora=True, additional_config={"kv_retrieval": {"drafts": 4}})


@pytest.mark.parametrize("value", [-1, 33, 10**30, 1.5, "4", True, None, float("nan"), [4]])
def test_hostile_numbers_of_drafts(value):
    if value is not None:
        with pytest.raises(RetrievalConfigError, match=r"kv_retrieval\.drafts="):
            RetrievalConfig.from_options("kvretrieval", {"drafts": value})
    config = RetrievalConfig.from_options("kvretrieval", {"drafts": MOST})
    with pytest.raises(RetrievalConfigError, match=r"kv_retrieval\.drafts="):
        RequestOptions.parse({"kv_retrieval": {"drafts": value}}, config)


@pytest.mark.parametrize("value", ["yes", 2, -1, 0.5, None, [], {}])
def test_hostile_switches(value):
    config = RetrievalConfig.from_options("kvretrieval", {"drafts": MOST})
    for parse in (
        lambda: RetrievalConfig.from_options("kvretrieval", {"lossless": value}),
        lambda: RequestOptions.parse({"kv_retrieval_lossless": value}, config),
    ):
        with pytest.raises(RetrievalConfigError, match=r"kv_retrieval\.lossless="):
            parse()


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("kvretrieval", {"lossless": True, "drafts": 0}, "drafts tokens, and drafts=0 allows none"),
        ("full", {"lossless": True}, "cannot be used with full, with which the model"),
        ("h2o", {"lossless": True}, "cannot be used with h2o, with which the model"),
        ("omnikv", {"lossless": True}, "cannot be used with omnikv, with which the model"),
    ],
)
def test_servers_that_cannot_be_lossless(backend, options, message):
    with pytest.raises(RetrievalConfigError, match=message):
        RetrievalConfig.from_options(backend, options)


SERVER = {"drafts": MOST, "also": ["full", "snapkv"]}


@pytest.mark.parametrize(
    ("server", "asked", "message"),
    [
        ({}, {"lossless": True}, "lossless=True needs a server that drafts"),
        ({}, {"drafts": 1}, "drafts=1 exceeds the server's 0"),
        (SERVER, {"drafts": 5}, "drafts=5 exceeds the server's 4"),
        (SERVER, {"lossless": True, "drafts": 0}, "drafts=0 allows none"),
        (SERVER, {"lossless": True, "exact": False}, "contradict each other"),
        (SERVER, {"lossless": True, "method": "full"}, "cannot be used with full"),
        (SERVER, {"lossless": True, "method": "snapkv"}, "cannot be used with snapkv"),
    ],
)
def test_requests_that_cannot_be_lossless(server, asked, message):
    config = RetrievalConfig.from_options("kvretrieval", server)
    with pytest.raises(RetrievalConfigError, match=message):
        RequestOptions.parse({"kv_retrieval": asked}, config)


@pytest.mark.parametrize(
    ("server", "asked", "expected"),
    [
        (SERVER, {}, (False, False, MOST)),
        (SERVER, {"lossless": True}, (True, True, MOST)),
        (SERVER, {"lossless": 1, "drafts": 2}, (True, True, 2)),
        (SERVER, {"exact": True}, (False, True, MOST)),
        (SERVER | {"lossless": True}, {}, (True, True, MOST)),
        (SERVER | {"lossless": True}, {"lossless": False}, (False, False, MOST)),
        (SERVER | {"lossless": True}, {"exact": False}, (False, False, MOST)),
        (SERVER | {"lossless": True}, {"method": "full"}, (False, True, MOST)),
        (SERVER | {"lossless": True, "allow_exact": False}, {}, (True, True, MOST)),
    ],
)
def test_what_a_request_gets(server, asked, expected):
    config = RetrievalConfig.from_options("kvretrieval", server)
    options = RequestOptions.parse({"kv_retrieval": asked}, config)
    assert (options.lossless, options.exact, options.drafts) == expected
