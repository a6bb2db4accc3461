"""``make venv``: what it says of a machine that lacks something, and of a CUDA build of torch."""

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.common import ROOT
from tools import get_model

PIP = """
# The Python of an environment, whose pip installs no more than files of torch.
echo "$*" >> calls
torch=.venv/lib/python3.11/site-packages/torch
case "$*" in
  *"pip install --no-deps --no-compile"*)
    [ -e $torch ] && exit # already satisfied
    mkdir -p $torch/lib
    case "$*" in *--extra-index-url*) ;; *) touch $torch/lib/libtorch_cuda.so ;; esac ;;
  *"pip uninstall"*torch) rm -r $torch ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """What ``make venv`` reads of a checkout, with an environment that downloads nothing."""
    for name in ("Makefile", "requirements", "tools/packaging/vllm-metadata"):
        source, copy = ROOT / name, tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    program(tmp_path / ".venv" / "bin" / "python", PIP)
    return tmp_path


def program(path, text):
    """Write a program of Bash's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)
    return path


def venv(checkout, *variables, **environment):
    """Run ``make venv``; variables are those of ``make``."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    given = {"PYTHON": sys.executable} | dict(one.split("=", 1) for one in variables)
    return subprocess.run(
        ["make", "venv", *(f"{name}={value}" for name, value in given.items())],
        cwd=checkout,
        env=outer | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def installed(checkout):
    return [path.name for path in (checkout / ".venv").glob(".installed-*")]


def test_a_cuda_build_of_torch(checkout):
    """It goes again, so that the next call can fetch another."""
    for _ in range(2):
        done = venv(checkout)
        assert done.returncode != 0
        assert 'make demo PIP_FLAGS="--extra-index-url URL"' in done.stdout
        assert not installed(checkout)
    done = venv(checkout, "PIP_FLAGS=--extra-index-url URL")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(installed(checkout)) == 1
    calls = (checkout / "calls").read_text().splitlines()
    assert [call for call in calls if "--extra-index-url URL" in call]
    assert len([call for call in calls if "uninstall" in call]) == 2


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("platform", "make sets up Linux on x86-64, and this is Darwin arm64: see docs"),
        ("compiler", "needs the C++ compiler no-g++: install it (Debian: g++)"),
        ("headers", "install them (Debian: python3-dev)"),
    ],
)
def test_what_a_machine_lacks(checkout, lacks, said):
    """One line says so, and nothing is downloaded."""
    variables, environment = [], {}
    if lacks == "platform":
        uname = program(checkout / "bin" / "uname", "echo Darwin arm64")
        environment["PATH"] = f"{uname.parent}{os.pathsep}{os.environ['PATH']}"
    elif lacks == "compiler":
        environment["CXX"] = "no-g++"
    else:
        without = f'[[ "$*" != *Python.h* ]] && exec {sys.executable} "$@"'
        variables = [f"PYTHON={program(checkout / 'bin' / 'python', without)}"]
    done = venv(checkout, *variables, **environment)
    assert done.returncode != 0
    (line,) = done.stdout.splitlines()
    assert said in line
    assert not (checkout / "calls").exists()


def test_a_model_can_be_read_by_others(tmp_path, monkeypatch):
    """Where its weights are written for their own user alone, as safetensors does."""

    def fill(weights, out, say):
        for name in get_model.COMPLETE:
            (out / name).write_text("{}")
        (out / "model.safetensors").chmod(0o600)

    monkeypatch.setattr(get_model, "make_from_weights", fill)
    get_model.make("qwen", tmp_path)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.glob("*/*")}
    assert modes == {0o666 & ~umask()}


def umask():
    os.umask(mask := os.umask(0))
    return mask
