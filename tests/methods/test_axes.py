"""Points on the axes: every combination that makes sense is a method, every other is refused."""

from itertools import product
from typing import Any

import pytest
import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.methods import make_method
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.retrieval.families import (
    DroppingMethod,
    FilterMethod,
    HeadMethod,
    ScoredMethod,
    WholeMethod,
    family_with,
)
from vllm_kvretrieval.retrieval.families.scored import CORRECTION_THRESHOLD
from vllm_kvretrieval.retrieval.index import indexes
from vllm_kvretrieval.retrieval.needs import Need
from vllm_kvretrieval.retrieval.pooling import POOLINGS, Pooling
from vllm_kvretrieval.retrieval.presets import OWN, presets

SELECTING = [*ScoredMethod.schedules]
KEEPING = [n for n, preset in OWN.items() if family_with(preset.schedule) is DroppingMethod]
SHARING = [n for n, preset in OWN.items() if family_with(preset.schedule) is FilterMethod]
BY_HEAD = [n for n, preset in OWN.items() if family_with(preset.schedule) is HeadMethod]
WHOLE = [n for n, preset in OWN.items() if family_with(preset.schedule) is WholeMethod]
# Whose layers select for themselves.
BY_LAYER = [name for name in OWN if name not in SHARING + KEEPING + BY_HEAD + WHOLE]
# Of a head of 64 channels in bfloat16 and an entry of 32 tokens, as the papers and docs have it.
BYTES = {
    "min_max": 2 * 64 * 2,
    "mean": 64 * 2,
    "mean_std": 2 * 64 * 2,
    "bounding": 64 * 2 + 4,
    "representative": 64 * 2,
    "one_bit": 2 * 64 * 2 + 64 * 32 // 8,
    "low_rank": 2 + 12 + 64 + 12 * 64 // 2 + 6 * 32,
    "landmark": 64 * 2 + 4,
    "exact": 0,
}
KV_BYTES = 2 * 64 * 2 * 32  # of these tokens


def make(preset="freekv", page_size=32, **options):
    return make_method("mine", preset, options, page_size)


def config(method="freekv", **options):
    return RetrievalConfig.from_options(method, options)


# ------------------------------------------------------------------------------- combinations


def test_the_axes_are_all_here():
    assert BYTES.keys() == indexes().keys()
    assert POOLINGS == ("mean_softmax", "relative", "max", "sum", "max_softmax")
    assert SELECTING == ["speculative", "every_step"]
    assert SHARING == ["omnikv"]
    assert BY_HEAD == ["razor"]
    assert WHOLE == ["full", "kivi", "kvquant"]
    assert KEEPING == ["entropykv", "snapkv", "h2o", "tova", "raas"]


@pytest.mark.parametrize("preset", BY_LAYER)
@pytest.mark.parametrize(
    ("index", "pooling", "schedule"), [*product(BYTES, POOLINGS, SELECTING)], ids=str
)
def test_every_combination(preset, index, pooling, schedule):
    own = OWN[preset].summary_size if index == OWN[preset].index else None
    for size in (None, 16):
        options = {"index": index, "pooling": pooling, "schedule": schedule, "summary_size": size}
        made = make(preset, unit="page", **options)
        assert made.index is not None
        assert not made.per_token
        if made.index.per_token:
            assert make(preset, unit="token", **options).per_token
        else:
            with pytest.raises(RetrievalConfigError, match=f"index={index} scores several at once"):
                make(preset, unit="token", **options)
        assert (made.name, made.index.name, made.entry_tokens) == ("mine", index, size or own or 32)
        assert made.pooling is Pooling[pooling.upper()]
        assert made.schedule == schedule
        assert made.selects
        assert made.rerank == 0
        assert CORRECTION_THRESHOLD.of(made) == (0.9 if schedule == "speculative" else 1.0)
        assert (Need.KEYS in made.needs) == (index == "exact")


@pytest.mark.parametrize("index", [name for name in BYTES if name != "exact"])
@pytest.mark.parametrize("schedule", SELECTING)
def test_reranking(index, schedule):
    for rerank in (2, 64):
        made = make(index=index, schedule=schedule, rerank=rerank)
        assert (made.rerank, Need.KEYS in made.needs) == (rerank, True)


