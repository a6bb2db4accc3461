"""Options: every way to give them, every way to get them wrong."""

import argparse
import itertools
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_kvretrieval.cli import add_options
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.help import help_texts
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.options.values import parse_size
from vllm_kvretrieval.retrieval.budget import PageBudget
from vllm_kvretrieval.retrieval.presets import OWN

# ------------------------------------------------------------------------------- engine options


def test_defaults():
    config = RetrievalConfig.from_options("freekv", {})
    assert (config.budget, config.page_size, config.dense_layers) == (2048, 32, 1)
    assert config.own.correction_threshold == 0.9
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
            "summary_size, index, pooling, schedule, rerank, unit, correction_threshold, "
            "budget_shares, also, filters, observation, heads, prefill_budget, prefill_chunk, "
            "prefill_queries, dense_layers",
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
        ({"sink": 0}, r"sink=0 must be a positive multiple of page_size=32; try 32, or leave it"),
        ({"window": 40}, r"window=40 must be a positive multiple of page_size=32; try 32"),
        ({"window": -32}, r"window=-32 must be a positive multiple"),
        ({"window": 64.0}, r"kv_retrieval\.window=64\.0 must be a whole number"),
        ({"page_size": 8}, r"page_size=8 is not supported; use one of \(16, 32, 64, 128\)"),
        ({"summary_size": 4}, r"summary_size=4 is not .* page_size=32; use one of \(8, 16, 32\)"),
        ({"summary_size": 64}, r"summary_size=64 is not supported with page_size=32; use one of"),
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
        ({"correction_threshold": 10**400}, r"correction_threshold=1000+ must be a number"),
        ({"attention": "fast"}, "attention='fast' is unknown.*vllm.*own"),
        ({"schedule": "whole"}, "'whole' cannot be combined with freekv: full attention and retr"),
        ({"correction_threshold": float("nan")}, r"correction_threshold=nan must be a number"),
    ],
    ids=str,
)
def test_impossible_options(options, message):
    with pytest.raises(RetrievalConfigError, match=message):
        RetrievalConfig.from_options("freekv", options)


@pytest.mark.parametrize(
    ("key", "value"), [("window", 64), ("correction_threshold", 0.9), ("summary_size", 8)]
)
def test_options_that_streamingllm_would_ignore(key, value):
    message = f"kv_retrieval.{key}={value} has no effect with streamingllm"
    with pytest.raises(RetrievalConfigError, match=message):
        RetrievalConfig.from_options("streamingllm", {key: value})


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
    assert config.own.correction_threshold == threshold


# ------------------------------------------------------------------------------ request options


SERVER = RetrievalConfig.from_options("freekv", {"budget": 1024})


@pytest.mark.parametrize("extra_args", [None, {}, {"kv_retrieval": {}}, {"another_plugin": 3}])
def test_a_silent_request_gets_the_servers_options(extra_args):
    options = RequestOptions.parse(extra_args, SERVER)
    assert options == RequestOptions("freekv", SERVER.page_budget(), 0.9, exact=False)


@pytest.mark.parametrize("flat", [False, True])
def test_request_options(flat):
    given: dict[str, Any] = {"budget": 512, "correction_threshold": 0.95, "exact": True}
    if flat:
        extra_args = {f"kv_retrieval_{key}": value for key, value in given.items()}
    else:
        extra_args = {"kv_retrieval": given}
    options = RequestOptions.parse(extra_args, SERVER)
    assert options == RequestOptions("freekv", PageBudget(1, 2, 13), 0.95, True, own_budget=True)


def test_flat_keys_complete_nested_ones():
    extra_args = {"kv_retrieval": {"budget": 512}, "kv_retrieval_exact": 1}
    options = RequestOptions.parse(extra_args, SERVER)
    assert options == RequestOptions("freekv", PageBudget(1, 2, 13), 0.9, True, own_budget=True)


@pytest.mark.parametrize(("key", "value"), [("window", 64), ("sink", 64), ("index", "min_max")])
def test_options_that_full_would_ignore(key, value):
    with pytest.raises(RetrievalConfigError, match=f"{key}={value!r} has no effect with full"):
        RetrievalConfig.from_options("full", {key: value})


@pytest.mark.parametrize("home", ["disk", "auto"])
def test_full_attention_stays_in_memory(home):
    """Each step would read the whole file; requests to a server that retrieves may want that."""
    with pytest.raises(RetrievalConfigError, match="with full steps read everything; leave it out"):
        RetrievalConfig.from_options("full", {"home": home})
    assert (
        "full" in RetrievalConfig.from_options("freekv", {"home": home, "also": ["full"]}).methods
    )


