"""Sizes of a slow home and its recall cache, and the home's file."""

import mmap
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.engine.worker import RetrievalCPUWorker
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.tiers import home as home_module
from vllm_kvretrieval.tiers.home import DiskHome, page_runs
from vllm_kvretrieval.tiers.sizes import Cache, Tiers

MIB = 1 << 20

# ------------------------------------------------------------------------------------- options


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
    ],
)
def test_sizes_are_read(given, size):
    options = {"home": "disk", "home_bytes": given, "recall_cache_bytes": given}
    config = RetrievalConfig.from_options("freekv", options)
    assert config.home_bytes == config.recall_cache_bytes == size


@pytest.mark.parametrize("size", ["64GB", "many", "-1", 0, "", True, None, 1.5, [1], "GiB"])
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
        ({"home": "tape"}, "kv_retrieval.home='tape' is unknown; use one of ('auto', 'device',"),
        ({"home": "host"}, "home='host' is for GPUs; *Use home=device, or home=disk"),
        ({"home_bytes": "1GiB"}, "home_bytes='1GiB' has no effect with home=device; leave it"),
        ({"home_path": "/"}, "home_path='/' has no effect with home=device"),
        ({"recall_cache_bytes": 5}, "recall_cache_bytes=5 has no effect with home=device"),
        ({"home": "disk", "home_path": "/not/there"}, "home_path='/not/there' is no directory"),
        ({"home": "disk", "home_path": 3}, "home_path=3 is no directory"),
    ],
)
def test_impossible_homes(options, message):
    with pytest.raises(RetrievalConfigError, match=re.escape(message).replace(r"\*", ".*")):
        RetrievalConfig.from_options("freekv", options)


# --------------------------------------------------------------------------------------- sizes

# A cache of 9 + 1 layers, 4 KV heads, 64 KiB per page of 32 tokens and layer.
CACHE = Cache(
    retrieval_layers=9,
    dense_layers=1,
    kv_heads=4,
    block_size=128,
    block_bytes=4 * 65536,
    max_num_seqs=2,
    max_model_len=12_800,
)
BUDGET = 640  # 20 pages
LEAST = 2 * 4 * 20  # slots per layer
SLOT = 9 * (16384 + 24)


def tiers(fast, cache=CACHE, blocks=None, **options):
    options = {"home": "disk", "budget": BUDGET} | options
    return Tiers.plan(RetrievalConfig.from_options("freekv", options), cache, fast, blocks)


def test_everything_has_its_place():
    got = tiers(500 * MIB)
    assert got.blocks == 2 * 100 + 1
    assert got.home == 201 * 9 * CACHE.block_bytes
    assert got.dense == 201 * CACHE.block_bytes
    units = 201 * 4 * 4
    assert got.index == got.home // 32 + 9 * units * 4
    assert got.slots == (500 * MIB - got.dense - got.index) // SLOT
    assert got.recall_cache == got.slots * SLOT
    assert got.dense + got.index + got.recall_cache <= 500 * MIB
    finer = tiers(500 * MIB, summary_size=8)
    assert finer.index == got.index + got.home // 8 - got.home // 32


def test_no_more_slots_than_units():
    assert tiers(1 << 40).slots == 201 * 4 * 4


def test_given_sizes():
    got = tiers(500 * MIB, home_bytes=101 * 9 * CACHE.block_bytes + 5, recall_cache_bytes=50 * MIB)
    assert got.blocks == 101
    assert got.slots == 50 * MIB // SLOT
    assert tiers(500 * MIB, home_bytes="1TiB", blocks=150).blocks == 150


def test_the_least_that_is_accepted():
    fixed = tiers(500 * MIB).dense + tiers(500 * MIB).index
    assert tiers(fixed + LEAST * SLOT).slots == LEAST
    assert tiers(500 * MIB, recall_cache_bytes=LEAST * SLOT).slots == LEAST
    for fast, options in ((fixed + LEAST * SLOT - 1, {}), (500 * MIB, {"recall_cache_bytes": 9})):
        with pytest.raises(RetrievalConfigError, match="max_num_seqs=2 requests need"):
            tiers(fast, **options)


def test_what_does_not_fit():
    with pytest.raises(RetrievalConfigError, match="home_bytes=100: one request of max_model_len"):
        tiers(500 * MIB, home_bytes=100)
    with pytest.raises(RetrievalConfigError, match="of slots, but there are"):
        tiers(10 * MIB)
    with pytest.raises(RetrievalConfigError, match="recall_cache_bytes=524288000 is more than"):
        tiers(500 * MIB, recall_cache_bytes="500MiB")