@pytest.mark.parametrize("name", OWN)
def test_presets(name):
    """Each preset is what it says, and needs no other option."""
    preset, own = OWN[name], config(name).own
    index = "none" if own.index is None else own.index.name
    assert (index, own.rerank) == (preset.index, preset.rerank)
    assert own.schedule == preset.schedule
    if name not in KEEPING:
        assert own.pooling.name.lower() == preset.pooling
    assert getattr(own, "keeping", None) == preset.keeping
    assert config(name).page_size == preset.page_size
    assert config(name).dense_layers == preset.dense_layers
    assert own.per_token == config(name).token_major == (name in ("fier", "omnikv", *KEEPING))
    assert own.selects_for_others == (name in SHARING)
    assert (Need.HEADS in own.needs) == (name in BY_HEAD)


def test_parameters():
    index = make(index={"low_rank": {"rank": 4}}, summary_size=16).index
    assert index == make(index={"low_rank": {"rank": 4}}).index
    assert index != make(index="low_rank").index
    assert make(index={"mean_std": {"spread": 1}}).index == make(index="mean_std").index
    assert make(index={"mean": {}}).index == make(index="mean").index


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("freekv", {"index": "best"}, "index='best' is unknown; use one of min_max, mean,"),
        ("freekv", {"index": "min-max"}, r"\}\}\. Did you mean 'min_max'\?$"),
        ("freekv", {"pooling": "max-softmax"}, r"max_softmax\. Did you mean 'max_softmax'\?$"),
        ("freekv", {"index": ["mean"]}, r"index=\['mean'\] is unknown; use one of"),
        ("freekv", {"index": {"mean": {}, "exact": {}}}, "index=.* is unknown; use one of"),
        ("freekv", {"index": {"mean": 3}}, "index=.*'mean': 3.* is unknown"),
        ("freekv", {"index": {"mean": {"rank": 3}}}, "mean has no parameters, all numbers"),
        ("freekv", {"index": {"mean_std": {"spread": "1"}}}, "mean_std has spread, all numbers"),
        ("freekv", {"index": {"mean_std": {"spread": True}}}, "mean_std has spread, all numbers"),
        ("freekv", {"index": {"mean_std": {"spread": -1}}}, "spread=-1 must be from 0 to 16"),
        ("freekv", {"index": {"low_rank": {"rank": -1}}}, "rank=-1 must be .* from 1 to 16"),
        ("freekv", {"index": {"low_rank": {"rank": 17}}}, "rank=17 must be .* from 1 to 16"),
        ("freekv", {"index": {"low_rank": {"rank": 2.0}}}, "rank=2.0 must be a whole number"),
        ("kvretrieval", {"summary_size": 8}, "index='low_rank': entries of 8 tokens are too small"),
        ("freekv", {"pooling": "mean"}, "pooling='mean' is unknown; use one of mean_softmax, rel"),
        ("freekv", {"pooling": 1}, "pooling=1 is unknown"),
        ("freekv", {"schedule": "often"}, "schedule='often' is unknown; use one of speculative,"),
        ("freekv", {"index": "none"}, "schedule='speculative' selects pages by an index, and mine"),
        ("streamingllm", {"schedule": "every_step"}, "every_step.* such as index=min_max"),
        ("freekv", {"rerank": 1}, "rerank=1 must be 0 or from 2 to 64"),
        ("freekv", {"rerank": 65}, "rerank=65 must be 0 or from 2 to 64"),
        ("freekv", {"rerank": -2}, "rerank=-2 must be 0 or from 2 to 64"),
        ("freekv", {"rerank": 2.0}, "rerank=2.0 must be a whole number"),
        ("oracle", {"rerank": 2}, "rerank=2 has no effect with index=exact, which scores by all"),
        (
            "freekv",
            {"schedule": "every_step", "correction_threshold": 0.9},
            "correction_threshold=0.9 has no effect with schedule='every_step'; leave it out, or",
        ),
        ("quest", {"correction_threshold": 0.9}, "correction_threshold=0.9 has no effect with sch"),
        ("freekv", {"unit": "byte"}, "unit='byte' is unknown; use one of page, token"),
        (
            "freekv",
            {"unit": "token"},
            "index=min_max scores several at once; use one of one_bit, exa",
        ),
        ("fier", {"rerank": 2}, "rerank=2 is for pages, and unit='token' selects single tokens"),
        ("freekv", {"budget": 512}, "mine has no option 'budget'"),
        ("freekv", {"schedule": "shared_layers"}, "'shared_layers' cannot be combined with freekv"),
        (
            "omnikv",
            {"schedule": "every_step"},
            "'every_step' cannot be combined with omnikv",
        ),
        ("razor", {"schedule": "never"}, "'never' cannot be combined with razor: methods by which"),
        ("freekv", {"schedule": "by_head"}, "'by_head' cannot be combined with freekv: methods by"),
        ("best", {}, "preset='best' is unknown; use one of kvretrieval, freekv"),
        ("freekv", {"schedule": "never", "index": "mean"}, "index='mean' has no effect"),
    ],
    ids=str,
)
def test_impossible(preset, options, message):
    with pytest.raises(RetrievalConfigError, match=message):
        make(preset, **options)


