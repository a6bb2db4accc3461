"""Advice for small machines, and the choices of the demo and the tests on them."""

import os
import platform

import pytest
import torch

from vllm_kvretrieval.upstream import defaults


@pytest.fixture
def machine(monkeypatch):
    """Pretends: instruction sets, cores of the machine, and threads that compute."""

    def pretend(avx512_bf16=False, amx=False, cores=2, threads=2, kind="x86_64"):
        monkeypatch.setattr(platform, "machine", lambda: kind)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
        # Of a file that is not there, every logical CPU is a core.
        monkeypatch.setattr(defaults, "SIBLINGS", "/nowhere/{}")
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    return pretend


@pytest.mark.parametrize(
    ("found", "slow"),
    [
        ({}, True),
        ({"avx512_bf16": True}, False),
        ({"amx": True}, False),
        ({"kind": "aarch64"}, False),
    ],
    ids=str,
)
def test_float32_where_bfloat16_is_slow(machine, found, slow):
    machine(**found)
    told = defaults.startup_advice(torch.bfloat16, workers=1)
    assert (told is not None) == slow
    assert defaults.startup_advice(torch.float32, workers=1) is None
    assert defaults.startup_advice(torch.bfloat16, workers=1, widened=True) is None


def test_one_line_says_what_to_set(machine):
    machine(threads=1)
    told = defaults.startup_advice(torch.bfloat16, workers=1) or ""
    assert "\n" not in told
    assert "kv_retrieval.attention=own computes prompts about four times as fast" in told
    assert "--dtype float32 with twice the memory" in told
    assert "1 of 2 cores; with VLLM_CPU_OMP_THREADS_BIND=0,1 " in told


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "told"),
    [(4, 3, 1, True), (4, 4, 1, False), (4, 2, 2, False), (8, 7, 1, False), (1, 1, 1, False)],
)
def test_a_core_left_idle(machine, cores, threads, workers, told):
    """One idle core matters on a machine with few cores, and not on one with many."""
    machine(avx512_bf16=True, cores=cores, threads=threads)
    assert (defaults.startup_advice(torch.bfloat16, workers) is not None) == told


@pytest.mark.parametrize(
    ("threads", "workers", "told"), [(7, 1, False), (6, 1, True), (3, 2, False), (2, 2, True)]
)
def test_a_core_kept_back_for_a_connector(machine, monkeypatch, threads, workers, told):
    """vLLM keeps back a second one per worker where there is one; ours needs none."""
    machine(avx512_bf16=True, cores=8, threads=threads)
    said = defaults.startup_advice(torch.bfloat16, workers) or ""
    assert (f"with VLLM_CPU_NUM_OF_RESERVED_CPU={workers} in its environment" in said) == told
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", str(workers))
    assert defaults.startup_advice(torch.bfloat16, workers) is None


def test_who_bound_cores_knows(machine, monkeypatch):
    machine(avx512_bf16=True, threads=1)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "1")
    assert defaults.startup_advice(torch.bfloat16, workers=1) is None


def test_nixl_takes_the_last_core(machine, monkeypatch):
    """Of two threads on it each waits for the other; and it is not one that lies idle."""
    machine(avx512_bf16=True, cores=4, threads=4)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0,1,2,3")
    told = defaults.startup_advice(torch.bfloat16, workers=1, nixl=True) or ""
    assert "NIXL to core 3; VLLM_CPU_OMP_THREADS_BIND=0,1,2 " in told
    assert defaults.startup_advice(torch.bfloat16, workers=1) is None
    machine(avx512_bf16=True, cores=4, threads=3)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    assert defaults.startup_advice(torch.bfloat16, workers=1, nixl=True) is None
    machine(avx512_bf16=True, cores=4, threads=2)
    told = defaults.startup_advice(torch.bfloat16, workers=1, nixl=True) or ""
    assert "2 of 4 cores; with VLLM_CPU_OMP_THREADS_BIND=0,1,2 " in told


def test_workers_share_all_cores(machine):
    machine(cores=4)
    assert defaults.all_cores()["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2,3"
    assert defaults.all_cores(2)["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    machine(cores=2)
    assert defaults.all_cores(3)["VLLM_CPU_OMP_THREADS_BIND"] == "0|0|1"


def test_one_thread_per_core(machine, monkeypatch, tmp_path):
    """Hyper-threads count once, as vLLM counts them."""
    machine(cores=4)
    for cpu in range(4):
        (tmp_path / str(cpu)).write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    monkeypatch.setattr(defaults, "SIBLINGS", str(tmp_path / "{}"))
    assert defaults.all_cores()["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
