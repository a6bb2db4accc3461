"""The options of a slow home."""

import re

import pytest
from vllm.config import VllmConfig
from vllm.utils.argparse_utils import human_readable_int

from vllm_kvretrieval.attention.cpu.refusals import check_home
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestReader
from vllm_kvretrieval.values import parse_size

MIB = 1 << 20


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("64GiB", 64 << 30),
        ("1.5 MiB", 3 << 19),
        ("2gib", 2 << 30),
        ("2TiB", 2 << 40),
        ("4096", 4096),
        (4096, 4096),
        ("16KiB", 1 << 14),
        ("100B", 100),
        ("64Gi", 64 << 30),
        ("64gi", 64 << 30),
        ("64GB", 64 * 10**9),
        ("64gb", 64 * 10**9),
        ("64G", 64 << 30),
        ("64g", 64 * 10**9),
        ("512M", 512 << 20),
        ("1.5T", 3 << 39),
        ("1.5t", 15 * 10**11),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read(given, size):
    options = {"home": "disk", "home_bytes": given, "recall_cache_bytes": given}
    config = RetrievalConfig.from_options("freekv", options)
    assert config.home_bytes == config.recall_cache_bytes == size


@pytest.mark.parametrize("given", ["4096", "64g", "64G", "512M", "2t", "3k", "3K"])
def test_sizes_mean_what_they_mean_to_vllm(given):
    """It reads some of them on the command line, before we see them."""
    assert parse_size("home_bytes", given) == human_readable_int(given)


@pytest.mark.parametrize(
    "size", ["64XB", "64i", "1e9", "many", "-1", 0, "0.5", "", True, None, 1.5, [1], "GiB", "G"]
)
def test_sizes_that_are_none(size):
    options = {"home": "disk", "home_bytes": size}
    if size is None:
        assert RetrievalConfig.from_options("freekv", options).home_bytes is None
        return
    message = f"kv_retrieval.home_bytes={size!r} must be a size such as 64GiB"
    with pytest.raises(RetrievalConfigError, match=re.escape(message)):
        RetrievalConfig.from_options("freekv", options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"home": "tape"}, "kv_retrieval.home='tape' is unknown; use one of auto, device, host"),
        ({"codec": "zip"}, "codec='zip'"),
        ({"codec": "k8v4"}, "codec='k8v4' is for pages in a file, *use home=disk *, or codec=raw"),
        (
            {"home": "disk", "home_path": "/not/there"},
            "kv_retrieval.home_path='/not/there': no file can be made there (No such",
        ),
        ({"home": "disk", "home_path": 3}, "home_path=3 is no directory"),
        ({"home": "disk", "home_path": ""}, "home_path='' is no directory"),
        ({"store": ""}, "store='' is no directory"),
    ],
)
def test_impossible_homes(options, message):
    match = re.escape(message).replace(r"\*", ".*")
    with pytest.raises(RetrievalConfigError, match=match) as refused:
        RetrievalConfig.from_options("freekv", options)
    assert "kv_retrieval.kv_retrieval" not in str(refused.value)


def test_only_pages_stream():
    options = {"home": "disk", "streaming_attention": True}
    assert RetrievalConfig.from_options("ttkv", options).streaming_attention
    with pytest.raises(RetrievalConfigError, match=r"is for pages, and fier selects single tokens"):
        RetrievalConfig.from_options("fier", options)


def test_host_memory_is_no_home_on_the_cpu():
    config = RetrievalConfig.from_options("freekv", {"home": "host", "home_bytes": "1GiB"})
    with pytest.raises(RetrievalConfigError, match=r"home='host' is for GPUs; .* or home=disk"):
        check_home(VllmConfig(), config)


def test_a_file_is_not_read_in_full_at_each_step():
    config = RetrievalConfig.from_options("freekv", {"exact_below": 4096, "home": "disk"})
    with pytest.raises(RetrievalConfigError, match=r"exact_below=4096 has no effect with home=d"):
        check_home(VllmConfig(), config)
    with pytest.raises(RetrievalConfigError, match=r"exact_below=4096 has no effect with snapkv"):
        RetrievalConfig.from_options("snapkv", {"exact_below": 4096})


def test_blocks_of_short_contexts_are_exact():
    config = RetrievalConfig.from_options("freekv", {"budget": 1024, "exact_below": 4096})
    assert RequestReader(config).read(None).certain_budget(config) == 4095
    config = RetrievalConfig.from_options("freekv", {"budget": 1024, "exact_below": 512})
    assert RequestReader(config).read(None).certain_budget(config) == 1024


def test_kivi_needs_no_option_but_its_name():
    """The recent 128 tokens are raw, as in the paper."""
    config = RetrievalConfig.from_options("kivi", {})
    assert (config.home, config.codec, config.open_pages) == ("disk", "k2v2", 4)
    assert RetrievalConfig.from_options("kivi", {"codec": "k4v4"}).codec == "k4v4"
    full = RetrievalConfig.from_options("full", {"home": "disk", "codec": "k4v4"})
    assert (full.own.whole, full.open_pages) == (True, 0)
    with pytest.raises(RetrievalConfigError, match="reads everything at each step"):
        RetrievalConfig.from_options("kivi", {"codec": "raw"})
    with pytest.raises(RetrievalConfigError, match=r"also: kivi: how the cache is encoded .* full"):
        RetrievalConfig.from_options("freekv", {"also": ["kivi"]})


def test_kvquant_needs_no_option_but_its_name():
    """Recent tokens are encoded, too, as in the paper."""
    config = RetrievalConfig.from_options("kvquant", {})
    assert (config.home, config.codec, config.open_pages) == ("disk", "k2v2_sparse", 0)
    other = RetrievalConfig.from_options("kvquant", {"codec": "k4v4_sparse"})
    assert (other.own.whole, other.codec) == (True, "k4v4_sparse")
    with pytest.raises(RetrievalConfigError, match="reads everything at each step"):
        RetrievalConfig.from_options("kvquant", {"codec": "raw"})


def test_ttkv_needs_no_option_but_its_name():
    config = RetrievalConfig.from_options("ttkv", {})
    assert (config.home, config.codec, config.open_pages) == ("disk", "k8v4", 4)
    assert config.page_budget() == (1, 4, 11)
    assert RetrievalConfig.from_options("ttkv", {"window": 1024}).open_pages == 8
    assert RetrievalConfig.from_options("freekv", {"home": "disk", "codec": "k2v2"}).open_pages == 0
    with pytest.raises(RetrievalConfigError, match=r"codec='k8v4' is for pages in a file"):
        RetrievalConfig.from_options("ttkv", {"home": "device"})
    in_memory = RetrievalConfig.from_options("ttkv", {"home": "device", "codec": "raw"})
    assert in_memory.encoding is None
