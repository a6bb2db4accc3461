"""Changes that a running server makes to its store, since others ask it to.

Whoever may write to the store's directory puts a file into its inbox. The server looks there before
every request, so no request finds what has been dropped before it came.
"""

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.values import shortened

logger = logging.getLogger("vllm.kvretrieval.store")

INBOX = "inbox"
DROP, PIN, UNPIN = "drop", "pin", "unpin"
ACTIONS = DROP, PIN, UNPIN
NAME = re.compile(r"(\d{20})-[0-9a-f]+\.json")
RETRY_S = 30.0
"""Seconds before a change that has failed is tried again."""
NO_FILE = errno.ELOOP, errno.ENXIO, errno.EACCES
"""Errors of what cannot be opened: a link, a socket, a file that its own user may not read."""


class Change(NamedTuple):
    """What is to become of a context.

    Attributes:
        action: One of ``ACTIONS``.
        key: The key of the context's last block.
    """

    action: str
    key: bytes


def put(folder: Folder, change: Change) -> None:
    """Ask the server that uses a store for a change.

    Args:
        folder: The store's directory.
        change: What is asked for.
    """
    with contextlib.suppress(FileExistsError):
        folder.folder(INBOX, make=True).close()
    with contextlib.closing(folder.folder(INBOX)) as inbox:
        text = json.dumps({"action": change.action, "key": change.key.hex()})
        # Changes are made in the order of names, and those before this one are made or still there.
        known = [int(found[1]) for name in inbox.names() if (found := NAME.fullmatch(name))]
        number = max(known, default=0) + 1
        inbox.replace(f"{number:020}-{secrets.token_hex(4)}.json", text.encode())


class Inbox:
    """The inbox of a store, as its server sees it.

    Args:
        folder: The store's directory.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        # When what has failed is tried again, by the monotonic clock: all of it, and each by name.
        self._opens, self._failed = 0.0, dict[str, float]()

    def follow(self, make: Callable[[Change], None]) -> None:
        """Make changes that were asked for since the last call; quick if there are none.

        Each is removed when it has been made, so none is lost if the server ends before. One that
        fails keeps no other from being made, and is tried again later. What is no change is
        removed, or set aside if it is a directory, and the log says so.

        Args:
            make: Makes a change; may raise the errors below.

        Raises:
            OSError, RetrievalConfigError: A change has failed; of several, the last one's error.
        """
        if (now := time.monotonic()) < self._opens:
            return
        try:
            inbox = self._folder.folder(INBOX)
        except FileNotFoundError:
            return
        except (OSError, RetrievalConfigError):
            self._opens = now + RETRY_S
            raise
        failed: OSError | RetrievalConfigError | None = None
        with contextlib.closing(inbox):
            for name in inbox.names():
                if name.startswith(".") or now < self._failed.get(name, now):
                    continue
                try:
                    if (change := _read(inbox, name)) is None:
                        continue
                    make(change)
                    inbox.unlink(name)
                    self._failed.pop(name, None)
                except (OSError, RetrievalConfigError) as error:
                    failed, self._failed[name] = error, now + RETRY_S
        if failed is not None:
            raise failed


def _read(inbox: Folder, name: str) -> Change | None:
    """A change; None: it was none, and is out of the way."""
    try:
        asked = json.loads(inbox.read(name))
        change = Change(asked["action"], bytes.fromhex(asked["key"]))
        if change.action in ACTIONS:
            return change
        why = f"unknown action {shortened(change.action)}"
    except (RetrievalConfigError, ValueError, TypeError, KeyError) as error:
        why = str(error).rstrip(".")
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        why = os.strerror(error.errno)
    try:
        inbox.unlink(name)
        gone = "removed"
    except OSError:  # of a directory
        inbox.rename(name, new := f".refused-{secrets.token_hex(4)}")
        gone = f"now {new}"
    logger.error("store: %s is no change, and is %s (%s).", inbox.path / name, gone, why)
    return None
