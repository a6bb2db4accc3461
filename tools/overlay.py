#!/usr/bin/env python3
"""Lay the Python of another vLLM over the compiled CPU libraries of the installed one.

    python tools/overlay.py 0.33.0     # makes build/vllm-0.33.0
    PYTHONPATH=build/vllm-0.33.0 python -m pytest

vLLM's source distribution appears on PyPI some time before, or without, a build for CPUs. Most of
a release is Python; the compiled operators that it calls on a CPU change rarely. So the package
here is tried against a new vLLM without a compiler: its Python is taken from the source
distribution (whose own build never runs), the libraries and what it requires from the environment.

Operators whose signatures differ from those in the libraries end in an error, unless the models
that are tested do not call them (``UNUSED``). Requirements that are not installed are added to the
overlay; others that are older than the new vLLM asks for are named, and stay.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

BUILD = Path(__file__).resolve().parents[1] / "build"

UNUSED = {"fused_experts_cpu", "static_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant"}
"""Operators of mixtures of experts by AMX, and of models in fp8."""

TEXT = r'"(?:[^"\\]|\\.)*"'
"""A string of C++, as a regular expression."""

BACKEND = '''\
"""Stands in for a build backend: pip asks for metadata before it saves a source distribution."""
from pathlib import Path

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    version = Path("PKG-INFO").read_text().split("\\nVersion: ")[1].split("\\n")[0]
    info = Path(directory) / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(Path("PKG-INFO").read_text())
    (info / "WHEEL").write_text("Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    return info.name
'''


def download(version: str, target: Path) -> Path:
    """Download vLLM's source distribution of a version, and unpack it.

    Returns:
        The folder of the source.
    """
    stand_in = target / "stand-in" / "setuptools"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    (stand_in / "build_meta.py").write_text(BACKEND)
    wanted = ["--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={version}"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "-d", str(target), *wanted],
        check=True,
        env=os.environ | {"PYTHONPATH": str(stand_in.parent)},
    )
    (archive,) = target.glob("vllm-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return target / archive.name.removesuffix(".tar.gz")


def lay_over(source: Path, installed: Path, overlay: Path, version: str) -> None:
    """Make the overlay of a source and the libraries of an installed vLLM."""
    shutil.copytree(source / "vllm", overlay / "vllm")
    for library in installed.rglob("*.abi3.so"):
        (overlay / "vllm" / library.relative_to(installed)).symlink_to(library)
    metadata = overlay / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def different_operators(source: Path) -> list[str]:
    """Names of CPU operators that the libraries register with another signature than the source."""
    import torch
    import vllm.platforms

    vllm.platforms.current_platform.import_kernels()
    registered = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith(("_C::", "_C_cache_ops::", "_C_utils::")):
            registered[schema.name.split("::")[1]] = schema
    text = (source / "csrc" / "cpu" / "torch_bindings.cpp").read_text()
    found = []
    for parts in re.findall(rf"\.def\(\s*((?:{TEXT}\s*)+)", text):
        defined = "".join(text[1:-1] for text in re.findall(TEXT, parts)).replace('\\"', '"')
        name = defined.split("(")[0]
        if "(" not in defined or name not in registered:
            continue  # taken from a C++ function's type, or compiled for other CPUs
        if str(torch._C.parse_schema(defined)) != str(registered[name]).split("::", 1)[1]:
            found.append(name)
    return sorted({*found} - UNUSED)


def add_requirements(source: Path, overlay: Path) -> None:
    """Install what a source requires and the environment lacks into the overlay."""
    missing = []
    for line in (source / "requirements" / "common.txt").read_text().splitlines():
        try:
            required = Requirement(line.split("#")[0].strip())
        except InvalidRequirement:
            continue  # an empty line, or an option of pip's
        if required.marker is not None and not required.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(required.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(str(required))
            continue
        if not required.specifier.contains(version, prereleases=True):
            print(f"overlay: {required.name} {version} is installed; vLLM asks for {required}")
    if missing:
        print(f"overlay: adding {', '.join(missing)}")
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        subprocess.run([*install, "--target", str(overlay), *missing], check=True)


def main() -> int:
    """Make the overlay, unless it is there; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("version", help="of vLLM, such as 0.33.0")
    version = parser.parse_args().version
    overlay = BUILD / f"vllm-{version}"
    if overlay.exists():
        print(f"overlay: {overlay} is there already")
        return 0
    import vllm

    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        source = download(version, Path(folder))
        if different := different_operators(source):
            print(f"overlay: the libraries of vLLM {vllm.__version__} register other signatures of")
            print("\n".join(different))
            return 1
        made = Path(folder) / "overlay"
        made.mkdir()
        lay_over(source, Path(vllm.__file__).parent, made, version)
        add_requirements(source, made)
        made.rename(overlay)
    print(f"overlay: {overlay}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
