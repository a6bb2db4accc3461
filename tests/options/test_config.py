"""Options of engines: every way to get them wrong."""

import itertools
import math
from dataclasses import fields
from typing import Any

import pytest
import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.methods.kept_prompts import LocalHeads, kept_prompts
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.files import LOADERS
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.options.table import OPTIONS
from vllm_kvretrieval.retrieval.budget import PageBudget
from vllm_kvretrieval.retrieval.families.scored import CORRECTION_THRESHOLD, MASS
from vllm_kvretrieval.values import parse_size

SERVER = RetrievalConfig.from_options("freekv", {"budget": 1024})


def test_defaults():
    config = RetrievalConfig.from_options("freekv", {})
    assert (config.budget, config.page_size, config.dense_layers) == (2048, 32, 1)
    assert CORRECTION_THRESHOLD.of(config.own) == 0.9
    assert config.page_budget() == PageBudget(sink=4, window=4, select=56)


@pytest.mark.parametrize(
    ("budget", "page", "sink", "window"),
    [
        (128, 32, 1, 2),  # never less than a page of sink, two of window
        (512, 32, 1, 2),
        (2048, 32, 4, 4),
        (2496, 32, 4, 4),  # a 16th, rounded down to a page
        (8192, 32, 16, 16),
        (4096, 128, 2, 2),
    ],
)
def test_default_sink_and_window(budget, page, sink, window):
    config = RetrievalConfig.from_options("freekv", {"budget": budget, "page_size": page})
    assert config.page_budget() == PageBudget(sink, window, budget // page - sink - window)
    assert config.page_budget().total * page == budget


def test_given_sink_and_window():
    options = {"budget": 512, "sink": 32, "window": 64}
    assert RetrievalConfig.from_options("freekv", options).page_budget() == (1, 2, 13)


def test_budgets_of_the_fier_paper():
    """Its smallest: 64 tokens in groups of 32, and 32 in groups of 16."""
    for page, budget in ((32, 64), (16, 32)):
        options = {"sink": 0, "page_size": page, "budget": budget}
        assert RetrievalConfig.from_options("fier", options).page_budget() == PageBudget(0, 1, 1)


@pytest.mark.parametrize(("given", "sink"), [({}, 1), ({"sink": 0}, 0), ({"sink": 32}, 32)])
def test_sink_of_a_method_that_drops(given, sink):
    """The user's, also none, in place of the method's."""
    config = RetrievalConfig.from_options("entropykv", {"budget": 64} | given)
    room: Any = None  # is asked when a request is admitted
    kept = kept_prompts(
        config, LocalHeads([slice(0, 1)]), torch.zeros(1, 1, dtype=torch.int32), room
    )
    assert kept is not None
    assert kept.rules[0].sink == sink


def test_streamingllm_gives_the_budget_to_the_window():
    config = RetrievalConfig.from_options("streamingllm", {"budget": 512, "sink": 64})
    assert config.page_budget() == PageBudget(sink=2, window=14, select=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Each message names the key and the value, and says what to do.
        (
            {"bugdet": 1024},
            r"no option 'bugdet' \(value 1024\)\. Known: budget, sink, window, page_size, "
            "summary_size, index, pooling, schedule, rerank, mass, remainder, outliers, unit, "
            "correction_threshold, "
            "budget_shares, also, filters, filter_heads, observation, heads, prefill_budget, "
            "prefill_share, prefill_budget_shares, prefill_depth, prefill_chunk, prefill_queries, "
            "prefill_sampling, prefill_pooling, "
            "dense_layers",
        ),
        ({"method": "freekv"}, "method='freekv'.*use --attention-backend freekv"),
        ({"budget": "1024"}, r"kv_retrieval\.budget='1024' must be a whole number.*e\.g\. 1024"),
        ({"budget": 1024.0}, r"kv_retrieval\.budget=1024\.0 must be a whole number"),
        ({"budget": True}, r"kv_retrieval\.budget=True must be a whole number"),
        ({"budget": None}, r"kv_retrieval\.budget=None must be a whole number"),
        ({"budget": 1000}, r"budget=1000 must be a positive multiple of page_size=32; try 992"),
        ({"budget": 0}, r"budget=0 must be a positive multiple of page_size=32; try 128"),
        ({"budget": -64}, r"budget=-64 must be a positive multiple"),
        (
            {"budget": 64},
            r"budget=64 is too small: sink=32 \+ window=64 \+ one page of 32 need .*128",
        ),
        (
            {"budget": 512, "sink": 256, "window": 256},
            r"budget=512 is too small: sink=256 \+ window=256 .* at least 544 tokens\. "
            "Raise budget, or lower sink and window",
        ),
        ({"sink": "64"}, r"kv_retrieval\.sink='64' must be a whole number"),
        ({"sink": False}, r"kv_retrieval\.sink=False must be a whole number"),
        ({"sink": 8}, r"sink=8 must be 0 or a positive multiple of page_size=32; try 32, or"),
        ({"sink": -32}, r"sink=-32 must be 0 or a positive multiple"),
        ({"window": 40}, r"window=40 must be a positive multiple of page_size=32; try 32"),
        ({"window": -32}, r"window=-32 must be a positive multiple"),
        ({"window": 64.0}, r"kv_retrieval\.window=64\.0 must be a whole number"),
        ({"page_size": 8}, r"page_size=8 is not supported; use one of \(16, 32, 64, 128, 256\)"),
        (
            {"summary_size": 4},
            r"summary_size=4 is not .* page_size=32 .*; use one of \(8, 16, 32\)",
        ),
        (
            {"summary_size": 64},
            r"summary_size=64 is not supported with page_size=32 and an index of min_max; use",
        ),
        ({"summary_size": "8"}, r"kv_retrieval\.summary_size='8' must be a whole number"),
        ({"page_size": "32"}, r"kv_retrieval\.page_size='32' must be a whole number"),
        ({"page_size": 64, "budget": 1056}, r"budget=1056 must be .* page_size=64; try 1024"),
        ({"dense_layers": -1}, r"dense_layers=-1 must be 0 or more; 1 is"),
        ({"dense_layers": 1.0}, r"kv_retrieval\.dense_layers=1\.0 must be a whole number"),
        ({"dense_layers": True}, r"kv_retrieval\.dense_layers=True must be a whole number"),
        (
            {"correction_threshold": "0.8"},
            r"correction_threshold='0\.8' must be a number between -1 and 1, e\.g\. 0\.8",
        ),
        ({"correction_threshold": True}, r"correction_threshold=True must be a number"),
        ({"correction_threshold": None}, "correction_threshold=None must have a value; leave it"),
        ({"correction_threshold": 1.5}, r"correction_threshold=1\.5 must be .* between -1 and 1"),
        ({"reuse": "some"}, r"kv_retrieval\.reuse='some' is unknown; use one of all, exact"),
        ({"reuse": True}, r"kv_retrieval\.reuse=True is unknown"),
        ({"allow_exact": "no"}, r"allow_exact='no' must be true or false"),
        ({"max_budget": 1024}, r"max_budget=1024 must be budget=2048 or more: .* Raise it"),
        ({"max_budget": 3000}, r"max_budget=3000 must be a positive multiple .* try 3008"),
        ({"max_budget": "4096"}, r"max_budget='4096' must be a whole number"),
        ({"correction_threshold": 10**400}, r"correction_threshold=1000+\.\.\. must be a number"),
        ({"attention": "fast"}, "attention='fast' is unknown.*vllm.*own"),
        ({"schedule": "whole"}, "'whole' cannot be combined with freekv: full attention and retr"),
        ({"correction_threshold": float("nan")}, r"correction_threshold=nan must be a number"),
    ],
    ids=str,
)
def test_impossible_options(options, message):
    with pytest.raises(RetrievalConfigError, match=message):
        RetrievalConfig.from_options("freekv", options)


