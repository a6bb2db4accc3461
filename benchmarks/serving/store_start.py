"""What the blocks of a full store cost an engine's start, without a model or a worker."""

import hashlib
import os
import random
import tempfile
import time
from pathlib import Path

from vllm.v1.core.block_pool import BlockPool

from benchmarks.stepper import Stepper
from vllm_kvretrieval.retrieval.exactness_levels import BlockLevels
from vllm_kvretrieval.store.disk.contexts import NO_PARENT
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.records import RECORD_BYTES, VOID, Record
from vllm_kvretrieval.store.disk.store import RECORDS, USED, Geometry, make_store, name_of
from vllm_kvretrieval.store.serving.blocks import Blocks
from vllm_kvretrieval.store.serving.scheduler import Arrivals, SchedulerStore

IDENTITY = {"benchmark": "start"}
BLOCK = 128
CONTEXT_BLOCKS = 250
"""Blocks of each context in the store."""


def fill(directory: Path, blocks: int) -> None:
    """Make a store whose records are all there, in no order; the contents are missing.

    Args:
        directory: Of all stores.
        blocks: How many it has, beside vLLM's null block.
    """
    root = Folder.at(str(directory), make=True)
    geometry = Geometry(blocks + 1, 0, 0, 0)
    make_store(root, IDENTITY, geometry, lambda fd, size, _: os.ftruncate(fd, size))
    root.close()
    places = random.Random(0).sample(range(1, blocks + 1), blocks)
    records, used = bytearray(VOID * (blocks + 1)), bytearray(8 * (blocks + 1))
    parent = NO_PARENT
    for turn, block in enumerate(places):
        number = turn % CONTEXT_BLOCKS
        parent = parent if number else NO_PARENT
        key = hashlib.sha256(turn.to_bytes(8, "little")).digest()
        record = Record(key, parent, number, level=0, created=1)
        records[block * RECORD_BYTES : (block + 1) * RECORD_BYTES] = record.pack()
        used[block * 8 : (block + 1) * 8] = turn.to_bytes(8, "little")
        parent = key
    store = directory / name_of(IDENTITY)
    (store / RECORDS).write_bytes(records)
    (store / USED).write_bytes(used)


def pool_for(blocks: int) -> BlockPool:
    """vLLM's block pool for a store with so many blocks."""
    return BlockPool(blocks + 1, enable_caching=True, hash_block_size=BLOCK)


def restore(directory: Path, pool: BlockPool) -> dict[str, float]:
    """Seconds, and seconds of CPU time, until all blocks are in vLLM's prefix cache.

    Args:
        directory: Where :func:`fill` has made the store.
        pool: See :func:`pool_for`; not used before.
    """
    begin, cpu = time.perf_counter(), time.process_time()
    store = SchedulerStore(
        str(directory), name_of(IDENTITY), Blocks([pool], [1]), BlockLevels(), Arrivals()
    )
    times = {"s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}
    assert store.take_counts() == {"store_tokens_restored": (len(pool.blocks) - 1) * BLOCK}
    store.close()
    return times


def restores(blocks: int, repeats: int) -> list[dict[str, float]]:
    """The times of :func:`restore`, so often, in a process with an engine's objects."""
    engine = Stepper({})
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent, "store")
        fill(directory, blocks)
        times = [restore(directory, pool_for(blocks)) for _ in range(repeats)]
    del engine
    return times
