"""Making a store and removing one: under its name it is always whole."""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.files import Folder
from vllm_kvretrieval.store.store import (
    FORMAT,
    IDENTITY,
    WHOLE,
    Geometry,
    WorkerShare,
    name_of,
    sum_of,
)

UNFINISHED = ".new-"


def make_store(
    root: Folder,
    identity: Mapping[str, Any],
    geometry: Geometry,
    reserve: Callable[[int, int, str], None],
    part: WorkerShare = WHOLE,
) -> None:
    """Make an empty store.

    Its directory gets its name when everything in it is complete and on the disk. The caller holds
    the lock of the directory above it, so that others leave alone what is unfinished.

    Args:
        root: The directory of all stores.
        identity: All that the meaning of the bytes depends on; what JSON can hold.
        geometry: Its sizes.
        reserve: Gives a file its size and space: descriptor, bytes, directory for messages.
        part: Of the worker whose store it is.
    """
    name = _unfinished()
    folder = root.folder(name, make=True)
    try:
        for file, size in geometry.files.items():
            fd = folder.make(file)
            try:
                if size:
                    reserve(fd, size, str(root.path))
                os.fsync(fd)
            finally:
                os.close(fd)
        described = {
            "format": FORMAT,
            "id": secrets.token_hex(16),
            "identity": identity,
            "part": part,
            "geometry": asdict(geometry),
        }
        sealed = described | {"sum": sum_of(described)}
        folder.replace(IDENTITY, json.dumps(sealed, indent=1).encode())
        folder.sync()
        root.rename(name, name_of(identity, part))
    except BaseException:
        root.remove(name)
        raise
    finally:
        folder.close()


def remove_store(root: Folder, name: str) -> None:
    """Remove a store that is locked; if the process ends before, what is left is unfinished."""
    root.rename(name, new := _unfinished())
    root.remove(new)


def _unfinished() -> str:
    """A new name for a store that is not whole."""
    return UNFINISHED + secrets.token_hex(8)


def _all_unfinished(root: Folder) -> list[str]:
    """Names of what is being made, or was when its process ended, or is being removed."""
    return [name for name in root.names() if name.startswith(UNFINISHED)]


def remove_unfinished(root: Folder) -> int:
    """Remove what processes have left that ended while they made a store; how many there were.

    The caller holds the lock of the directory.
    """
    removed = 0
    for name in _all_unfinished(root):
        with contextlib.suppress(OSError):
            root.remove(name)
            removed += 1
    return removed


def size_of_unfinished(root: Folder) -> int:
    """Bytes of the files of what is being made; they grow while a process writes zeros."""
    size = 0
    for name in _all_unfinished(root):
        leave_out = contextlib.suppress(OSError, RetrievalConfigError)
        with leave_out, contextlib.closing(root.folder(name)) as folder:
            size += sum(folder.stat(file).st_size for file in folder.names())
    return size
