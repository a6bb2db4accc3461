"""Changes that a running server makes to its store, since others ask it to.

Whoever may write to the store's directory puts a file into its inbox. The server looks there before
every request, so no request finds what has been dropped before it came.
"""

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.files import Folder

INBOX = "inbox"
DROP, PIN, UNPIN = "drop", "pin", "unpin"
ACTIONS = DROP, PIN, UNPIN
SETTLED_NS = 1_000_000_000
RETRY_S = 30.0
"""Seconds before a change that has failed is tried again."""


class Change(NamedTuple):
    """What is to become of a context.

    Attributes:
        action: One of ``ACTIONS``.
        key: The key of the context's last block.
        asked: When it was asked for, in seconds since 1970.
    """

    action: str
    key: bytes
    asked: float


def put(folder: Folder, change: Change) -> None:
    """Ask the server that uses a store for a change.

    Args:
        folder: The store's directory.
        change: What is asked for.
    """
    with contextlib.suppress(FileExistsError):
        folder.folder(INBOX, make=True).close()
    with contextlib.closing(folder.folder(INBOX)) as inbox:
        text = json.dumps(change._asdict() | {"key": change.key.hex()})
        # Rising names, since changes are made in the order of names.
        inbox.replace(f"{time.time_ns():020}-{secrets.token_hex(4)}.json", text.encode())


class Inbox:
    """The inbox of a store, as its server sees it.

    Args:
        folder: The store's directory.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._seen = 0
        self._retry = math.inf

    def follow(self, make: Callable[[Change], None]) -> None:
        """Make changes that were asked for since the last call; quick if there are none.

        Each is removed when it has been made, so none is lost if the server ends before. One that
        fails keeps no other from being made, and is tried again later.

        Args:
            make: Makes a change; may raise the errors below.

        Raises:
            OSError, RetrievalConfigError: A change has failed; of several, the last one's error.
        """
        try:
            found = os.stat(INBOX, dir_fd=self._folder.fd, follow_symlinks=False).st_mtime_ns
        except OSError:
            return
        if found == self._seen and time.monotonic() < self._retry:
            return
        # Times of files are coarse: what comes at the same time must not be missed.
        self._seen = found if time.time_ns() - found > SETTLED_NS else 0
        self._retry = math.inf
        failed: OSError | RetrievalConfigError | None = None
        with contextlib.closing(self._folder.folder(INBOX)) as inbox:
            for name in inbox.names():
                if name.startswith("."):
                    continue
                try:
                    if (change := _read(inbox, name)) is not None:
                        make(change)
                    inbox.unlink(name)
                except (OSError, RetrievalConfigError) as error:
                    failed, self._retry = error, time.monotonic() + RETRY_S
        if failed is not None:
            raise failed


def _read(inbox: Folder, name: str) -> Change | None:
    """A change; None: the file holds none."""
    try:
        asked = json.loads(inbox.read(name))
        change = Change(asked["action"], bytes.fromhex(asked["key"]), float(asked["asked"]))
    except (ValueError, TypeError, KeyError):
        return None
    return change if change.action in ACTIONS and math.isfinite(change.asked) else None
