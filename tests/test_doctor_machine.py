"""``vllm-kvretrieval doctor``: what it finds out about a machine."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import CacheConfig
from vllm.utils import cpu_resource_utils

from vllm_kvretrieval.attention.cpu import support
from vllm_kvretrieval.doctor import machine, software
from vllm_kvretrieval.doctor.findings import Severity
from vllm_kvretrieval.engine.cpu import advice as cpu_advice


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(cpu_advice, "cores_of", lambda process: [0, 1])


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
    for size, severity in (("1", Severity.OK), ("4", Severity.ERROR)):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", size)
        assert machine.check_memory().severity is severity


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
    monkeypatch.setattr(cpu_advice, "slow_bfloat16", lambda: slow)
    monkeypatch.setattr(support, "choose_attention", lambda *_: support.Choice(own, ""))
    assert software.check_element().severity is severity


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
