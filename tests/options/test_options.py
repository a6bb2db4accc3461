"""The table of options says of each option what the engine does with it."""

import contextlib
from typing import Any

import pytest

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.help import markdown
from vllm_kvretrieval.options.of_requests import REQUEST
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.options.table import OF_METHOD, OPTIONS
from vllm_kvretrieval.retrieval.families import (
    DroppingMethod,
    FilterMethod,
    ScoredMethod,
    family_with,
    having,
)
from vllm_kvretrieval.retrieval.presets import OWN

FAMILIES = {name: family_with(preset.schedule) for name, preset in OWN.items()}

VALUES: dict[str, Any] = {
    "budget": 2048,
    "sink": 128,
    "window": 128,
    "page_size": 128,
    "summary_size": 16,
    "index": "mean",
    "pooling": "max",
    "rerank": 2,
    "unit": "page",
    "correction_threshold": 0.5,
    "budget_shares": "pyramid",
    "also": [],
    "filters": [2, 8],
    "filter_heads": "own",
    "heads": [[0, 1]],
    "prefill_budget": 2048,
    "prefill_share": 0.25,
    "prefill_budget_shares": "uniform",
    "prefill_depth": 0.5,
    "prefill_chunk": 256,
    "prefill_queries": 4,
    "prefill_sampling": "dissimilar",
    "prefill_pooling": "max",
    "dense_layers": 2,
    "max_budget": 4096,
    "memory_fraction": 0.5,
    "exact_below": 4096,
    "drafts": 4,
    "lossless": True,
    "allow_exact": False,
    "sources": True,
    "sessions": True,
    "client_options": ["budget"],
    "reuse": "exact",
    "attention": "own",
    "home": "disk",
    "home_bytes": "1GiB",
    "home_path": "/tmp",
    "store": "/tmp/store",
    "store_days": 30,
    "codec": "k8v4",
    "streaming_attention": True,
    "recall_cache_bytes": "1GiB",
}


def value_of(key: str, method: str) -> Any:
    """A value of an option that a method takes, if it takes any."""
    if key == "observation":
        return "last" if FAMILIES[method] is FilterMethod else 8
    if key == "mass":
        return 1 if method == "freekv" else 0.9
    if key == "remainder":
        return 0 if method == "freekv" else 0.01
    if key == "outliers":
        return 0 if method == "freekv" else 0.1
    return OWN[method].schedule if key == "schedule" else VALUES[key]


def refusal(method: str, key: str) -> str:
    """The message of the engine if the option is given; empty: the engine accepts it."""
    needs = {OPTIONS[key].needs} - {""}
    beside = {"home": "disk"} if OPTIONS[key].slow_home else {}
    options = beside | {name: value_of(name, method) for name in (*needs, key)}
    try:
        RetrievalConfig.from_options(method, options)
    except RetrievalConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", OPTIONS)
def test_an_option_has_an_effect_with_the_methods_that_the_table_names(key):
    for method, family in FAMILIES.items():
        said = refusal(method, key)
        if family is ScoredMethod and OWN[method].unit == "token" and key.startswith("prefill_"):
            assert "which selects no pages by an index" in said
            continue
        refused = any(
            f".{name}=" in said and f" {OPTIONS[name].verdict} {method}, " in said
            for name in {key, OPTIONS[key].needs} - {""}
        )
        assert refused == (family not in having(key)), said


@pytest.mark.parametrize("key", OF_METHOD)
def test_options_of_a_method_are_those_that_another_method_may_have(key):
    """Those of the engine are refused there."""
    also = {"mine": {"preset": "freekv", key: value_of(key, "freekv")}}
    takes = FAMILIES["freekv"] in having(key)
    refused = pytest.raises(RetrievalConfigError, match=f"also: mine: {key}=.* no effect with mine")
    with contextlib.nullcontext() if takes else refused:
        RetrievalConfig.from_options("quest", {"also": also})
    for other in OPTIONS.keys() - {*OF_METHOD}:
        with pytest.raises(RetrievalConfigError, match=f"mine has no option '{other}'"):
            RetrievalConfig.from_options("quest", {"also": {"mine": {other: 1}}})


def test_options_that_need_a_slow_home_are_refused_without_one():
    for key in OPTIONS:
        said = refusal_in_memory(key)
        assert ("has no effect with home=device" in said) == OPTIONS[key].slow_home, said


def refusal_in_memory(key: str) -> str:
    try:
        RetrievalConfig.from_options("freekv", {"home": "device", key: value_of(key, "freekv")})
    except RetrievalConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", REQUEST)
def test_an_option_of_a_request_has_an_effect_as_the_table_says(key):
    values: dict[str, Any] = {"budget": 1024, "correction_threshold": 0.5}
    values |= {"exact": True, "exact_prefix": True}
    values |= {
        "drafts": 0,
        "lossless": True,
        "prefill_budget": 0,
        "prefill_share": 0.25,
        "mass": 0.9,
        "sources": False,
        "session": "a",
        "pin": True,
        "retain": 60,
        "prefetch": "a",
    }
    for method, family in FAMILIES.items():
        if family is FilterMethod or method in ("quest", "kvretrieval"):
            continue
        server = RetrievalConfig.from_options(method, {})
        options = {key: values.get(key, method)}
        try:
            RequestOptions.parse({"kv_retrieval": options}, server)
            said = ""
        except RetrievalConfigError as error:
            said = str(error)
        if family not in having(key, of_request=True):
            assert f" {REQUEST[key].verdict} {method}, " in said
        elif said:
            reasons = (
                "selects anew at every step",
                "cannot be reached with",
                "is not served, since all",
                "needs a server that drafts",
                "--kv-retrieval.sessions true",
            )
            assert any(reason in said for reason in reasons)


def test_the_table_in_markdown():
    shown = markdown(OPTIONS)
    assert shown.count("\n") == len(OPTIONS) + 1
    assert "; only for methods with an index | 0, or 2 to 64 | the method's |" in shown
    assert "only for `omnikv`" in shown
    assert DroppingMethod.methods in shown
    assert "](methods.md#budget)" in shown
    assert "](" not in markdown(OPTIONS, ["budget_shares"], links=False)
    assert markdown(OPTIONS, ["home", "budget"]).index("`home`") < 100
