"""``vllm-kvretrieval store``: look at the stores in a directory, and change them."""

import argparse
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from tqdm import tqdm

from vllm_kvretrieval.store.contexts import (
    Context,
    contexts,
    named,
    own_blocks,
    reachable,
    read_pins,
    write_pins,
)
from vllm_kvretrieval.store.files import Folder
from vllm_kvretrieval.store.store import (
    LOCK,
    WORKER_LOCK,
    Store,
    open_store,
    release,
    remove_unfinished,
    store_names,
    take_locks,
)

LEVELS = ("exact", "decoded", "prefilled")
"""Words for ``vllm_kvretrieval.engine.levels.Level``."""
CONTEXT = "first digits of a context's id, as `ls` shows it"
GIB = 1 << 30


def add_store(commands: Any) -> None:
    """Add the subcommand to those of the command line."""
    about = "look at the KV caches that --kv-retrieval.store keeps, and change them"
    store = commands.add_parser("store", help=about, description=about)
    actions = store.add_subparsers(required=True, metavar="ACTION")
    listing = _add(actions, "ls", list_contexts, "list stores and the contexts in them")
    listing.add_argument("--contexts", type=int, default=20, help="most per store (default: 20)")
    for action, run, what in (
        ("pin", pin, "never evict a context; takes effect when the server starts"),
        ("unpin", unpin, "let a context be evicted again"),
        ("drop", drop, "forget a context, but for what others share of it"),
    ):
        _add(actions, action, run, what).add_argument("context", metavar="CONTEXT", help=CONTEXT)
    _add(actions, "verify", verify, "read all blocks, and forget those that are damaged")
    cleaning = _add(actions, "gc", collect, "remove stores that no server has used for long")
    limit = cleaning.add_mutually_exclusive_group()
    limit.add_argument(
        "--days", type=float, default=30.0, help="unused for so many days (default: 30)"
    )
    limit.add_argument("--all", action="store_true", help="all that no server uses now")


def _add(actions: Any, name: str, run: Any, about: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=about, description=about)
    action.add_argument("directory", metavar="DIR", help="the directory of --kv-retrieval.store")
    action.set_defaults(run=run)
    return action


def list_contexts(given: argparse.Namespace) -> None:
    """Print the stores of a directory, and the latest contexts of each."""
    with closing(Folder.at(given.directory)) as root:
        names = store_names(root)
    for name in names:
        with closing(open_store(given.directory, name)) as store:
            _print_store(store, given.contexts)
    if not names:
        print(f"{given.directory} has no stores.")


def _print_store(store: Store, most: int) -> None:
    sizes, identity = store.geometry, store.identity
    records = reachable(store.records())
    tokens, found = identity["block_size"], contexts(records)
    pins = read_pins(store.folder)
    print(
        f"{store.folder.path.name}: {identity['model']}, {identity['dtype']}, codec "
        f"{identity['codec']}, vLLM {identity['vllm']}; {sizes.bytes / GIB:.2f} GiB, "
        f"{len(records) * tokens} of {sizes.blocks * tokens} tokens, {len(found)} contexts"
    )
    if found:
        print(f"  {'id':12} {'tokens':>9} {'level':9} {'written':16} pinned")
    for context in found[:most]:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(context.created))
        level = LEVELS[context.level]
        pinned = "yes" if context.key in pins else ""
        row = f"  {context.id:12} {len(context.blocks) * tokens:9} {level:9} {written} {pinned}"
        print(row.rstrip())
    if len(found) > most:
        print(f"  and {len(found) - most} more")


def pin(given: argparse.Namespace) -> None:
    """Pin a context."""
    with _context(given) as (store, context, _):
        write_pins(store.folder, read_pins(store.folder) | {context.key})
    print(f"{context.id} is pinned.")


def unpin(given: argparse.Namespace) -> None:
    """Unpin a context."""
    with _context(given) as (store, context, _):
        write_pins(store.folder, read_pins(store.folder) - {context.key})
    print(f"{context.id} may be evicted.")


def drop(given: argparse.Namespace) -> None:
    """Forget a context."""
    with _context(given) as (store, context, others):
        own = own_blocks(context, others)
        keys = {context.key}
        # Also other blocks with these contents, which would take their place.
        gone = {store.records()[block].key for block in own}
        store.void(block for block, record in store.records().items() if record.key in gone)
        write_pins(store.folder, read_pins(store.folder) - keys)
    print(
        f"{context.id} is forgotten: {len(own)} of its {len(context.blocks)} blocks were its own."
    )


def verify(given: argparse.Namespace) -> None:
    """Check every block of all stores that no server uses."""
    with closing(Folder.at(given.directory)) as root:
        names = store_names(root)
    for name in names:
        with _locked(given.directory, name) as store:
            records = store.records()
            bar = tqdm(records.items(), desc=name, unit="block", leave=False)
            damaged = [block for block, record in bar if not store.intact(block, record)]
            store.void(damaged)
        print(f"{name}: {len(records) - len(damaged)} blocks are intact, {len(damaged)} damaged.")


def collect(given: argparse.Namespace) -> None:
    """Remove stores that nobody uses, and what was left unfinished."""
    oldest = time.time() - given.days * 86400
    with closing(Folder.at(given.directory)) as root:
        locks = take_locks(root, [LOCK], 60.0)
        try:
            if left := remove_unfinished(root):
                print(f"{left} unfinished stores are removed.")
            for name in store_names(root):
                _collect(root, name, None if given.all else oldest)
        finally:
            release(locks)


def _collect(root: Folder, name: str, oldest: float | None) -> None:
    with closing(root.folder(name)) as folder:
        latest = max((folder.path / file).stat().st_mtime for file in folder.names())
        if oldest is not None and latest > oldest:
            print(f"{name} stays.")
            return
        release(take_locks(folder, [LOCK, WORKER_LOCK]))
        root.remove(name)
    print(f"{name} is removed.")


@contextmanager
def _locked(directory: str, name: str) -> Iterator[Store]:
    """A store that nobody else uses meanwhile."""
    with closing(open_store(directory, name, write=True)) as store:
        locks = take_locks(store.folder, [LOCK, WORKER_LOCK])
        try:
            yield store
        finally:
            release(locks)


@contextmanager
def _context(given: argparse.Namespace) -> Iterator[tuple[Store, Context, list[Context]]]:
    """The context that is meant, its store, and all contexts there."""
    found = dict[str, list[Context]]()
    with closing(Folder.at(given.directory)) as root:
        for name in store_names(root):
            with closing(open_store(given.directory, name)) as store:
                found[name] = contexts(reachable(store.records()))
    context = named([context for own in found.values() for context in own], given.context)
    (name,) = (name for name, own in found.items() if context in own)
    with _locked(given.directory, name) as store:
        yield store, context, contexts(reachable(store.records()))
