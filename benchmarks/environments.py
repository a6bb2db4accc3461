"""Environments of their own for programs that do not go with the project's, under ``build``."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.engines import EngineError


def interpreter(lock: Path, beside: bool = False) -> Path:
    """The interpreter of the environment with what a lock file names; made where it is not there.

    ``PIP_FLAGS`` are pip's, as for `make`.

    Args:
        lock: The file, in ``requirements``.
        beside: Whether the environment also finds what this program's has, behind its own.

    Raises:
        EngineError: pip has failed; the error has its message.
    """
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    made = ROOT / "build" / lock.stem / f"env-{digest}"
    python, stamp = made / "bin" / "python", made / ".installed"
    if not stamp.exists():
        print(f"installing {lock.name} in {made}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", str(made)], "the environment cannot be made")
        flags = shlex.split(os.environ.get("PIP_FLAGS", ""))
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *flags]
        run([*command, "-r", str(lock)], "pip has failed")
        if beside:
            (own,) = made.glob("lib/python*/site-packages")
            found = sysconfig.get_path("purelib")
            (own / "beside.pth").write_text(f"import site; site.addsitedir({found!r})\n")
        stamp.touch()
    return python


def run(command: list[str], complaint: str) -> str:
    """What a program prints.

    Args:
        command: The program, and its arguments.
        complaint: What cannot be done if it fails, as a sentence without a full stop.

    Raises:
        EngineError: It has failed; the error has the end of what it said.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise EngineError(f"{complaint}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout
