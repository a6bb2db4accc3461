"""The summary of a test run: which kernels it has tested."""

import os
import subprocess
import sys

import pytest

from benchmarks.common import ROOT

POORER_MACHINE = """
from vllm_kvretrieval.kernels import cpu

use_isa = cpu.use_isa

def refuse(name):
    if name == "avx512":
        raise ValueError
    use_isa("portable")

cpu.use_isa, cpu.isas = refuse, lambda: ["avx512", "avx2", "portable"]
"""


def summary(selected, *options, **env):
    """The line that a run of some of the kernels' tests ends with."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "tests/kernels/test_plan_kernels.py",
            "-k",
            selected,
            *options,
        ],
        env=os.environ | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("kernels tested: ")]
    return line


@pytest.mark.parametrize("workers", ["0", *(pytest.param(n, marks=pytest.mark.slow) for n in "12")])
def test_what_was_not_asked_for_is_not_tested(workers):
    assert summary("threshold_limits and portable", "-n", workers) == (
        "kernels tested: portable; not on this machine: none; "
        "not in this run: avx512_amx, avx512_bf16, avx512, avx2"
    )


def test_what_was_skipped_is_not_tested(tmp_path):
    (tmp_path / "poorer_machine.py").write_text(POORER_MACHINE)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    assert summary("threshold_limits", "-p", "poorer_machine", PYTHONPATH=path) == (
        "kernels tested: avx2, portable; not on this machine: avx512; "
        "not compiled in: avx512_amx, avx512_bf16"
    )