def test_when_memory_is_enough():
    needed = 201 * (10 * CACHE.block_bytes + 9 * CACHE.block_bytes // 32)
    assert CACHE.fits_in(needed, 32)
    assert not CACHE.fits_in(needed - 1, 32)
    assert not replace(CACHE, max_num_seqs=3).fits_in(needed, 32)


# -------------------------------------------------------------------------------------- worker


def worker(specs, **options):
    """As much of a worker as plans the tiers."""
    worker: Any = object.__new__(RetrievalCPUWorker)
    worker.retrieval_config = RetrievalConfig.from_options("freekv", {"budget": BUDGET} | options)
    worker.get_kv_cache_spec = lambda: {f"model.layers.{i}": s for i, s in enumerate(specs)}
    worker.scheduler_config = SimpleNamespace(max_num_seqs=CACHE.max_num_seqs)
    worker.model_config = SimpleNamespace(max_model_len=CACHE.max_model_len, model="somebody/model")
    worker.cache_config = SimpleNamespace(num_gpu_blocks_override=None)
    return worker


FULL = FullAttentionSpec(block_size=128, num_kv_heads=4, head_size=64, dtype=torch.float32)
LOCAL = SlidingWindowSpec(
    block_size=128, num_kv_heads=4, head_size=64, dtype=torch.float32, sliding_window=256
)


def test_the_worker_plans_its_layers():
    assert FULL.page_size_bytes == CACHE.block_bytes
    assert worker([FULL] * 10, home="disk")._plan_tiers(500 * MIB) == tiers(500 * MIB)
    assert worker([FULL] * 10)._plan_tiers(500 * MIB) is None
    dense = worker([FULL] * 10, home="disk", dense_layers=3)._plan_tiers(500 * MIB)
    assert dense.dense == 3 * tiers(500 * MIB).dense


def test_auto_takes_the_disk_only_where_it_must():
    assert worker([FULL] * 10, home="auto")._plan_tiers(500 * MIB) == tiers(500 * MIB)
    assert worker([FULL] * 10, home="auto")._plan_tiers(600 * MIB) is None
    assert worker([FULL, LOCAL] * 5, home="auto")._plan_tiers(500 * MIB) is None


@pytest.mark.parametrize(
    ("specs", "options"), [([FULL, LOCAL] * 5, {}), ([FULL] * 4, {"dense_layers": 4})]
)
def test_models_that_cannot_be_on_disk(specs, options):
    message = "home=disk serves models whose layers all .* somebody/model is none. Use home=device"
    with pytest.raises(RetrievalConfigError, match=message):
        worker(specs, home="disk", **options)._plan_tiers(500 * MIB)


# ---------------------------------------------------------------------------------------- file


def test_what_is_written_is_in_the_file(tmp_path):
    home = DiskHome(str(tmp_path), layers=3, layer_bytes=MIB)
    assert home.memory.numel() == 3 * MIB
    assert not home.memory.any()
    home.memory.copy_(torch.arange(3 * MIB) % 100)
    assert os.pread(home.fd, 3 * MIB, 0) == home.memory.numpy().tobytes()
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_resident_memory_is_let_go_of(tmp_path, monkeypatch):
    monkeypatch.setattr(home_module, "TRIM_BYTES", 16 * MIB)
    home = DiskHome(str(tmp_path), layers=2, layer_bytes=32 * MIB)
    resident = lambda: psutil.Process().memory_info().shared // MIB  # noqa: E731
    before = resident()
    for part in home.memory.split(MIB):
        part.fill_(7)
        home.note_written(MIB)
        assert resident() - before < 20
    assert home.memory.eq(7).all()
    assert resident() - before > 60
    home.unmap(0)
    assert 28 < resident() - before < 36
    home.unmap(1)
    assert resident() - before < 4
    home.stage(0, page_runs(np.arange(4, 12), MIB))
    assert 7 < resident() - before < 10


def test_runs_of_pages():
    runs = page_runs(np.array([7, 3, 4, 5, 9, 8, 4], dtype=np.int32), 1000)
    assert runs.tolist() == [[3000, 3000], [7000, 3000]]


def test_what_cannot_be_read_is_zero_and_reported(tmp_path):
    """Touched by whomever: the kernel's SIGBUS does not end the process."""
    layer, page = 256 * mmap.PAGESIZE, 2 * mmap.PAGESIZE
    home = DiskHome(str(tmp_path), layers=2, layer_bytes=layer)
    home.memory.fill_(1)
    os.ftruncate(home.fd, layer + 8 * page)
    home.stage(1, page_runs(np.array([3, 100]), page))
    assert home.take_lost(page) == set()
    lost = home.memory[layer + 8 * page :]
    assert not lost[3 * page : 3 * page + 10].any()
    lost[50 * page : 52 * page].fill_(5)
    assert lost[50 * page : 52 * page].eq(5).all()
    assert home.take_lost(page) == {11, 58, 59}
    assert home.take_lost(page) == set()
    os.ftruncate(home.fd, 2 * layer)
    assert home.memory.sum() == layer + 8 * page, "the file is mapped again"
    assert home.take_lost(page) == set()
    small = page // 4  # smaller than the system's
    os.ftruncate(home.fd, layer)
    assert home.memory[-1] == 0
    assert home.take_lost(small) == {510, 511}


def test_other_bus_errors_end_the_process():
    program = """
import mmap, tempfile
from vllm_kvretrieval.tiers.home import DiskHome
home = DiskHome(None, layers=1, layer_bytes=1 << 20)
file = tempfile.TemporaryFile()
file.truncate(8192)
other = mmap.mmap(file.fileno(), 8192)
file.truncate(0)
print(other[0])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert ended.returncode == -signal.SIGBUS


def test_too_small_a_disk(tmp_path):
    with pytest.raises(RetrievalConfigError, match=r"the home needs 2048.0 GiB, but .* free"):
        DiskHome(str(tmp_path), layers=2, layer_bytes=1 << 40)


def test_nothing_is_left_of_a_killed_process(tmp_path):
    """Nor does its space stay taken."""
    program = f"""
import os, signal
from vllm_kvretrieval.tiers.home import DiskHome
home = DiskHome({str(tmp_path)!r}, layers=2, layer_bytes=100 << 20)
home.memory.fill_(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    free = lambda: os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize  # noqa: E731
    before = free()
    killed = subprocess.run([sys.executable, "-c", program])
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert before - free() < 100 * MIB
    assert DiskHome(str(tmp_path), layers=2, layer_bytes=MIB).memory.numel() == 2 * MIB