def test_full_attention_by_name():
    """It is offered where it is asked for, and whoever names it attends to everything."""
    assert "full" not in RetrievalConfig.from_options("freekv", {}).methods
    server = RetrievalConfig.from_options("freekv", {"also": ["full"], "allow_exact": False})
    options = RequestOptions.parse({"kv_retrieval_method": "full"}, server)
    assert options.exact
    assert options.wants_exact_prefix(server)
    with pytest.raises(RetrievalConfigError, match="budget=512 has no effect with full"):
        RequestOptions.parse({"kv_retrieval": {"method": "full", "budget": 512}}, server)
    with pytest.raises(RetrievalConfigError, match="exact=False cannot be had with full"):
        RequestOptions.parse({"kv_retrieval": {"method": "full", "exact": False}}, server)
    assert RequestOptions.parse({"kv_retrieval": {"method": "full", "exact": True}}, server).exact
    assert RequestOptions.parse({}, RetrievalConfig.from_options("full", {})).exact


def test_a_request_keeps_the_servers_sink_and_window():
    server = RetrievalConfig.from_options("freekv", {"budget": 1024, "sink": 64, "window": 128})
    options = RequestOptions.parse({"kv_retrieval": {"budget": 256}}, server)
    assert options.budget == PageBudget(2, 4, 2)
    with pytest.raises(RetrievalConfigError, match=r"budget=192 is too small.*at least 224"):
        RequestOptions.parse({"kv_retrieval": {"budget": 192}}, server)


def test_a_request_may_ask_for_the_sink_and_window_baseline():
    options = RequestOptions.parse({"kv_retrieval_method": "streamingllm"}, SERVER)
    assert options.budget == PageBudget(sink=2, window=30, select=0)
    assert RequestOptions.parse({"kv_retrieval_method": "freekv"}, SERVER).budget.select > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bugdet": 512}, "of a request has no option 'bugdet'.*Known: budget, correction_thresh"),
        ({"page_size": 64}, "of a request has no option 'page_size'"),
        ({"budget": 2048}, r"budget=2048 exceeds the server's limit of 1024.*max_budget 2048"),
        ({"budget": 100}, r"kv_retrieval\.budget=100 must be a positive multiple.*try 128"),
        ({"budget": 64}, r"kv_retrieval\.budget=64 is too small"),
        ({"budget": 0}, r"kv_retrieval\.budget=0 must be a positive multiple"),
        ({"budget": "512"}, r"kv_retrieval\.budget='512' must be a whole number"),
        ({"budget": 512.0}, r"kv_retrieval\.budget=512\.0 must be a whole number"),
        ({"budget": None}, r"kv_retrieval\.budget=None must be a whole number"),
        ({"correction_threshold": "high"}, "correction_threshold='high' must be a number"),
        ({"correction_threshold": False}, "correction_threshold=False must be a number"),
        ({"correction_threshold": float("nan")}, "correction_threshold=nan must be a number"),
        ({"exact": "yes"}, r"exact='yes' must be true or false"),
        ({"exact": 2}, r"exact=2 must be true or false"),
        ({"exact": None}, r"exact=None must be true or false"),
        ({"exact_prefix": "yes"}, r"kv_retrieval\.exact_prefix='yes' must be true or false"),
        ({"exact_prefix": None}, r"kv_retrieval\.exact_prefix=None must be true or false"),
        ({"method": "quest"}, "method='quest' cannot be served.*use one of freekv, streamingllm"),
        ({"method": 3}, "method=3 cannot be served"),
        (
            {"method": "streamingllm", "correction_threshold": 0.8},
            "correction_threshold=0.8 has no effect with streamingllm",
        ),
        ({"method": ["freekv"]}, r"method=\['freekv'\] cannot be served"),
    ],
    ids=str,
)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_impossible_request_options(options, message, flat):
    nested = {"kv_retrieval": options}
    extra_args = {f"kv_retrieval_{key}": v for key, v in options.items()} if flat else nested
    with pytest.raises(RetrievalConfigError, match=message):
        RequestOptions.parse(extra_args, SERVER)


