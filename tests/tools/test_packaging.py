"""Installing on an offline GPU machine: no network, no compiler, no CPU kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.common import ROOT

SOURCES = (
    "pyproject.toml CMakeLists.txt README.md LICENSE csrc tools/packaging vllm_kvretrieval".split()
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The directory with the package, installed beside a CUDA build of torch."""
    folder = tmp_path_factory.mktemp("offline")
    (folder / "checkout").mkdir()
    for name in SOURCES:
        source, copy = ROOT / name, folder / "checkout" / name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(source, copy)
    # What the build backend can see of a CUDA build of torch.
    cuda_torch = folder / "path" / "torch"
    (cuda_torch / "lib").mkdir(parents=True)
    (cuda_torch / "__init__.py").touch()
    (cuda_torch / "lib" / "libtorch_cuda.so").touch()
    options = "--no-index --no-deps --no-build-isolation --disable-pip-version-check".split()
    program = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", folder / "site", "."],
        cwd=folder / "checkout",
        env=os.environ | {"PYTHONPATH": str(folder / "path"), "CXX": "/bin/false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stdout + program.stderr
    return folder / "site"


def run(site, code):
    """Run code with this installation in place of the one that is tested elsewhere."""
    packages = Path(torch.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S: the editable installation would come first
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{packages}"},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )


def test_installed_without_cpu_kernels(site):
    package = site / "vllm_kvretrieval"
    assert (package / "kernels" / "triton" / "decode.py").exists()
    assert (package / "py.typed").exists()
    assert (package / "retrieval" / "filters" / "llama-3-8b-262k.json").exists()
    assert (package / "retrieval" / "heads" / "SmolLM2-135M-Instruct.json").exists()
    assert not list(package.rglob("*.so"))
    entry_points = next(site.glob("vllm_kvretrieval-*.dist-info")) / "entry_points.txt"
    assert "vllm_kvretrieval.plugin:register" in entry_points.read_text()
    assert "vllm-kvretrieval = vllm_kvretrieval.command:main" in entry_points.read_text()


def test_only_the_cpu_ops_miss_the_cpu_kernels(site):
    everything_else = "import vllm_kvretrieval.plugin, vllm_kvretrieval.kernels.triton"
    program = run(site, f"{everything_else}; print(vllm_kvretrieval.__file__)")
    assert program.returncode == 0, program.stderr
    assert str(site) in program.stdout
    program = run(site, "import vllm_kvretrieval.kernels.cpu")
    assert "installed without its CPU kernels" in program.stderr
    assert "pip install -C wheel.cmake=true" in program.stderr
