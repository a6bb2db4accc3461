#!/usr/bin/env python3
"""Write the lock files requirements/*.txt from what the running environment holds.

    python tools/lock.py                   # those of the environment
    python tools/lock.py cuda-0.33 docs ...     # these, from what pip would install; some minutes

Each requirements/NAME.in lists what we ask for; its lock file pins that and everything it needs,
less what an earlier lock file already pins. To upgrade: install the new versions into the
environment, run its Python on this file, and commit the result. What a GPU, making wheels and the
pages of documentation need is installed nowhere for it; it is for the version of Python that runs
this.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1] / "requirements"
LOCKS = ("runtime", "build", "dev", "interpreter")  # each may rely on those before it
# Of environments of their own.
ALONE = (
    "cuda-0.32",
    "cuda-0.33",
    "wheels",
    "docs",
    "workflows",
    "notebook",
    "peers",
    "load",
    "torchvision",
)
# Those of them that find what runtime.txt pins beside them, and only bring what that lacks.
BESIDE = {"load", "torchvision"}
# Left out where others ask for them. The first three break `import transformers` on a CPU machine,
# since the index has builds for CUDA alone; docs/installation.md says for which models torchvision
# is needed, and where its CPU build is. Of Triton only the GPU's kernels make use.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision", "triton"}
OWN = "requirements"  # asks for what the .in files list


def read_roots(path: Path) -> list[str]:
    """The requirement lines of a .in file, without comments."""
    lines = (re.sub(r"#.*", "", line).strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def read_pins(path: Path) -> dict[str, str]:
    """The versions of a lock file, by name."""
    return dict(line.split("==") for line in read_roots(path))


def closure(roots: list[str]) -> dict[str, str]:
    """Map every distribution that `roots` need, and the roots themselves, to its version.

    Raises SystemExit where one is not installed or has a version that its user does not accept.
    """
    pinned: dict[str, str] = {}
    todo = [(OWN, Requirement(root)) for root in roots]
    seen: set[tuple[str, str]] = set()
    while todo:
        user, requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT and user != OWN:
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{requirement} (asked for by {user}) is not installed: install it first")
        if not requirement.specifier.contains(found.version, prereleases=True):
            sys.exit(f"{user} asks for {requirement}, but {found.version} is installed")
        # A local version ("+cpu") names a build, which differs from machine to machine.
        pinned[name] = Version(found.version).public
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in found.requires or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    todo.append((name, needed))
    return pinned


def resolve(roots: list[str], there: dict[str, str]) -> dict[str, str]:
    """Map every distribution that pip would install for `roots` to its version.

    Args:
        roots: Requirements.
        there: Versions by name; what accepts them needs no other, nor what those need.
    """
    options = "--dry-run --ignore-installed --only-binary=:all: --quiet --report -".split()
    command = [sys.executable, "-m", "pip", "install", *options, *roots]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    items = (item["metadata"] for item in json.loads(report)["install"])
    found = {canonicalize_name(item["name"]): item for item in items}
    if not there:
        return {name: item["version"] for name, item in found.items()}
    pinned: dict[str, str] = {}
    todo = [Requirement(root) for root in roots]
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        suits = name in there and asked.specifier.contains(there[name], prereleases=True)
        if name in pinned:
            continue
        if not suits:
            pinned[name] = found[name]["version"]
        for needed in map(Requirement, found[name].get("requires_dist", ())):
            plain = needed.marker is None or needed.marker.evaluate({"extra": ""})
            by_extra = not plain and any(
                needed.marker is not None and needed.marker.evaluate({"extra": extra})
                for extra in asked.extras
            )
            if by_extra or (plain and not suits):
                todo.append(needed)
    return pinned


def write(lock: str, pinned: dict[str, str], earlier: set[str]) -> None:
    """Write a lock file, less what earlier ones pin."""
    lines = [f"{name}=={pinned[name]}" for name in sorted(pinned) if name not in earlier]
    header = f"# Made by tools/lock.py from {lock}.in. Install with --no-deps.\n"
    (ROOT / f"{lock}.txt").write_text(header + "\n".join(lines) + "\n")
    print(f"requirements/{lock}.txt: {len(lines)} distributions")


def main() -> None:
    """Rewrite the lock files of the environment, or those that are named."""
    if names := sys.argv[1:]:
        for name in names:
            if name not in ALONE:
                sys.exit(f"{name} is none of {', '.join(ALONE)}")
            there = read_pins(ROOT / "runtime.txt") if name in BESIDE else {}
            write(name, resolve(read_roots(ROOT / f"{name}.in"), there), set())
        return
    earlier: set[str] = set()
    for lock in LOCKS:
        pinned = closure(read_roots(ROOT / f"{lock}.in"))
        write(lock, pinned, earlier)
        earlier |= pinned.keys()


if __name__ == "__main__":
    main()
