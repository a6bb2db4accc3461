"""``vllm-kvretrieval doctor``: what it finds out about a machine."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import CacheConfig
from vllm.utils import cpu_resource_utils
from vllm.v1.attention.backends import cpu_attn

from tests.support.engine import checkpoint
from tests.support.store_model import new_store
from vllm_kvretrieval.attention.cpu import refusals
from vllm_kvretrieval.command import main
from vllm_kvretrieval.doctor import machine, software
from vllm_kvretrieval.doctor.findings import Severity
from vllm_kvretrieval.doctor.options import home_of, read_options
from vllm_kvretrieval.upstream import defaults

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(defaults, "cores_of", lambda process: [0, 1])


def parallel(workers):
    return SimpleNamespace(
        local_world_size=workers, data_parallel_rank_local=None, _api_process_count=1
    )


@pytest.mark.parametrize(
    ("binding", "workers", "severity", "said"),
    [
        ("0,1", 1, Severity.OK, "2 of 2 cores"),
        ("nobind", 1, Severity.OK, "2 of 2 cores"),
        ("0", 2, Severity.ERROR, "set VLLM_CPU_OMP_THREADS_BIND='0|1'"),
        ("0|0", 2, Severity.ADVICE, "workers share the cores 0; give each"),
    ],
)
def test_threads(two_cores, monkeypatch, binding, workers, severity, said):
    """By vLLM's own reading of its environment."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
    found = next(machine.check_threads(parallel(workers)))
    assert found.severity is severity
    assert said in str(found)


@pytest.mark.parametrize(
    ("setting", "severity"),
    [
        ("always [madvise] never", Severity.OK),
        ("[always] madvise never", Severity.OK),
        ("always madvise [never]", Severity.ADVICE),
        (None, Severity.ADVICE),
    ],
)
def test_huge_pages(tmp_path, setting, severity):
    if setting is not None:
        (tmp_path / "enabled").write_text(setting + "\n")
    assert machine.check_huge_pages(tmp_path / "enabled").severity is severity


@pytest.mark.parametrize(
    ("cache", "free", "said"),
    [
        (None, 7.0, "takes 92% of all memory if the size of the KV cache is not given; add --kv"),
        (None, 7.5, ""),
        ({}, 7.0, "add --kv-cache-memory-bytes 2G"),
        ({"gpu_memory_utilization": 0.5}, 5.0, ""),
        ({"gpu_memory_utilization": 0.5}, 3.0, "takes 50% of all memory"),
        ({"kv_cache_memory_bytes": 1 << 30}, 3.0, ""),
        ({"kv_cache_memory_bytes": 4 << 30}, 3.0, "the KV cache is to have 4.0 GiB; lower --kv"),
    ],
    ids=str,
)
def test_memory(monkeypatch, cache, free, said):
    """Of 8 GiB, as vLLM counts them at its start."""
    node = SimpleNamespace(available_memory=free * (1 << 30), total_memory=8 << 30)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda node_id: node)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    found = machine.check_memory(None if cache is None else CacheConfig(**cache))
    failing = Severity.ADVICE if cache is None else Severity.ERROR
    assert found.severity is (failing if said else Severity.OK)
    assert f"{free:.1f} of 8.0 GiB available" in found.text
    assert said in str(found)


def test_the_size_of_the_cache_may_come_from_the_environment(monkeypatch):
    node = SimpleNamespace(available_memory=3 << 30, total_memory=8 << 30)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda node_id: node)
    for size, severity, said in (
        ("1", Severity.OK, ""),
        ("4", Severity.ERROR, "the KV cache is to have 4.0 GiB"),
        ("", Severity.ADVICE, "takes 92% of all memory"),  # vLLM takes it as unset
        ("4G", Severity.ERROR, "VLLM_CPU_KVCACHE_SPACE=4G is no number of GiB"),
    ):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", size)
        found = machine.check_memory()
        assert found.severity is severity
        assert said in str(found)


