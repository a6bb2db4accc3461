"""What the Triton kernels compile to: the committed records, and what has changed since."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from benchmarks.common import RESULTS, ROOT, write_json
from benchmarks.gpu import compiled, launches
from vllm_kvretrieval.attention.cuda import refusals

(PINNED,) = re.findall(r"^triton==(.+)$", (ROOT / "requirements/cuda-0.32.txt").read_text(), re.M)
OFFLINE = "3.6.0"
"""On machines that tools/gpu/bundle.py makes a bundle for."""
NEXT = "3.8.0"
"""With the next vLLM, whose torch for CUDA is pinned to it."""
COMMON = re.compile(r"d64\b|d96\b|d128\b|^(?!.*\bd\d)")
"""Names of launches of the head sizes that most models have, and of those that have none."""
MOST_SPILLED = 64
"""Bytes per thread; next to nothing where it comes up."""
SPILLING = re.compile(r"sparse_decode (far )?d16\b")
SELECTING = re.compile(r"plan_decode|select")
POOLING = re.compile(r"plan_decode|select|cut|pool")
MULTIPLYING = re.compile(r"scores|plan_decode|select_ahead [a-z]|sparse_decode")
"""Launches that read what they multiply, which is nearly all of the bytes of a step."""
LEAST_WIDE, OF_SELECTION, OF_OUTLIERS, MOST_NARROW = 0.4, 0.19, 0.1, 0.25
"""Shares of what a thread reads by 16 bytes at a time, of selection, which reads its scores again
(and bounds of drafts), with outliers those of two entries to a page, and cosines; and by less than
four."""
SAMPLE = ("write_kv d64", "plan_decode low_rank d128")


def read(path):
    """A record."""
    return json.loads(path.read_text())


def run(output, *options, cache):
    """The program over a record; it compiles what has no results there."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.compiled", "--output", output, *options],
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_head_size_that_is_served():
    assert launches.HEAD_SIZES == refusals.HEAD_SIZES


def check_recorded(path):
    """The launches of a record run, two at a time where they can, and move what they read well.

    A program of 16 warps counts as two: as many warps wait for memory side by side.
    """
    record = read(path)
    for name, result in record["results"].items():
        for arch in record["architectures"]:
            used, shared = result[f"sm_{arch}"], compiled.SHARED[arch]
            found = dict(zip(compiled.COLUMNS, used, strict=True))
            told = f"{name} on sm_{arch}: {compiled.described(used)}"
            one = shared < 128 or not COMMON.search(name)
            two = SELECTING.match(name) or not one
            programs = compiled.programs(arch, used) * (2 if found["warps"] == 16 else 1)
            assert programs >= (2 if two else 1), told
            assert found["spilled_bytes"] <= MOST_SPILLED or SPILLING.match(name), told
            if not MULTIPLYING.match(name):
                continue
            assert found["tensor_ops"], told
            # With bytes for scales of directions, or words of bits.
            if COMMON.search(name) and ("low_rank" in name or "one_bit" in name):
                assert found["narrow_bytes"] <= MOST_NARROW * found["read_bytes"], told
            elif COMMON.search(name):
                least = OF_SELECTION if SELECTING.match(name) else LEAST_WIDE
                least = OF_OUTLIERS if "landmark" in name else least
                assert found["wide_bytes"] >= least * found["read_bytes"], told


@pytest.mark.parametrize("version", [OFFLINE, PINNED, NEXT, compiled.VERSION])
def test_recorded_kernels_run(version):
    """On GPUs that are served."""
    record = read(compiled.record_of(version))
    assert record["versions"]["triton"] == version
    assert {90} <= {*record["architectures"]} <= compiled.SHARED.keys()
    check_recorded(compiled.record_of(version))


