"""The worker's half of a store: whose it is, what it writes, and what it reads back."""

import errno
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.support.store_model import FailingDisk, contents
from vllm_kvretrieval.engine.cpu.worker import RetrievalCPUWorker
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.lost import Lost
from vllm_kvretrieval.store.disk.contexts import NO_PARENT
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.store.disk.store import Geometry, name_of, open_store
from vllm_kvretrieval.store.serving import worker as store_worker
from vllm_kvretrieval.store.serving.halves import FIELD, StoreStep
from vllm_kvretrieval.store.serving.identity import identity_of, weights_hash
from vllm_kvretrieval.store.serving.worker import PATIENCE, WorkerStore

BLOCKS, DENSE, INDEX = 6, 48, 16
GEOMETRY = Geometry(BLOCKS, 2, 64, DENSE + INDEX)
IDENTITY = {"model": "test"}

HOLD = """
import sys, time
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.store import take_locks
locks = take_locks(Folder.at(sys.argv[1]), [sys.argv[2]])
print("held", flush=True)
time.sleep(float(sys.argv[3]))
"""


def home_store(tmp_path):
    """A store that a worker has made, and what its blocks have outside of home."""
    home: Any = WorkerStore(str(tmp_path / "store"), IDENTITY)
    home.file(GEOMETRY)
    parts = [torch.randint(256, (BLOCKS, n), dtype=torch.uint8) for n in (DENSE, INDEX)]
    home.lost = Lost()
    home.attach(parts, home.lost, pages=4)
    return home, parts


def reader(tmp_path, home):
    return open_store(str(tmp_path / "store"), home.name)


def record(block):
    return Record(bytes([block + 1]) * 32, NO_PARENT, 0, 0, 1)


def commit(home, *blocks):
    home.end_step(StoreStep(commit=[(block, record(block)) for block in blocks]))
    settle(home)


def settle(home):
    """Wait until everything is stored."""
    home._writer._thread.submit(int).result()
    home._writer.look()


def hold(tmp_path, home, lock, seconds):
    path = str(tmp_path / "store" / home.name)
    command = [sys.executable, "-c", HOLD, path, lock, str(seconds)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    return holder


def test_what_is_written_is_read_back(tmp_path):
    home, parts = home_store(tmp_path)
    before = [part.clone() for part in parts]
    commit(home, 2, 4)
    for part in parts:
        part.zero_()
    assert [*home.take_counts().values()] == [2, 2 * GEOMETRY.block_bytes, 0]
    home.close()
    later = WorkerStore(str(tmp_path / "store"), IDENTITY)
    assert later.blocks == BLOCKS
    later.file(GEOMETRY)
    later.attach(parts, lost := Lost())
    later.begin_step(StoreStep(load=[2]))
    assert not lost.take()
    for part, old in zip(parts, before, strict=True):
        assert part[2].equal(old[2])
        assert not part[4].any()
    assert [*later.take_counts().values()] == [0, 0, 1]
    assert not any(later.take_counts().values())
    store = reader(tmp_path, home)
    assert {b: store.intact(b, r) for b, r in store.records().items()} == {2: True, 4: True}


def test_voids_come_before_and_records_after_the_step(tmp_path):
    home, parts = home_store(tmp_path)
    commit(home, 1, 3)
    step = StoreStep(void=[1, 3], commit=[(1, record(1))])
    home.begin_step(step)
    assert reader(tmp_path, home).records() == {}
    parts[0][1] += 1
    home.end_step(step)
    settle(home)
    store = reader(tmp_path, home)
    assert [store.intact(b, r) for b, r in store.records().items()] == [True]
    assert contents(store, 1).endswith(bytes(parts[0][1].tolist() + parts[1][1].tolist()))


def test_nothing_is_stored_of_a_step_that_lost_something(tmp_path):
    home, _ = home_store(tmp_path)
    home.lost.some = True
    commit(home, 1)
    home.lost.some = False
    commit(home)
    assert reader(tmp_path, home).records() == {}


def storing(home):
    """The part of a worker that its store follows."""
    worker: Any = object.__new__(RetrievalCPUWorker)
    worker.stored = home
    worker.model_runner = SimpleNamespace(vllm_config=SimpleNamespace(use_v2_model_runner=True))
    return worker


@pytest.mark.parametrize("late", [False, True], ids=["V1", "V2"])
def test_losses_count_whenever_the_runner_asks_for_them(tmp_path, monkeypatch, late):
    """vLLM's V1 runner does while it computes, V2 when it samples tokens."""
    home, _ = home_store(tmp_path)
    worker = storing(home)

    def look(when):
        if when == late:
            home.lost.some = lost.pop()

    monkeypatch.setattr(CPUWorker, "execute_model", lambda *_: look(False))
    monkeypatch.setattr(CPUWorker, "sample_tokens", lambda *_: look(True))
    lost = [False, True]
    for block in (1, 2):
        step = StoreStep(commit=[(block, record(block))])
        worker._begin_stored(output := SimpleNamespace(**{FIELD: step}))
        worker._compute(output)
        worker.sample_tokens(None)
    settle(home)
    assert reader(tmp_path, home).records().keys() == {2}


class Cache:
    """Of an encoded home: says which pages are closed, and remembers what was adopted."""

    def __init__(self):
        self.pages, self.adopted = set(), []

    def closed(self, pages):
        return self.pages.issuperset(pages)

    def adopt(self, pages):
        self.adopted += pages


def test_encoded_blocks_wait_until_all_their_pages_are_closed(tmp_path):
    home, parts = home_store(tmp_path)
    caches = [Cache(), Cache()]
    home.attach(parts, home.lost, caches, 2)
    commit(home, 1, 2)
    caches[0].pages = {2, 3, 4, 5}
    caches[1].pages = {2, 3, 4}
    home.end_step(StoreStep())
    settle(home)
    assert reader(tmp_path, home).records().keys() == {1}
    home.begin_step(StoreStep(void=[2]))  # it is overwritten before
    caches[1].pages.add(5)
    home.end_step(StoreStep())
    settle(home)
    assert reader(tmp_path, home).records().keys() == {1}
    home.begin_step(StoreStep(load=[1]))
    assert [cache.adopted for cache in caches] == [[2, 3]] * 2


class SlowDisk:
    """Takes the place of ``os.pwrite``: lets the writer's thread wait, and nobody else."""

    def __init__(self, monkeypatch):
        self.go, self.began, self._pwrite = threading.Event(), threading.Event(), os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, *arguments):
        if threading.current_thread().name.startswith("store-write"):
            self.began.set()
            assert self.go.wait(30)
        return self._pwrite(*arguments)


