"""Servers with a store: vLLM's scheduler, and a worker that writes bytes which name their owner."""

import collections
import hashlib
import random
import time
from typing import Any

import torch

from benchmarks.stepper import BLOCK, Stepper
from tests.support.store_model import Lost, contents
from vllm_kvretrieval.engine.allotments import allotted_blocks
from vllm_kvretrieval.engine.connector import Seats
from vllm_kvretrieval.store.disk.files import write_at
from vllm_kvretrieval.store.disk.inbox import Change, put
from vllm_kvretrieval.store.disk.store import Geometry, open_store
from vllm_kvretrieval.store.serving.halves import FIELD
from vllm_kvretrieval.store.serving.worker import WorkerStore

BLOCKS = 90
PARTS = 24, 8
GEOMETRY = Geometry(BLOCKS, 2, 64, sum(PARTS))
OPTIONS = {"home": "disk", "budget": 256}


def stepper(directory, **options):
    store = {"store": str(directory)} | options
    return Stepper(OPTIONS | store, blocks=BLOCKS, max_model_len=1024, enable_prefix_caching=True)


def written(key, level):
    """What the worker writes to a block: its pages in all layers, and what is beside them.

    Args:
        key: The block's.
        level: The number of its level.
    """
    size = GEOMETRY.layers * GEOMETRY.layer_block_bytes + GEOMETRY.side_bytes
    return hashlib.shake_256(bytes(key) + level.to_bytes(4, "little")).digest(size)


class Life:
    """A server from its start to its end: the scheduler, and a worker that computes nothing."""

    def __init__(self, directory, stepper, seed=0):
        self.random = random.Random(seed)
        self.home: Any = WorkerStore(str(directory), {"model": "test", "block_size": BLOCK})
        self.home.file(GEOMETRY)
        self.parts = [torch.zeros(BLOCKS, n, dtype=torch.uint8) for n in PARTS]
        self.lost = Lost()
        self.home.attach(self.parts, self.lost)
        self.store = open_store(str(directory), self.home.name, write=True)
        self.stepper, self.scheduler = stepper, stepper.scheduler
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): Seats(8, self.home.name)}
        )
        self.stepper.look = self.compute
        self.checked, self.counts = 0, collections.Counter[str]()
        take = self.scheduler._store.take_counts
        self.scheduler._store.take_counts = lambda: self.count(take())

    def count(self, counts):
        """Add up what the connector takes."""
        self.counts.update(counts)
        return counts

    def damage(self, block):
        """Change the bytes of a block that has been stored."""
        assert self.home._writer is not None
        self.home._writer._thread.submit(int).result()
        self.write(block, b"?" * len(written(b"", 0)))

    def change(self, action, key):
        """Ask the server for a change, as others do."""
        put(self.store.folder, Change(action, key))

    def settle(self):
        """Wait until the worker has written the blocks that it has been told to write."""
        self.home._writer._thread.submit(int).result()

    def compute(self, output):
        """A step of the worker."""
        if not output.total_num_scheduled_tokens:
            time.sleep(0.001)  # as vLLM does where requests wait for a connector
        step = getattr(output, FIELD)
        self.home.begin_step(step)
        assert not self.lost.added
        shared, new = allotted_blocks(output, BLOCK)
        for block in new:
            self.write(block, self.random.randbytes(len(written(b"", 0))))
        for block, record in step.commit:
            self.write(block, written(record.key, record.level))
        for block in {*shared}:
            self.check(self.scheduler.kv_cache_manager.block_pool.blocks[block])
        self.home.end_step(step)

    def check(self, block):
        """What a request shares has the right bytes: on disk, and in memory beside it."""
        level = self.scheduler._store.numbers.number(self.scheduler.levels.of(block))
        data = written(block.block_hash[:32], level)
        pages, side = data[: -GEOMETRY.side_bytes], data[-GEOMETRY.side_bytes :]
        assert contents(self.store, block.block_id)[: len(pages)] == pages
        assert b"".join(bytes(part[block.block_id].tolist()) for part in self.parts) == side
        self.checked += 1

    def write(self, block, data):
        for layer in range(GEOMETRY.layers):
            size = GEOMETRY.layer_block_bytes
            place = (layer * BLOCKS + block) * size
            write_at(self.store.pages_fd, data[layer * size : (layer + 1) * size], place)
        side = torch.frombuffer(bytearray(data[-GEOMETRY.side_bytes :]), dtype=torch.uint8)
        for part, values in zip(self.parts, side.split(PARTS), strict=True):
            part[block] = values

    def ask_at_random(self):
        """A request that shares beginnings with others, and perhaps wants exact answers."""
        document = self.random.randrange(6)
        length = self.random.randrange(1, 20) * BLOCK + self.random.randrange(BLOCK)
        tokens = [document * 97 + i % 89 for i in range(length)]
        options = {"exact": True} if self.random.random() < 0.3 else {}
        self.stepper.add(tokens, self.random.randrange(1, 3 * BLOCK), options)

    def end(self):
        self.home.close()
        self.scheduler.shutdown()


def prompt(document, blocks=8):
    return [document * 97 + i % 89 for i in range(blocks * BLOCK + 5)]
