"""Build backend: scikit-build-core, or setuptools (Python files only) where that is not installed.

The CPU kernels are left out, and no compiler is needed, where the build sees a CUDA build of torch
or has to fall back to setuptools. So an offline GPU machine can install the package with
`pip install --no-index --no-deps --no-build-isolation .`. An isolated build sees no torch and
always has scikit-build-core: it compiles them. `-C wheel.cmake=true` or `=false` decides otherwise.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

try:
    from scikit_build_core import build as _backend
except ModuleNotFoundError as error:
    if error.name != "scikit_build_core":
        raise
    from setuptools import build_meta as _backend  # type: ignore[no-redef]

Settings = dict[str, Any]

build_sdist = _backend.build_sdist
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist
get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
get_requires_for_build_editable = _backend.get_requires_for_build_editable


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    """Write a wheel's metadata (PEP 517); must know what the wheel will hold."""
    return _backend.prepare_metadata_for_build_wheel(metadata_directory, _settled(config_settings))


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    """Write an editable wheel's metadata (PEP 660)."""
    return _backend.prepare_metadata_for_build_editable(
        metadata_directory, _settled(config_settings)
    )


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel (PEP 517)."""
    return _backend.build_wheel(wheel_directory, _settled(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel that refers to the checkout (PEP 660)."""
    return _backend.build_editable(wheel_directory, _settled(config_settings), metadata_directory)


def _settled(config_settings: Settings | None) -> Settings:
    """The settings, with the choice that was left open about the CPU kernels made."""
    settings = dict(config_settings or {})
    if "wheel.cmake" not in settings and _torch_is_for_cuda():
        print("torch is a CUDA build: leaving the CPU kernels out (-C wheel.cmake=true keeps them)")
        settings["wheel.cmake"] = "false"
    if settings.get("wheel.cmake") == "false":
        settings["wheel.py-api"] = "py3"
    return settings


def _torch_is_for_cuda() -> bool:
    torch = importlib.util.find_spec("torch")
    folders = (torch.submodule_search_locations or []) if torch else []
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders)