def test_steps_do_not_wait_for_the_disk(tmp_path, monkeypatch):
    """What they overwrite meanwhile is not stored; what they do not is stored as it was."""
    home, parts = home_store(tmp_path)
    disk = SlowDisk(monkeypatch)
    home.end_step(StoreStep(commit=[(block, record(block)) for block in (1, 2, 3)]))
    assert disk.began.wait(30)
    before = [part[3].clone() for part in parts]
    home.begin_step(StoreStep(void=[2]))
    for part in parts:
        part[2] += 1
    late = threading.Thread(target=home.begin_step, args=(StoreStep(void=[1]),))
    late.start()
    late.join(0.2)
    assert late.is_alive(), "a block is overwritten while its record is being written"
    disk.go.set()
    late.join()
    home.close()
    store = reader(tmp_path, home)
    assert [(b, store.intact(b, r)) for b, r in store.records().items()] == [(3, True)]
    assert store.read_side(3) == bytes(before[0].tolist() + before[1].tolist())


def test_the_end_waits_for_the_disk(tmp_path, monkeypatch):
    """A worker that is stopped stores what it has been told to store."""
    home, _ = home_store(tmp_path)
    disk = SlowDisk(monkeypatch)
    home.end_step(StoreStep(commit=[(block, record(block)) for block in range(4)]))
    worker = storing(home)
    monkeypatch.setattr(CPUWorker, "shutdown", lambda self: ended.append(True))
    ended: list[bool] = []
    end = threading.Thread(target=worker.shutdown)
    end.start()
    end.join(0.2)
    assert not ended
    disk.go.set()
    end.join()
    assert ended
    assert len(reader(tmp_path, home).records()) == 4
    hold(tmp_path, home, "worker-lock", 0).wait()


def test_a_full_disk_ends_storing_not_serving(tmp_path, monkeypatch):
    home, _ = home_store(tmp_path)
    disk = FailingDisk(monkeypatch)
    disk.error = errno.ENOSPC
    for block in range(PATIENCE):
        disk.left = 0
        commit(home, block)
    before = disk.calls
    commit(home, 5)
    assert disk.calls == before
    assert reader(tmp_path, home).records() == {}