@pytest.mark.parametrize(
    ("slow", "own", "severity"),
    [
        (True, True, Severity.OK),
        (True, False, Severity.ADVICE),
        (False, False, Severity.OK),
    ],
)
def test_the_elements_of_a_model(monkeypatch, slow, own, severity):
    """Where our kernel attends, prompts are multiplied in float32 in any case."""
    monkeypatch.setattr(defaults, "slow_bfloat16", lambda: slow)
    monkeypatch.setattr(refusals, "choose_attention", lambda *_: refusals.Choice(own, ""))
    assert software.check_element().severity is severity


@pytest.mark.model
@pytest.mark.parametrize(
    ("backend", "options", "severity", "said"),
    [
        (None, "", Severity.ADVICE, "methods that need no keys of the cache serve"),
        (None, "--enforce-eager", Severity.ADVICE, "methods that need no keys of the cache serve"),
        ("freekv", "", Severity.ADVICE, "methods that need no keys of the cache serve"),
        ("kvretrieval", "", Severity.ERROR, "reads keys in the KV cache; use a method with index"),
        (
            "twilight",
            "",
            Severity.ERROR,
            "reads lists of one length, and twilight selects up to a mass",
        ),
        ("freekv", "--kv-retrieval.budget_shares pyramid", Severity.ERROR, "without budget_shares"),
        ("fier", "", Severity.ERROR, "selects single tokens (unit token); use methods that"),
    ],
)
def test_keys_that_the_kernels_do_not_read(monkeypatch, backend, options, severity, said):
    """An error where a method is named that needs them."""
    given = options.split() + (["--attention-backend", backend] if backend else [])
    config = read_options([checkpoint(MODEL), *given]) if given else None
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "neon")
    *_, found = software.check_kernels(config)
    assert found.name == "layout"
    assert found.severity is severity
    assert "neon" in found.text
    assert said in str(found)


@pytest.mark.model
def test_options_of_a_server_without_retrieval(capsys, monkeypatch):
    """It needs no compiler and little memory, by its own options."""
    node = SimpleNamespace(available_memory=3 << 30, total_memory=8 << 30)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda node_id: node)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    for size, severity in (("1G", "ok"), ("4G", "error")):
        options = ["--enforce-eager", "--kv-cache-memory-bytes", size]
        main(["doctor", "--json", "--serve", checkpoint(MODEL), *options])
        found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
        assert "no retrieval method is named" in found["options"]["text"]
        assert "not compiled" in found["compiler"]["text"]
        assert found["memory"]["severity"] == severity


@pytest.mark.model
@pytest.mark.parametrize(
    ("options", "made", "size"),
    [
        ("--kv-cache-memory-bytes 1G", False, 1 << 30),
        ("--kv-cache-memory-bytes 1G", True, None),
        ("--kv-retrieval.home disk --kv-retrieval.home_bytes 2GiB", False, 2 << 30),
    ],
)
def test_where_a_store_lies(tmp_path, options, made, size):
    """Also that of a cache in memory, of which it has a copy."""
    store = tmp_path / "store"
    if made:
        new_store(store).close()
    given = [*options.split(), "--kv-retrieval.store", str(store)]
    config = read_options([checkpoint(MODEL), "--attention-backend", "kvretrieval", *given])
    assert home_of(config) == (str(store if made else tmp_path), size)


def test_shared_memory_matters_to_several_workers(monkeypatch):
    monkeypatch.setattr(machine, "LEAST_SHARED", 1 << 60)
    assert machine.check_shared_memory(1).severity is Severity.OK
    assert "--shm-size" in str(machine.check_shared_memory(2))


def test_two_openmp_runtimes(monkeypatch):
    libraries = "/a/libgomp-24e2ab19.so.1.0.0\n0 r-xp /b/libiomp5.so\n"
    real = Path.read_text
    maps = lambda path, *a, **k: (  # noqa: E731
        libraries if path == Path("/proc/self/maps") else real(path, *a, **k)
    )
    monkeypatch.setattr(Path, "read_text", maps)
    found = machine.check_openmp()
    assert found.severity is Severity.ADVICE
    assert "libgomp, libiomp5" in found.text