@pytest.mark.parametrize("options", [None, 5, "budget", [("budget", 512)]])
def test_options_must_be_a_mapping(options):
    with pytest.raises(RetrievalConfigError, match=r"must be a mapping.*--kv-retrieval\.budget"):
        RetrievalConfig.from_options("freekv", options)


def test_streamingllm_needs_a_page_beside_the_sink():
    with pytest.raises(RetrievalConfigError, match=r"sink=512 \+ one page of 32 need at least 544"):
        RetrievalConfig.from_options("streamingllm", {"budget": 512, "sink": 512})


@pytest.mark.parametrize("number", [10**30, -(10**400), 10**5000], ids=["30", "400", "5000"])
def test_huge_numbers_are_refused(number):
    """Every option refuses them in every place, whether or not Python can print them."""
    placed = (number, [number], {"mine": {"index": {"low_rank": {"rank": number}}}}, {number: 1})
    keys = {field.name for field in fields(RetrievalConfig)}
    for key, value in itertools.product(keys - {"budget_shares"}, placed):  # shares may be large
        with pytest.raises(RetrievalConfigError, match="kv_retrieval"):
            RetrievalConfig.from_options("freekv", {key: value})
        with pytest.raises(RetrievalConfigError, match="kv_retrieval"):
            RequestOptions.parse({"kv_retrieval": {key: value}}, SERVER)
        with pytest.raises(RetrievalConfigError, match="kv_retrieval"):
            RequestOptions.parse({f"kv_retrieval_{key}": value}, SERVER)
    for options in placed:
        with pytest.raises(RetrievalConfigError, match="kv_retrieval"):
            RetrievalConfig.from_options("freekv", options)
        with pytest.raises(RetrievalConfigError, match="kv_retrieval"):
            RequestOptions.parse({"kv_retrieval": options}, SERVER)


@pytest.mark.parametrize("key", [*OPTIONS, "x" * 100_000])
def test_what_is_refused_does_not_come_back_whole(key):
    for value in ("x" * 100_000, ["x" * 100_000], {"x" * 100_000: 1}):
        if key == "store":
            continue  # may have any name
        with pytest.raises(RetrievalConfigError) as error:
            RetrievalConfig.from_options("kvretrieval", {key: value})
        assert len(str(error.value)) < 2000
        with pytest.raises(RetrievalConfigError) as error:
            RequestOptions.parse({f"kv_retrieval_{key}": value}, SERVER)
        assert len(str(error.value)) < 2000