def test_what_cannot_be_loaded_is_told(tmp_path, monkeypatch):
    home, _ = home_store(tmp_path)
    commit(home, 1, 2)

    def fail(fd, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    home.begin_step(StoreStep(load=[1, 2]))
    assert home.lost.take() == {1, 2}


def test_a_second_server_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(store_worker, "STOPS_S", 0.2)
    home, _ = home_store(tmp_path)
    home._lock.close()
    holder = hold(tmp_path, home, "lock", 60)
    try:
        with pytest.raises(RetrievalConfigError, match=f"in use by process {holder.pid};"):
            WorkerStore(str(tmp_path / "store"), IDENTITY)
    finally:
        holder.kill()
        holder.wait()
    WorkerStore(str(tmp_path / "store"), IDENTITY)


def test_a_worker_that_ends_its_step_is_waited_for(tmp_path, monkeypatch):
    home, _ = home_store(tmp_path)
    home._lock.close()
    holder = hold(tmp_path, home, "worker-lock", 60)
    events, waits = [], threading.Event()
    monkeypatch.setattr(store_worker.logger, "info", lambda *_: waits.set())

    def start():
        WorkerStore(str(tmp_path / "store"), IDENTITY)._lock.close()
        events.append("has started")

    later = threading.Thread(target=start)
    later.start()
    assert waits.wait(30)
    later.join(0.2)
    events.append("the earlier one ends")
    holder.kill()
    holder.wait()
    later.join()
    assert events == ["the earlier one ends", "has started"]
    holder = hold(tmp_path, home, "worker-lock", 60)
    monkeypatch.setattr(store_worker, "WAIT_S", 0.2)
    with pytest.raises(RetrievalConfigError, match="in use by process"):
        WorkerStore(str(tmp_path / "store"), IDENTITY)
    holder.kill()
    holder.wait()


def test_other_sizes_are_refused(tmp_path):
    home, _ = home_store(tmp_path)
    home.close()
    later: Any = WorkerStore(str(tmp_path / "store"), IDENTITY)
    with pytest.raises(RetrievalConfigError, match="another division of memory"):
        later.file(Geometry(BLOCKS, 2, 64, DENSE))
    cache = SimpleNamespace(blocks_for=lambda seats: 4, max_model_len=2048, retrieval_layers=2)
    assert not later.has_dense(cache)
    cache.retrieval_layers = 1
    assert later.has_dense(cache)
    config = SimpleNamespace(home_bytes=None)
    assert later.blocks_for(cache, config, None) == BLOCKS
    assert later.blocks_for(cache, SimpleNamespace(home_bytes=BLOCKS * 128 + 5), None) == BLOCKS
    with pytest.raises(RetrievalConfigError, match=r"override 7: the store .* has 6 blocks"):
        later.blocks_for(cache, config, 7)
    with pytest.raises(RetrievalConfigError, match=r"home_bytes=640 \(5 blocks\): the store"):
        later.blocks_for(cache, SimpleNamespace(home_bytes=640), None)
    cache.blocks_for = lambda seats: 8
    with pytest.raises(RetrievalConfigError, match="one request needs 8 blocks"):
        later.blocks_for(cache, config, None)
    assert home.name == later.name


def test_every_value_of_the_weights_counts():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).bfloat16()
    before = weights_hash(model)
    assert weights_hash(model) == before
    with torch.no_grad():
        model[1].bias[1] += 1
    assert weights_hash(model) != before
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).bfloat16()
    other.load_state_dict(model.state_dict())
    assert weights_hash(other) == weights_hash(model)
    assert weights_hash(other.half()) != weights_hash(model)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


@pytest.fixture
def name(tmp_path):
    """Makes the name of the store of an engine, whose model is a config.json."""

    def make(model=(), weights=("w",), layers=("0",), retrieval=(), **options):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | dict(model)))
        retrieval = {"home": "disk", "store": str(tmp_path / "store")} | dict(retrieval)
        options = {"skip_tokenizer_init": True, "attention_backend": "kvretrieval"} | options
        config = EngineArgs(
            model=str(tmp_path), additional_config={"kv_retrieval": retrieval}, **options
        ).create_engine_config()
        own = RetrievalConfig.from_vllm(config)
        assert own is not None
        return name_of(identity_of(config, own, layers, weights))

    return make


def test_what_makes_another_store(name, monkeypatch):
    first = name()
    others = [
        name(weights=("v",)),
        name(weights=("w", "w")),
        name(model={"rope_theta": 5e5}),
        name(dtype="float32"),
        name(layers=("0", "1")),
        name(retrieval={"codec": "k8v4"}),
        name(retrieval={"page_size": 64}),
        name(retrieval={"index": "min_max"}),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "another")
        others.append(name(dtype="bfloat16"))
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    others.append(name())
    assert len({first, *others}) == 1 + len(others)


def test_what_does_not(name):
    assert name(retrieval={"budget": 512, "max_budget": 4096}, max_model_len=1024) == name()


def test_weights_stay_those_of_the_store():
    """A server with a store refuses to load others, by each of vLLM's ways."""
    worker = storing(object())
    for change in (worker.reload_weights, worker.reset_weights, lambda: worker.update_weights({})):
        with pytest.raises(RetrievalConfigError, match="Start it anew with the others"):
            change()