def test_never_selects():
    for preset in BY_LAYER:
        made = make(preset, schedule="never", index="none")
        assert (made.index, made.selects, made.needs) == (None, False, frozenset())


# ------------------------------------------------------------------- several methods of an engine


def test_also_names_presets():
    served = config("kvretrieval", also=["freekv", "quest", "oracle"]).methods
    assert [*served] == ["kvretrieval", "freekv", "quest", "oracle", "streamingllm"]
    for name, method in served.items():
        assert method.name == name
        assert method.index == make(name).index
    assert [*config("freekv").methods] == ["freekv", "streamingllm"]


def test_also_changes_the_engines_own():
    """Options that it does not name are the engine's own, except for those that depend on a changed
    one."""
    also: dict[str, Any] = {
        "fine": {"summary_size": 16},
        "steady": {"schedule": "every_step"},
        "other": {"index": "mean"},
        "quest": {"pooling": "sum"},
        "bounds": {"preset": "quest"},
        "blind": {"preset": "streamingllm"},
    }
    served = config(
        index="one_bit", pooling="max", rerank=4, correction_threshold=0.5, also=also
    ).methods
    assert [*served] == ["freekv", *also, "streamingllm"]
    fine = served["fine"]
    assert (fine.entry_tokens, fine.index, fine.pooling) == (16, make(index="one_bit").index, 2)
    assert (fine.rerank, CORRECTION_THRESHOLD.of(fine)) == (4, 0.5)
    assert (served["steady"].rerank, CORRECTION_THRESHOLD.of(served["steady"])) == (4, 1.0)
    assert (served["other"].rerank, CORRECTION_THRESHOLD.of(served["other"])) == (0, 0.5)
    assert (served["quest"].pooling, served["quest"].rerank) == (Pooling.SUM, 0)
    assert served["bounds"].pooling is Pooling.MAX
    assert served["bounds"].index == make(index="min_max").index
    assert served["blind"].index is None


@pytest.mark.parametrize(
    ("also", "message"),
    [
        ("quest", r"also='quest' must be a list of methods, or a mapping"),
        (5, "also=5 must be a list of methods"),
        ([5], "also='5' is unknown; use one of kvretrieval"),
        (["best"], "also='best' is unknown; use one of kvretrieval"),
        (["freekv"], r"also=\['freekv'\] names freekv twice; leave one out"),
        ({"": {}}, "must be a list of methods"),
        ({3: {}}, "must be a list of methods"),
        ({"fine": 16}, "must be a list of methods"),
        ({"fine": {"budget": 512}}, "also: fine: fine has no option 'budget'"),
        ({"fine": {"also": {}}}, "also: fine: fine has no option 'also'"),
        ({"fine": {"page_size": 16}}, "also: fine: fine has no option 'page_size'"),
        ({"fine": {"preset": "best"}}, "also: fine: preset='best' is unknown"),
        ({"fine": {"summary_size": 64}}, "also: fine: summary_size=64 is not supported with page"),
        ({"quest": {"correction_threshold": 1}}, "also: quest: correction_threshold=1.0 has no "),
        ({"blind": {"schedule": "never", "rerank": 4}}, "also: blind: rerank=4 has no effect"),
        ({"exactly": {"index": "exact", "rerank": 2}}, "also: exactly: rerank=2 has no effect"),
        (["omnikv"], "also: omnikv: which layers are dense is the server's affair.*backend omnikv"),
        ({"small": {"index": {"low_rank": {"rank": 32}}}}, "also: small: index=.* rank=32 must be"),
    ],
    ids=str,
)
def test_impossible_also(also, message):
    with pytest.raises(RetrievalConfigError, match=message):
        config(also=also)


