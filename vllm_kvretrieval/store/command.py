"""``vllm-kvretrieval store``: look at the stores in a directory, and change them."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from tqdm import tqdm

from vllm_kvretrieval.command_inputs import number
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.add import add_arguments
from vllm_kvretrieval.store.disk.changes import change, each_store, locked
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.inbox import DROP, PIN, UNPIN
from vllm_kvretrieval.store.disk.store import (
    LOCK,
    WORKER_LOCK,
    StoreInUseError,
    release,
    remove_store,
    remove_unfinished,
    store_names,
    take_locks,
)
from vllm_kvretrieval.store.listing import listed

CONTEXT = "name of a context, or its id (its first 8 digits or more), as `ls` shows them"
DONE = {PIN: "is pinned", UNPIN: "has no pin of its own any more", DROP: "is forgotten"}
GIB = 1 << 30


def add_store(commands: Any) -> None:
    """Add the subcommand to those of the command line."""
    about = "look at the KV caches that --kv-retrieval.store keeps, and change them"
    store = commands.add_parser("store", help=about, description=about)
    actions = store.add_subparsers(required=True, metavar="ACTION")
    listing = _add(actions, "ls", list_contexts, "list stores and the contexts in them")
    listing.add_argument("--contexts", type=number, default=20, help="most per store (default: 20)")
    for what, text in (
        (PIN, "never evict a context"),
        (UNPIN, "let a context be evicted again"),
        (DROP, "forget a context, but for what others share of it"),
    ):
        action = _add(actions, what, alter, text)
        action.set_defaults(change=what)
        action.add_argument("context", metavar="CONTEXT", help=CONTEXT)
    reading = actions.add_parser(
        "add",
        help="read documents, so that a server answers about them at once",
        description="Reads documents by an engine of its own, and keeps their KV cache. Options of "
        "the engine follow --, and must be those of the server, --kv-retrieval.home included: with "
        "others the documents are in another store, where the server does not look.",
    )
    add_arguments(reading)
    _add(actions, "verify", verify, "read all blocks, and forget those that are damaged")
    cleaning = _add(actions, "gc", collect, "remove stores that no server has used for long")
    limit = cleaning.add_mutually_exclusive_group()
    limit.add_argument(
        "--days", type=_days, default=30.0, help="unused for so many days (default: 30)"
    )
    limit.add_argument("--all", action="store_true", help="all that no server uses now")


def _add(actions: Any, name: str, run: Any, about: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=about, description=about)
    action.add_argument("directory", metavar="DIR", help="the directory of --kv-retrieval.store")
    action.set_defaults(run=run)
    return action


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not 0 <= days < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of days, got {text}")
    return days


def list_contexts(given: argparse.Namespace) -> int:
    """Print the stores of a directory, and the latest contexts of each; the exit status."""
    stores, refused = listed(given.directory, given.contexts)
    for store in stores:
        print(
            f"{store.name}: {store.model}, {store.dtype}, codec {store.codec}, vLLM {store.vllm}; "
            f"{store.bytes / GIB:.2f} GiB, {store.tokens} of {store.room} tokens, {store.count} "
            f"context{'s'[: store.count != 1]}"
        )
        if store.contexts:
            print(f"  {'id':12} {'tokens':>9} {'level':9} {'written':16} {'pinned':6} names")
        for context in store.contexts:
            written = time.strftime("%Y-%m-%d %H:%M", time.localtime(context.written))
            pinned = "yes" if context.pinned else context.pinned_tokens or ""
            row = f"  {context.id} {context.tokens:9} {context.level:9} {written} {pinned:6}"
            behind = [f"(behind {', '.join(context.begins_with)})"] if context.begins_with else []
            print(" ".join([row, *filter(None, [", ".join(context.names)]), *behind]).rstrip())
        if store.count > len(store.contexts):
            print(f"  and {store.count - len(store.contexts)} more")
    if not stores and not refused:
        print(f"{given.directory} has no stores.")
    return _report(refused)


def alter(given: argparse.Namespace) -> int:
    """Pin, unpin or drop a context; the exit status."""
    made, refused = change(given.directory, given.context, given.change)
    if not made:
        print(f"{given.context} is forgotten.")
    for one in made:
        when = ", as soon as the server gets a request" if one.asked else ""
        print(f"{given.context} {DONE[given.change]} in {one.store}{when}. {one.remark}".rstrip())
    return _report(refused)


def verify(given: argparse.Namespace) -> int:
    """Check every block of all stores that no server uses; the exit status."""
    _, refused = each_store(given.directory, lambda store: _verify(given.directory, store.name))
    return _report(refused)


def _verify(directory: str, name: str) -> None:
    try:
        with locked(directory, name) as store:
            records = store.records()
            bar = tqdm(records.items(), desc=name, unit="block", leave=False)
            damaged = [block for block, record in bar if not store.intact(block, record)]
            store.void(damaged)
    except StoreInUseError as error:
        print(error)
        return
    print(f"{name}: {len(records) - len(damaged)} blocks are intact, {len(damaged)} damaged.")


def _report(refused: Sequence[str]) -> int:
    """Say what could not be looked at; the exit status."""
    for reason in refused:
        print(reason, file=sys.stderr)
    return int(bool(refused))


def collect(given: argparse.Namespace) -> int:
    """Remove stores that nobody uses, and what was left unfinished; the exit status."""
    oldest, refused = time.time() - given.days * 86400, list[str]()
    with closing(Folder.at(given.directory)) as root:
        locks = take_locks(root, [LOCK], 60.0)
        try:
            if left := remove_unfinished(root):
                print(f"{left} unfinished stores are removed.")
            for name in store_names(root):
                try:
                    _collect(root, name, None if given.all else oldest)
                except (RetrievalConfigError, OSError) as error:
                    refused.append(f"store: {name} stays ({str(error).rstrip('.')}).")
        finally:
            release(locks)
    return _report(refused)


def _collect(root: Folder, name: str, oldest: float | None) -> None:
    with closing(root.folder(name)) as folder:
        latest = max((folder.stat(file).st_mtime for file in folder.names()), default=0)
        if oldest is not None and latest > oldest:
            print(f"{name} stays.")
            return
        try:
            locks = take_locks(folder, [LOCK, WORKER_LOCK])
        except StoreInUseError as error:
            print(error)
            return
        try:
            remove_store(root, name)
        finally:
            release(locks)
    print(f"{name} is removed.")
