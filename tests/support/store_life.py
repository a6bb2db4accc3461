"""Servers with a store: vLLM's scheduler, and a worker that writes bytes which name their owner.

Of models with one kind of layers and with several.
"""

import collections
import hashlib
import random
import time
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from benchmarks.stepper import BLOCK, Stepper
from tests.support.store_model import contents
from vllm_kvretrieval.engine.block_pools import Split
from vllm_kvretrieval.engine.connector import Seats
from vllm_kvretrieval.storage.lost import Lost, allotted_blocks
from vllm_kvretrieval.store.disk.files import write_at
from vllm_kvretrieval.store.disk.groups import GROUPS
from vllm_kvretrieval.store.disk.inbox import Change, put
from vllm_kvretrieval.store.disk.store import Geometry, open_store
from vllm_kvretrieval.store.serving import groups
from vllm_kvretrieval.store.serving.halves import FIELD
from vllm_kvretrieval.store.serving.worker import WorkerStore

BLOCKS = 90
PARTS = 24, 8
GEOMETRY = Geometry(BLOCKS, 2, 64, sum(PARTS))
DIVIDED = Geometry(56, 2, 64, sum(PARTS), others=BLOCKS - 56, other_bytes=sum(PARTS))
"""As many blocks, those of windows and states behind the ones in a slow home."""
OPTIONS = {"home": "disk", "budget": 256}
IDENTITY = {"model": "test", "dtype": "x", "codec": "raw", "vllm": "0", "block_size": BLOCK}


def stepper(directory, specs=(), tokens=512, **options):
    """The scheduler of a server.

    Args:
        directory: Where its store is.
        specs: See :class:`Stepper`.
        tokens: Most of a step.
        options: Further ones of KV retrieval.
    """
    store = {"store": str(directory)} | options
    return Stepper(
        OPTIONS | store,
        blocks=BLOCKS,
        groups=specs,
        max_model_len=1024,
        max_num_batched_tokens=tokens,
        enable_prefix_caching=True,
    )


def window(block: int, tokens: int) -> KVCacheSpec:
    """vLLM's spec of layers with a sliding window."""
    shape = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **shape)


def chunks(block: int, tokens: int) -> KVCacheSpec:
    """vLLM's spec of layers that attend to chunks of the context."""
    shape = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=tokens, **shape)


def state(block: int) -> KVCacheSpec:
    """vLLM's spec of layers with a recurrent state."""
    return MambaSpec(
        block_size=block, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


def written(key, level, group=0):
    """What the worker writes to a block: its pages in all layers, and what is beside them.

    Args:
        key: The block's.
        level: The number of its level.
        group: The store's number of its group of layers.
    """
    size = GEOMETRY.layers * GEOMETRY.layer_block_bytes + GEOMETRY.side_bytes
    return hashlib.shake_256(bytes(key) + bytes([group, *level.to_bytes(4, "little")])).digest(size)


class Life:
    """A server from its start to its end: the scheduler, and a worker that computes nothing."""

    def __init__(self, directory, stepper, seed=0, divided=False):
        self.random = random.Random(seed)
        self.geometry, split = GEOMETRY, None
        self.stepper, self.scheduler = stepper, stepper.scheduler
        self.groups = self.scheduler.kv_cache_config.kv_cache_groups
        self.specs = [group.kv_cache_spec for group in self.groups]
        coordinator = self.scheduler.kv_cache_manager.coordinator
        self.shares_parts = getattr(coordinator, "enable_partial_hash_hits", False)
        identity = dict[str, Any](IDENTITY)
        if len(self.groups) > 1:
            identity[GROUPS] = groups.described(self.groups, "test")
        self.home: Any = WorkerStore(str(directory), identity)
        if divided:
            numbers = range(len(self.specs))
            homes = tuple(n for n in numbers if isinstance(self.specs[n], FullAttentionSpec))
            self.geometry = DIVIDED
            split = Split(homes, DIVIDED.blocks, DIVIDED.others)
        self.home.file(self.geometry)
        self.parts = [torch.zeros(BLOCKS, n, dtype=torch.uint8) for n in PARTS]
        self.lost = Lost()
        self.home.attach(self.parts, self.lost, others=self.parts if divided else ())
        self.store = open_store(str(directory), self.home.name, write=True)
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): Seats(8, self.home.name, split)}
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
        self.settle()
        self.write(block, b"?" * len(written(b"", 0)))
        self.store.write_side(block, [b"?" * self.geometry.beside(block)[1]])

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
        assert not self.lost.take()
        copies = [(c.src_block_id, c.dst_block_id) for c in output.kv_cache_block_copies or ()]
        for source, target in copies:
            self.write(target, self.read(source))
        copied = {target for _, target in copies}
        sizes = {number: spec.block_size for number, spec in enumerate(self.specs)}
        by_group = allotted_blocks(output, sizes)
        for _, new in by_group:
            for block in {*new} - copied - {0}:
                self.write(block, self.random.randbytes(len(written(b"", 0))))
        for block, record in step.commit:
            self.write(block, written(record.key, record.level, record.group))
        for shared, _ in by_group:
            for block in {*shared} - copied - {0}:
                self.check(self.scheduler._store._blocks[block])
        for request in output.scheduled_new_reqs:
            self.check_whole(request.block_ids, request.num_computed_tokens)
        self.home.end_step(step)

    def check(self, block):
        """What a request shares has the right bytes: on disk, and in memory beside it."""
        store = self.scheduler._store
        record = store._stored.get(block.block_id)
        if record is None or block.block_hash != store._hash_of(record):
            assert self.shares_parts, "only parts of blocks are not stored"
            return
        level = store.numbers.number(self.scheduler.levels.of(block))
        data = written(block.block_hash[:32], level, record.group)
        found = self.read(block.block_id)
        assert data[-len(found) :] == found
        self.checked += 1

    def check_whole(self, by_group, tokens):
        """A request that shares tokens has of each group what it needs to go on behind them."""
        for spec, blocks in zip(self.specs, by_group, strict=True):
            first, size = 0, spec.block_size
            if isinstance(spec, SlidingWindowSpec):
                first = max(tokens - spec.sliding_window + 1, 0) // size
            elif isinstance(spec, ChunkedLocalAttentionSpec):
                chunk = spec.attention_chunk_size
                first = tokens // chunk * chunk // size
            elif isinstance(spec, MambaSpec):
                first = (tokens - 1) // size
            assert 0 not in blocks[max(first, 0) : -(-tokens // size)]

    def read(self, block):
        """The bytes of a block: those on the disk, and those in memory beside it."""
        pages = contents(self.store, block)[: -sum(PARTS)]
        return pages + b"".join(bytes(part[block].tolist()) for part in self.parts)

    def write(self, block, data):
        sizes = self.geometry
        for layer in range(sizes.layers if block < sizes.blocks else 0):
            size = sizes.layer_block_bytes
            place = (layer * sizes.blocks + block) * size
            write_at(self.store.pages_fd, data[layer * size : (layer + 1) * size], place)
        side = torch.frombuffer(bytearray(data[-sum(PARTS) :]), dtype=torch.uint8)
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
