"""Checks of the folders in which vLLM and torch keep what they have made."""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
        name: The finding's name.
        refused: What importing vLLM, or reading a model, has ended in.
    """
    if refused.errno not in REFUSED or refused.filename is None:
        return None
    folder = os.fsdecode(refused.filename)
    text = f"{folder} cannot be written by user {os.geteuid()} ({refused.strerror})"
    return error(name, text, _remedy(_variable(folder)))


def check_caches(compiles: bool | None = None) -> Iterator[Finding]:
    """Whether the folders may be written in which a start keeps what it compiles.

    Args:
        compiles: Whether it does; None: it is supposed to, as a server without options.
    """
    if compiles is False:
        return
    from vllm import envs

    folders = {"VLLM_CACHE_ROOT": envs.VLLM_CACHE_ROOT}
    if (of_torch := os.environ.get("TORCHINDUCTOR_CACHE_DIR")) is not None:
        folders["TORCHINDUCTOR_CACHE_DIR"] = of_torch  # torch sets it when it is imported
    for variable, folder in folders.items():
        try:
            _write_below(Path(folder))
        except OSError as e:
            text = f"{folder} cannot be written by user {os.geteuid()} ({e.strerror})"
            text += ", and a start keeps there what it compiles"
            report = advice if compiles is None else error
            yield report("caches", text, _remedy(variable))
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
