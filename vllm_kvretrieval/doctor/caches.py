"""Checks of the folders in which vLLM and torch keep what they have made."""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_kvretrieval.doctor.findings import Finding, advice, error

FOLDERS = {
    "torchinductor": "TORCHINDUCTOR_CACHE_DIR",
    ".cache/vllm": "VLLM_CACHE_ROOT",
    ".config/vllm": "VLLM_CONFIG_ROOT",
    ".cache/huggingface": "HF_HOME",
    ".cache/torch": "TORCH_HOME",
    ".triton": "TRITON_CACHE_DIR",
}
"""Environment variables that move a folder, by a part of its usual path."""
OTHERS = ("XDG_CACHE_HOME", "TMPDIR", "HOME")
"""Variables that many folders follow, the nearest first."""
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def check_refused(name: str, refused: OSError) -> Finding | None:
    """Why a folder that has to be written is not; None: the error is about something else.

    Args:
        name: Of the finding.
        refused: What importing vLLM, or reading a model, has ended in.
    """
    if refused.errno not in REFUSED or refused.filename is None:
        return None
    folder = os.fsdecode(refused.filename)
    text = f"{folder} cannot be written by user {os.geteuid()} ({refused.strerror})"
    return error(name, text, _remedy(_variable(folder)))


def check_caches(vllm_config: Any = None) -> Iterator[Finding]:
    """Whether there is room for what a start compiles, in folders that may be written.

    Args:
        vllm_config: vLLM's configuration; None: that of a server without options.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from vllm import envs

    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
    folders = {"VLLM_CACHE_ROOT": envs.VLLM_CACHE_ROOT, "TORCHINDUCTOR_CACHE_DIR": compiled}
    report = advice if vllm_config is None else error  # a server without options is supposed
    for variable, folder in folders.items():
        try:
            _write_below(Path(folder))
        except OSError as e:
            text = f"{folder} cannot be written by user {os.geteuid()} ({e.strerror})"
            yield report(
                "caches", f"{text}, and a start keeps there what it compiles", _remedy(variable)
            )
            return
    yield Finding("caches", f"{' and '.join(folders.values())} may be written")


def _write_below(folder: Path) -> None:
    """Make a file for a moment in a folder, or in the one where it would be made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    tempfile.TemporaryFile(dir=there).close()


def _variable(folder: str) -> str:
    """The environment variable that moves a folder."""
    for variable in (*FOLDERS.values(), *OTHERS):
        if (value := os.environ.get(variable)) and Path(folder).is_relative_to(value):
            return variable
    return next((variable for part, variable in FOLDERS.items() if part in folder), OTHERS[-1])


def _remedy(variable: str) -> str:
    return f"set {variable} to a folder that this user may write, or allow it to write this one"
