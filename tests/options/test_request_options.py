"""Options of requests: every way to give them, every way to get them wrong."""

from typing import Any

import pytest

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import MOST_READ, RequestOptions, RequestReader
from vllm_kvretrieval.retrieval.budget import PageBudget

SERVER = RetrievalConfig.from_options("freekv", {"budget": 1024})


def numbers(threshold: float) -> dict[str, float]:
    return {"correction_threshold": threshold, "mass": 1.0}


@pytest.mark.parametrize("extra_args", [None, {}, {"kv_retrieval": {}}, {"another_plugin": 3}])
def test_a_silent_request_gets_the_servers_options(extra_args):
    options = RequestOptions.parse(extra_args, SERVER)
    assert options == RequestOptions("freekv", SERVER.page_budget(), numbers(0.9), exact=False)


@pytest.mark.parametrize("flat", [False, True])
def test_request_options(flat):
    given: dict[str, Any] = {"budget": 512, "correction_threshold": 0.95, "exact": True}
    if flat:
        extra_args = {f"kv_retrieval_{key}": value for key, value in given.items()}
    else:
        extra_args = {"kv_retrieval": given}
    options = RequestOptions.parse(extra_args, SERVER)
    assert options == RequestOptions(
        "freekv", PageBudget(1, 2, 13), numbers(0.95), True, own_budget=True
    )


def test_flat_keys_complete_nested_ones():
    extra_args = {"kv_retrieval": {"budget": 512}, "kv_retrieval_exact": 1}
    options = RequestOptions.parse(extra_args, SERVER)
    assert options == RequestOptions(
        "freekv", PageBudget(1, 2, 13), numbers(0.9), True, own_budget=True
    )


@pytest.mark.parametrize("home", ["disk", "auto"])
def test_full_attention_stays_in_memory(home):
    """Each step would read the whole file; requests to a server that retrieves may want that."""
    with pytest.raises(RetrievalConfigError, match="full reads everything at each step"):
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
        (
            {"bugdet": 512},
            "of a request has no option 'bugdet'.*Known: budget, .*Did you mean 'budget'",
        ),
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
        ({"method": "frekv"}, r"method='frekv' cannot be served.*also\. Did you mean 'freekv'\?"),
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


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_server_may_forbid_options(flat):
    config = RetrievalConfig.from_options("freekv", {"client_options": ["budget", "mass"]})

    def parse(key, value, of):
        nested = {"kv_retrieval": {key: value}}
        return RequestOptions.parse({f"kv_retrieval_{key}": value} if flat else nested, of)

    assert parse("budget", 512, config).budget.total == 512 // 32
    for key, value in (("exact", True), ("exact", False), ("method", "freekv")):
        with pytest.raises(RetrievalConfigError, match=f"{key} cannot be set.*set budget, mass"):
            parse(key, value, config)
    none = RetrievalConfig.from_options("freekv", {"client_options": []})
    assert RequestOptions.parse(None, none) == RequestOptions.parse({}, config)
    with pytest.raises(RetrievalConfigError, match=r"budget cannot be set.*requests set none"):
        parse("budget", 512, none)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("budget", r"client_options='budget' must be a list .*client_options\+ budget,exact"),
        (["budgets"], "client_options='budgets' is unknown.*budget"),
        (["sink"], "client_options='sink' is unknown"),
        ([3], "client_options=3 is unknown"),
        ({"budget": 1}, "must be a list"),
    ],
    ids=str,
)
def test_options_that_requests_may_set_are_known(value, message):
    with pytest.raises(RetrievalConfigError, match=message):
        RetrievalConfig.from_options("freekv", {"client_options": value})


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


def test_equal_options_are_read_once(monkeypatch):
    """Nested or flat; but what Python takes for equal may be refused all the same."""
    read, checked = list[Any](), RequestOptions._checked

    def note(given, config):
        read.append(given)
        return checked(given, config)

    monkeypatch.setattr(RequestOptions, "_checked", note)
    reader = RequestReader(SERVER)
    first = reader.read({"kv_retrieval": {"budget": 512, "exact": 1}})
    assert reader.read({"kv_retrieval_budget": 512, "kv_retrieval_exact": 1, "other": 3}) is first
    assert len(read) == 1
    assert reader.read({"kv_retrieval": {"budget": 512, "exact": True}}) == first
    assert reader.read(None) == RequestOptions.parse(None, SERVER)
    for wrong in (512.0, "512"):
        with pytest.raises(RetrievalConfigError, match="must be a whole number"):
            reader.read({"kv_retrieval_budget": wrong})
    reader.read({"kv_retrieval": {"correction_threshold": 1}})
    with pytest.raises(RetrievalConfigError, match="correction_threshold=True must be a number"):
        reader.read({"kv_retrieval": {"correction_threshold": True}})


def test_a_client_cannot_fill_the_memory():
    reader = RequestReader(SERVER)
    for number in range(MOST_READ + 10):
        threshold = number / (2 * MOST_READ)
        asked = reader.read({"kv_retrieval": {"correction_threshold": threshold}})
        assert asked.numbers["correction_threshold"] == threshold
    assert len(reader._read) == 10