def test_changed_kernels_are_no_worse(tmp_path):
    """Kernels that differ from their records are compiled, and some of the others."""
    committed = compiled.record_of(compiled.VERSION)
    record, path = read(committed), tmp_path / "record.json"
    sample = {name: record["results"].pop(name) for name in SAMPLE}
    write_json(path, record)
    compiled_for = [arch for arch in (80, 90) if arch in record["architectures"]]
    options = [option for arch in compiled_for for option in ("--arch", str(arch))]
    program = run(path, *options, cache=tmp_path / "cache")
    assert program.returncode == 0, program.stdout + program.stderr
    check_recorded(path)
    found = read(path)["results"]
    for name, before in sample.items():
        if found[name]["digest"] == before["digest"]:
            assert all(found[name][f"sm_{a}"] == before[f"sm_{a}"] for a in compiled_for), name


def test_what_a_kernel_is_made_of_counts(monkeypatch):
    """The source of a function changes the launches of the kernels that call it, and no others."""
    before, source_of = compiled.launches(), inspect.getsource

    def changed(function):
        return source_of(function) + "#" * (function.__name__ == "pool_pages")

    monkeypatch.setattr(inspect, "getsource", changed)
    after = compiled.launches()
    differ = {name for name in before if before[name].digest != after[name].digest}
    assert differ == {name for name in before if POOLING.match(name)}
    assert len({launch.digest for launch in before.values()}) == len(before)


def test_what_is_worse():
    """More spilled, fewer programs at once, and what no GPU could launch."""
    held = {"a": {"sm_80": [64, 8, 40000, 4]}, "b": {"sm_80": [64, 0, 40000, 4]}}
    assert not list(compiled.regressions(held, held, [80]))
    results = {
        "a": {"sm_80": [64, 16, 40000, 4]},
        "b": {"sm_80": [64, 0, 60000, 4]},
        "c": {"sm_80": [64, 8, 170000, 4]},
    }
    assert list(compiled.regressions(held, results, [80])) == [
        "a spills on sm_80: registers 64, spilled_bytes 16, shared_bytes 40000, warps 4",
        "fewer of b on sm_80: registers 64, spilled_bytes 0, shared_bytes 60000, warps 4; it was "
        "registers 64, spilled_bytes 0, shared_bytes 40000, warps 4",
        "c cannot be launched on sm_80: registers 64, spilled_bytes 8, shared_bytes 170000, "
        "warps 4",
        "c spills on sm_80: registers 64, spilled_bytes 8, shared_bytes 170000, warps 4",
    ]


COUNTING = """
import triton
from benchmarks.gpu import compiled
triton.runtime.driver.set_active(compiled._StandIn(90))
launches = compiled.launches()
def waits(name):
    ptx = launches[name].run().asm["ptx"]
    return ptx.count("acq_rel") + ptx.count("fence")
names = "resolve C128", "resolve_ahead C128", "plan_decode min_max of 1024 pages d128"
found = [waits(name) for name in names]
assert found == [0, 0, 1], found
"""


def test_nobody_waits_for_what_is_counted(tmp_path):
    """Atomics that only count order nothing else; one says that all have scored."""
    program = subprocess.run(
        [sys.executable, "-c", COUNTING],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stdout + program.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(RESULTS.glob("gpu_compiled_*.json")), ids=lambda p: p.stem)
def test_records_are_of_these_kernels(path):
    digests = {name: launch.digest for name, launch in compiled.launches().items()}
    recorded = {name: result["digest"] for name, result in read(path)["results"].items()}
    stale = [name for name in digests if recorded.get(name) != digests[name]]
    assert recorded.keys() == digests.keys()
    assert not stale, f"{compiled.__doc__}"


@pytest.mark.slow
@pytest.mark.cores
def test_everything_compiles(tmp_path):
    """All records of this Triton are made again, and the results are the same or better."""
    path = shutil.copy(compiled.record_of(compiled.VERSION), tmp_path / "record.json")
    program = run(path, "--all", cache=tmp_path / "cache")
    assert program.returncode == 0, program.stdout + program.stderr