def test_a_server_may_allow_more_and_less():
    server = {"budget": 1024, "max_budget": 4096, "allow_exact": False}
    config = RetrievalConfig.from_options("freekv", server)
    assert RequestOptions.parse(None, config).budget.total == 1024 // 32
    assert RequestOptions.parse({"kv_retrieval_budget": 4096}, config).budget.total == 4096 // 32
    assert not RequestOptions.parse({"kv_retrieval_exact": False}, config).exact
    for options, message in (
        ({"budget": 4128}, "budget=4128 exceeds the server's limit of 4096"),
        ({"exact": True}, "exact=True is not allowed by this server .* budget of up to 4096"),
    ):
        with pytest.raises(RetrievalConfigError, match=message):
            RequestOptions.parse({"kv_retrieval": options}, config)


def test_a_server_may_share_exact_prefixes_only():
    config = RetrievalConfig.from_options("freekv", {"reuse": "exact"})
    for options in ({}, {"exact_prefix": True}):
        assert RequestOptions.parse({"kv_retrieval": options}, config).exact_prefix
    with pytest.raises(
        RetrievalConfigError, match=r"exact_prefix=False is not allowed .* exact prefixes only"
    ):
        RequestOptions.parse({"kv_retrieval_exact_prefix": 0}, config)
    assert not RequestOptions.parse(None, SERVER).exact_prefix
    assert RequestOptions.parse({"kv_retrieval_exact_prefix": 1}, SERVER).exact_prefix


def test_request_options_must_be_a_mapping():
    with pytest.raises(RetrievalConfigError, match='use flat keys such as "kv_retrieval_budget"'):
        RequestOptions.parse({"kv_retrieval": 512}, SERVER)


def test_a_streamingllm_server_cannot_select():
    server = RetrievalConfig.from_options("streamingllm", {"budget": 1024})
    with pytest.raises(RetrievalConfigError, match="runs streamingllm; use one of streamingllm"):
        RequestOptions.parse({"kv_retrieval_method": "freekv"}, server)


# --------------------------------------------------------------------------------- command line


@pytest.fixture
def parse():
    """Parses a command line with all of vLLM's own engine arguments; gives additional_config."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return lambda *argv: parser.parse_args(argv).additional_config


OTHERS = ("--additional-config", '{"other": 7, "kv_retrieval": {"sink": 64, "budget": 512}}')


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), {}),
        (
            ("--kv-retrieval.budget", "1024", "--kv-retrieval.correction_threshold=0.9"),
            {"kv_retrieval": {"budget": 1024, "correction_threshold": 0.9}},
        ),
        (("--kv_retrieval.budget", "1024"), {"kv_retrieval": {"budget": 1024}}),
        (("--kv-retrieval", '{"budget": 1024}'), {"kv_retrieval": {"budget": 1024}}),
        (
            ("--additional-config.kv_retrieval.budget", "1024"),
            {"kv_retrieval": {"budget": 1024}},
        ),
        (OTHERS, {"other": 7, "kv_retrieval": {"sink": 64, "budget": 512}}),
        (
            ("--kv-retrieval.budget", "1024", *OTHERS),
            {"other": 7, "kv_retrieval": {"sink": 64, "budget": 1024}},
        ),
        (
            (*OTHERS, "--kv-retrieval.budget", "1024"),
            {"other": 7, "kv_retrieval": {"sink": 64, "budget": 1024}},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_command_line(parse, argv, expected):
    assert parse(*argv) == expected
    assert parse() == {}, "the parser keeps nothing for its next command line"


@pytest.mark.parametrize("text", ["1024", "[]", "budget=1024"])
def test_command_line_wants_an_object(parse, text, capsys):
    with pytest.raises(SystemExit):
        parse("--kv-retrieval", text)
    assert "expected a JSON object such as '{\"budget\": 1024}'" in capsys.readouterr().err


def test_options_are_added_once_and_only_beside_vllms():
    other = argparse.ArgumentParser()
    add_options(other)
    assert "--kv-retrieval" not in other.format_help()
    engine = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    before = len(engine._actions)
    add_options(engine)
    assert len(engine._actions) == before


def test_help_explains_every_option():
    """Every option has a help text, and every help text an option, as a user sees them."""
    vllm = Path(sys.executable).with_name("vllm")
    shown = subprocess.run(
        [vllm, "serve", "--help=kv-retrieval"],
        env=os.environ | {"COLUMNS": "600"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for key, text in help_texts().items():
        assert f"--kv-retrieval.{key}: {text}" in shown
    assert set(help_texts()) == set(RetrievalConfig.__dataclass_fields__) - {"method"}
    for method in OWN:
        assert method in shown
