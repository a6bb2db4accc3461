"""The build of the plug-in that a figure belongs to."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_CHECKOUT = Path(__file__).resolve().parent.parent
_SOURCES = ("vllm_kvretrieval", "csrc", "benchmarks", "pyproject.toml", "CMakeLists.txt")
_PRODUCTS = ":!benchmarks/results"

Build = Mapping[str, Any]
"""The result of `build`, new or read from a result file."""


def build() -> dict[str, Any]:
    """Describe the build in use; figures with the same ``code`` can be compared.

    Returns:
        ``version`` of the package, ``code`` (a hash of the installed Python and compiled code),
        ``commit`` of this checkout and ``dirty``: whether its sources differ from the commit.
        Unknown values (not installed, no git) are None.
    """
    version: str | None = None
    code: str | None = None
    with contextlib.suppress(ModuleNotFoundError):
        version, code = metadata.version("vllm-kvretrieval"), code_fingerprint()
    changes = _git("status", "--porcelain", "--", *_SOURCES, _PRODUCTS)
    return {
        "version": version,
        "code": code,
        "commit": _git("rev-parse", "--short=9", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }


def label(stored: Build | None) -> str:
    """Return a build's name for people, such as ``0.1.0 (a8215cd00, with changes)``."""
    if not stored:
        return "unknown"
    commit = stored["commit"] or "no git"
    return f"{stored['version']} ({commit}{', with changes' if stored['dirty'] else ''})"


def same(one: Build | None, other: Build | None) -> bool:
    """Tell whether two figures are of the same code; unknown code is never the same."""
    return bool(one and other and one.get("code") and one["code"] == other.get("code"))


def files_fingerprint(paths: Sequence[Path]) -> str:
    """Return a short hash of the files' names and contents."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def code_fingerprint() -> str:
    """Return a short hash of the installed plug-in: its Python and its compiled code.

    Raises:
        ModuleNotFoundError: the plug-in is not installed.
    """
    spec = importlib.util.find_spec("vllm_kvretrieval")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vllm_kvretrieval is not installed: run `pip install .` first")
    roots = [Path(location) for location in spec.submodule_search_locations]
    return files_fingerprint(
        [path for root in roots for path in root.rglob("*") if path.suffix in (".py", ".so")]
    )


def newer_commits(commit: str) -> int | None:
    """Return how many commits after a build changed the package or its C++; None: it is unknown."""
    count = _git("rev-list", "--count", f"{commit}..HEAD", "--", "vllm_kvretrieval", "csrc")
    return None if count is None else int(count)


def _git(*arguments: str) -> str | None:
    """Output of a git command in the checkout; None without git."""
    command = ["git", "-C", str(_CHECKOUT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