def test_requests_name_them():
    served = config("kvretrieval", also={"freekv": {}, "fine": {"summary_size": 16}}, budget=512)
    for name, budget in (("kvretrieval", 512), ("freekv", 256), ("fine", 128)):
        got = RequestOptions.parse({"kv_retrieval": {"method": name, "budget": budget}}, served)
        assert (got.method, got.budget.total) == (name, budget // 32)
    freekv = RequestOptions.parse({"kv_retrieval_method": "freekv"}, served)
    assert freekv.numbers["correction_threshold"] == 0.9
    for options, message in (
        ({"method": "quest"}, "method='quest' cannot be .* use one of kvretrieval, fr"),
        (
            {"method": "fine", "correction_threshold": 0.5},
            "correction_threshold=0.5 has no effect with fine, which selects anew at every step",
        ),
    ):
        with pytest.raises(RetrievalConfigError, match=message):
            RequestOptions.parse({"kv_retrieval": options}, served)


# ------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("index", BYTES)
def test_bytes_of_an_index(index):
    got = config(index=index).index_bytes(10 * KV_BYTES, 64, torch.bfloat16)
    assert got == 10 * BYTES[index]
    halves = config(index=index, summary_size=16, also=()).index_bytes(KV_BYTES, 64, torch.bfloat16)
    whole = config(index=index).index_bytes(KV_BYTES, 64, torch.bfloat16)
    assert whole <= halves + 30 * (index == "low_rank"), "of fewer directions"
    assert halves <= 2 * whole


def test_indexes_add_up_and_equal_ones_are_shared():
    def bytes_of(method, **options):
        return config(method, **options).index_bytes(KV_BYTES, 64, torch.bfloat16)

    assert bytes_of("freekv", also={i: {"index": i} for i in BYTES}) == sum(BYTES.values())
    assert bytes_of("freekv", also=["quest"]) == BYTES["min_max"], "shared"
    assert bytes_of("freekv", also=["quest", "oracle"]) == BYTES["min_max"]
    assert bytes_of("kvretrieval", also=["freekv"]) == BYTES["low_rank"] + BYTES["min_max"]
    assert bytes_of("freekv", also={"fine": {"summary_size": 16}}) == 3 * BYTES["min_max"]
    spreads = {f"spread {s}": {"index": {"mean_std": {"spread": s}}} for s in (0.5, 1)}
    also = spreads | {"mean_std": {"index": "mean_std"}}
    assert bytes_of("freekv", also=also) == BYTES["min_max"] + 2 * BYTES["mean_std"]
    assert bytes_of("streamingllm") == 0


# -------------------------------------------------------------------------------- a slow home


def test_a_budget_of_tokens():
    """Sink and window as others have them, of one page each; the rest is selected, by tokens."""
    made = config("fier", budget=1024, also={"freekv": {}}, max_budget=2048)
    assert made.page_budget() == (1, 1, 30)
    assert made.most_selected[made.method] == 2048 - 64
    assert config("freekv", also={"by tokens": {"index": "one_bit", "unit": "token"}}).token_major
    assert not config("freekv").token_major
    fine = config("fier", also={"fine": {"summary_size": 8}, "pages": {"unit": "page"}})
    assert [m.per_token for m in fine.methods.values()] == [True, True, False, False]
    assert len(fine.index_kinds) == 2, "pages have the index of tokens"


@pytest.mark.parametrize("home", ["disk", "auto"])
@pytest.mark.parametrize(
    ("method", "options", "culprits"),
    [
        ("oracle", {}, "oracle"),
        ("omnikv", {"also": ["oracle"]}, "oracle"),
        ("fier", {"index": "exact"}, "fier"),
        ("freekv", {"rerank": 4}, "freekv"),
        ("freekv", {"also": ["quest", "oracle"]}, "oracle"),
        (
            "freekv",
            {"also": {"a": {"rerank": 2}, "b": {}, "c": {"index": "exact"}}},
            "each of a, c",
        ),
    ],
    ids=str,
)
def test_what_reads_keys_needs_them_in_memory(home, method, options, culprits):
    message = f"home='{home}' keeps keys where they are slow .* and {culprits} selects by the keys"
    with pytest.raises(RetrievalConfigError, match=message):
        config(method, home=home, **options)


def test_tokens_of_a_slow_home_are_shared_evenly():
    message = "home='disk' gives all KV heads as many slots, and uneven divides single tokens"
    also = {"uneven": {"budget_shares": "pyramid"}}
    with pytest.raises(RetrievalConfigError, match=message):
        config("fier", home="disk", also=also)
    assert config("fier", also=also).token_major
    assert config("freekv", home="disk", also=also).home == "disk"


def test_encoded_pages_are_shared_evenly():
    message = "codec='k8v4' reads contexts within the budget from slots, .* and uneven divides"
    also = {"uneven": {"budget_shares": "pyramid"}}
    with pytest.raises(RetrievalConfigError, match=message):
        config("freekv", home="disk", codec="k8v4", also=also)


def test_all_other_indexes_serve_a_slow_home():
    for preset in presets():
        if preset not in ("oracle", *KEEPING, *BY_HEAD, *WHOLE):
            assert config(preset, home="disk").home == "disk"
    also = {index: {"index": index} for index in BYTES if index != "exact"}
    assert len(config(home="disk", also=also).index_kinds) == len(BYTES) - 1
