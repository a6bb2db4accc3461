"""Files of a store are for the server's user alone: prompts can be recovered from a KV cache."""

import contextlib
import logging
import os
import shlex
import stat
from pathlib import Path

from vllm_kvretrieval.errors import RetrievalConfigError

GROUP = 0o070
"""Rights that a volume may give to a group at every start, as Kubernetes does with ``fsGroup``."""

logger = logging.getLogger("vllm.kvretrieval.store")
_told = set[Path]()


def keep_private(fd: int, path: Path, top: Path, closed: int = 0o077) -> None:
    """Refuse a file or directory that others have rights to, but take those of a group away.

    The log says once for each directory of stores that rights were taken away.

    Args:
        fd: The descriptor of the file or directory.
        path: The path of the file or directory, for messages.
        top: The directory of all stores.
        closed: Bits of the mode that have to be clear.

    Raises:
        RetrievalConfigError: It belongs to another user, or everybody has rights to it, or a group
            has and they cannot be taken away.
    """
    found = os.fstat(fd)
    user, mode = os.geteuid(), stat.S_IMODE(found.st_mode)
    if found.st_uid != user:
        own = "name a directory of the server's user"
        if not mode & stat.S_IWOTH:
            own = f"as root, run chown -R {user} {shlex.quote(str(top))}, or {own}"
        raise RetrievalConfigError(
            f"store: {path} belongs to user {found.st_uid}, and the server runs as {user}; {own}."
        )
    if mode & closed and not mode & closed & ~GROUP:
        with contextlib.suppress(OSError):
            os.fchmod(fd, mode & ~closed)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if not mode & closed and top not in _told:
            _told.add(top)
            logger.warning(
                "store: a group had rights to %s or files below it; they are taken away. Of a "
                "volume of Kubernetes, fsGroupChangePolicy: OnRootMismatch leaves modes alone.",
                top,
            )
    if mode & closed:
        close = f"close it: chmod -R go= {shlex.quote(str(top))}/kv-*"
        if path == top:
            close = f"name a new one below it ({top / 'store'}), which the server makes"
        raise RetrievalConfigError(
            f"store: {path} is open to other users (mode {mode:o}), and prompts can be recovered "
            f"from a KV cache; {close}."
        )