@pytest.mark.parametrize("key", LOADERS)
def test_empty_names_of_files_are_refused_in_words(key):
    with pytest.raises(RetrievalConfigError, match=f"{key}='' names no file"):
        RetrievalConfig.from_options("kvretrieval", {key: ""})


@pytest.mark.parametrize("size", ["9" * 400, 10**400, "9" * 400 + "GiB", "9000000TiB"])
def test_huge_sizes_are_refused(size):
    with pytest.raises(RetrievalConfigError, match="up to 9223372036854775807"):
        RetrievalConfig.from_options("freekv", {"home": "disk", "home_bytes": size})
    with pytest.raises(RetrievalConfigError, match="up to 9223372036854775807"):
        parse_size("window", size)


@pytest.mark.parametrize("key", ["budget", "sink", "window", "max_budget", "rerank"])
def test_more_tokens_than_can_be_counted(key):
    with pytest.raises(RetrievalConfigError, match=f"{key}=2147483648 must be 2147483647 at most"):
        RetrievalConfig.from_options("kvretrieval", {key: 1 << 31})


def test_large_budgets_are_no_work():
    """No loop counts up to them."""
    config = RetrievalConfig.from_options("kvretrieval", {"budget": 1 << 30})
    assert config.most_selected["kvretrieval"] == (1 << 30) // 32 - 3
    with pytest.raises(RetrievalConfigError, match=rf"at least {(1 << 30) + 96} tokens"):
        RetrievalConfig.from_options("kvretrieval", {"sink": 1 << 30})


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e400])
def test_parameters_of_an_index_are_finite(value):
    with pytest.raises(RetrievalConfigError, match="mean_std has spread, all numbers"):
        RetrievalConfig.from_options("freekv", {"index": {"mean_std": {"spread": value}}})


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("infllm", {"budget": 256}, "too small: sink=128 .* 512 tokens. Raise budget."),
        (
            "streamingllm",
            {"budget": 64, "also": ["freekv"]},
            "too small for freekv: sink=32 .* 128 tokens. Raise budget, or leave freekv out.",
        ),
        (
            "raas",
            {"budget": 64, "sink": 32, "also": ["freekv"]},
            "for freekv: .* 128 tokens. Raise budget, or lower sink, or leave freekv out.",
        ),
        (
            "raas",
            {"budget": 32, "also": ["streamingllm"]},
            "for streamingllm: sink=32 .* 64 tokens. Raise budget, or leave streamingllm out.",
        ),
    ],
)
def test_who_needs_a_larger_budget(method, options, message):
    with pytest.raises(RetrievalConfigError, match=f"kv_retrieval.budget=.* {message}$"):
        RetrievalConfig.from_options(method, options)


@pytest.mark.parametrize("method", ["raas", "tova", "snapkv"])
def test_streamingllm_is_offered_where_it_has_room(method):
    """An engine that does not name it is not refused for its sake."""
    assert [*RetrievalConfig.from_options(method, {"budget": 32}).methods] == [method]
    room = RetrievalConfig.from_options(method, {"budget": 64})
    assert [*room.methods] == [method, "streamingllm"]


@pytest.mark.parametrize("threshold", [-1, 0, 0.5, 1])
def test_thresholds(threshold):
    config = RetrievalConfig.from_options("freekv", {"correction_threshold": threshold})
    assert CORRECTION_THRESHOLD.of(config.own) == threshold


@pytest.mark.parametrize(
    ("method", "options", "variant", "left"),
    [
        ("shadowkv", {"outliers": 0.3}, {"index": "mean"}, (0, 1, 0)),
        ("shadowkv", {"outliers": 0.3}, {"rerank": 4, "summary_size": 16}, (0, 1, 0)),
        ("shadowkv", {"outliers": 0.3}, {"pooling": "max"}, (0.3, 1, 0)),
        ("kvretrieval", {"mass": 0.9}, {"pooling": "max"}, (0, 1, 0)),
        ("kvretrieval", {"mass": 0.9}, {"index": "landmark", "outliers": 0.1}, (0.1, 1, 0)),
        ("kvretrieval", {"mass": 0.9}, {"index": "min_max"}, (0, 0.9, 0)),
        ("kvretrieval", {"remainder": 0.01}, {"index": "min_max"}, (0, 1, 0)),
        ("kvretrieval", {"remainder": 0.01}, {"mass": 0.9}, (0, 0.9, 0.01)),
    ],
    ids=str,
)
def test_a_variant_goes_without_options_that_need_what_it_names(method, options, variant, left):
    made = RetrievalConfig.from_options(method, {**options, "also": {"variant": variant}})
    changed = made.methods["variant"]
    assert (changed.outliers, MASS.of(changed), changed.remainder) == left
