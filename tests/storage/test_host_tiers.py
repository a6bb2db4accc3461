"""The division of memory if the home of the KV cache is host memory."""

import dataclasses
import mmap
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_worker import Worker

from tests.support.engine import checkpoint
from vllm_kvretrieval.engine.connector import connector_config
from vllm_kvretrieval.engine.cuda import host as host_module
from vllm_kvretrieval.engine.cuda.tiers import BOOKS_PER_SLOT, HostTiers
from vllm_kvretrieval.engine.cuda.worker import RetrievalGPUWorker
from vllm_kvretrieval.engine.memory import workers_here
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.triton import mapped, pages
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.tier_sizes import Cache

GIB = 2**30
LLAMA = Cache(
    retrieval_layers=31,
    dense_layers=1,
    kv_heads=8,
    block_size=32,
    block_bytes=32 * 8 * 256 * 2,
    head_size=128,
    dtype=torch.bfloat16,
    max_num_seqs=8,
    max_model_len=131072,
    step_tokens=8192,
)


def config(**options):
    return RetrievalConfig(**{"method": "freekv", "budget": 2048, **options})


def plan(cache=LLAMA, device=60 * GIB, host=512 * GIB, blocks=None, **options):
    return HostTiers.plan(config(**options), cache, device=device, host=host, blocks=blocks)


def test_a_gpu_serves_eight_long_contexts():
    """Each takes a tenth of the device memory of its whole KV cache, and the rest is at home."""
    tiers = plan()
    assert tiers.blocks == 8 * 4096 + 1
    assert tiers.capacity == 2 * 2048 // 32
    assert tiers.home == tiers.blocks * 31 * LLAMA.block_bytes
    assert tiers.slots == 8 * 8 * 31 * 128 * (32 * 512 + BOOKS_PER_SLOT)
    assert tiers.staging == 2 * 4096 * LLAMA.block_bytes
    assert tiers.device < (tiers.home + tiers.dense) / 9


def test_encoded_pages_take_less_of_the_host():
    """And the raw ones of each request some of the device, before slots do."""
    cache = dataclasses.replace(LLAMA, retrieval_layers=32, dense_layers=0, block_size=128)
    cache = dataclasses.replace(cache, block_bytes=128 * 8 * 256 * 2)
    shape: dict[str, Any] = {"method": "ttkv", "home": "host", "budget": 2048}
    tiers, raw = plan(cache, **shape), plan(cache, **shape, codec="raw")
    unit = 2 * (128 + 128) + 128 * 128 * 3 // 2
    assert tiers.home == tiers.blocks * 32 * 8 * unit
    assert tiers.home / tiers.blocks < 0.39 * raw.home / raw.blocks
    assert raw.open_pages == 0
    assert tiers.open_pages == 8 * 32 * 5 * cache.block_bytes
    assert tiers.device - raw.device == tiers.open_pages
    tight = plan(cache, device=tiers.device - 1, home_bytes=tiers.home, **shape)
    assert tight.capacity == tiers.capacity - 1
    little = plan(cache, host=70 * GIB, **shape), plan(cache, host=70 * GIB, **shape, codec="raw")
    assert little[0].blocks > 2.5 * little[1].blocks


def test_fewer_slots_before_fewer_blocks():
    """There is always room to read ahead into; a home of the user's takes it from requests."""
    whole = plan()
    tight = whole.device - whole.slots // 4
    given = {"home": "auto", "home_bytes": whole.home}
    assert plan(device=tight, **given) == dataclasses.replace(
        whole, capacity=96, slots=whole.slots * 3 // 4
    )
    less = plan(device=tight - 1, **given)
    assert (less.blocks, less.seats) == (whole.blocks, 7)
    assert less.capacity > 96
    tighter = plan(device=whole.device - whole.slots)
    assert tighter.blocks < whole.blocks
    assert (tighter.seats, tighter.capacity) == (8, 128)
    assert tighter.device <= whole.device - whole.slots


def test_the_home_is_bounded():
    """The size is limited by half of host memory, and by four times the device's memory, except for
    a single long request."""
    block = 31 * LLAMA.block_bytes
    assert plan(host=20 * GIB).blocks == 4097
    assert plan(host=60 * GIB).home <= 30 * GIB < plan(host=60 * GIB).home + block
    many = dataclasses.replace(LLAMA, max_num_seqs=64)
    assert plan(many, host=2048 * GIB).home <= 240 * GIB < plan(many, host=2048 * GIB).home + block
    assert plan(many, host=512 * GIB, home_bytes=500 * GIB, home="auto").home > 499 * GIB


def test_sizes_that_the_user_sets():
    tiers = plan(home="auto", home_bytes=30 * GIB, recall_cache_bytes=2 * GIB)
    assert tiers.blocks == 30 * GIB // (31 * LLAMA.block_bytes)
    assert tiers.slots <= 2 * GIB
    assert (tiers.seats, tiers.capacity) == (8, 66)
    fewer = plan(home="auto", recall_cache_bytes=GIB)
    assert (fewer.seats, fewer.capacity) == (4, 66)
    assert plan(blocks=5000).blocks == 5000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": 2 * GIB}, "(?s)4097 blocks .*of 2.0 GiB of the device"),
        ({"host": 10 * GIB}, "(?s)15.5 GiB of host memory.* There are 10.0 GiB"),
        ({"blocks": 4096}, "override 4096: 4097 blocks"),
        ({"blocks": 10**6}, "override 1000000: 1000000 blocks"),
        ({"home": "auto", "home_bytes": 600 * GIB}, "home_bytes=.*There are 512.0 GiB"),
        ({"home": "auto", "recall_cache_bytes": GIB // 8}, "recall_cache_bytes=134217728 is too"),
    ],
)
def test_what_does_not_fit_is_refused(given, words):
    with pytest.raises(RetrievalConfigError, match=words):
        plan(**given)


def test_a_model_of_short_contexts():
    """Staging takes a step's tokens, were they one request's."""
    small = dataclasses.replace(LLAMA, max_model_len=4096, dense_layers=0)
    assert plan(small).staging == 2 * 8192 // 32 * LLAMA.block_bytes


def test_fewer_blocks_where_another_worker_has_less_room():
    """Sizes that grow with blocks shrink. All others stay as planned."""
    whole = plan()
    assert whole.of(whole.blocks) == whole
    fewer = whole.of(3 * 4096)
    given = plan(blocks=3 * 4096)
    assert fewer == dataclasses.replace(given, capacity=whole.capacity, slots=whole.slots)


# ------------------------------------------------------------------------------ vLLM's defaults

GPUS = {
    "NVIDIA H100 80GB HBM3": 80,
    "NVIDIA H200": 141,
    "NVIDIA A100-SXM4-80GB": 80,
    "NVIDIA A100-SXM4-40GB": 40,
    "NVIDIA L40S": 48,
    "NVIDIA GeForce RTX 4090": 24,
}


def batch_defaults(monkeypatch, name, gib):
    """Requests at once, and tokens of a step, that vLLM sets by itself on a GPU."""
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda: gib * GIB)
    monkeypatch.setattr(current_platform, "get_device_name", lambda: name)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    tokens, seqs = EngineArgs.get_batch_defaults(1)
    return {(seqs[usage], tokens[usage]) for usage in (*UsageContext,) if usage in seqs}


@pytest.mark.parametrize("method", ["freekv", "kvretrieval", "quest", "streamingllm"])
@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_starts_at_vllms_defaults(monkeypatch, gpu, method):
    """Llama-3.1-8B with its 128K, in host memory of all sizes, that eight workers share or one."""
    defaults = batch_defaults(monkeypatch, gpu, GPUS[gpu])
    assert max(seqs for seqs, _ in defaults) == (1024 if "H" in gpu else 256)
    # vLLM's share of memory, less weights, and what steps, graphs, scores and lists take.
    room = int(GPUS[gpu] * 0.92 * GIB) - 19 * GIB
    for seqs, tokens in defaults:
        cache = dataclasses.replace(LLAMA, max_num_seqs=seqs, step_tokens=tokens)
        for host in (24, 64, 128, 256, 512, 1024, 2048):
            tiers = plan(cache, room, host * GIB, method=method)
            assert tiers.device <= room
            assert tiers.capacity >= 1.5 * 2048 / 32
            assert 4096 < tiers.blocks <= cache.blocks_for(tiers.seats)
            one = 4097 * 31 * LLAMA.block_bytes
            assert tiers.home <= max(one, min(host * GIB // 2, 4 * room))
            assert tiers.seats >= max(1, room // GIB - 2)
            assert tiers.seats == seqs or tiers.device > 0.9 * room


def planned(monkeypatch, host, **options):
    """The plan of a worker, with so much available host memory."""
    monkeypatch.setattr(host_module, "available_memory", lambda: host)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    engines = options.pop("engines", 1)
    vllm_config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=1024,
            max_num_active_seqs=None,
            max_num_batched_tokens=8192,
            disable_hybrid_kv_cache_manager=False,
        ),
        model_config=SimpleNamespace(max_model_len=131072, model="somebody/model"),
        parallel_config=SimpleNamespace(local_world_size=2, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(num_gpu_blocks_override=None, kv_offloading_size=None),
        kv_transfer_config=connector_config(engines),
        attention_config=SimpleNamespace(hisparse_config=None),
        num_speculative_tokens=0,
    )
    specs = {f"layers.{number}": spec for number in range(32)}
    own = RetrievalConfig.from_options("freekv", options)
    return host_module.plan_tiers(vllm_config, own, specs, lambda names: [*names][1:], 51 * GIB)


def test_auto_stays_on_the_device_where_the_host_cannot_serve(monkeypatch):
    enough, little = 2 * 17 * GIB + host_module.SPARE, 2 * 15 * GIB + host_module.SPARE
    assert planned(monkeypatch, enough, home="auto").blocks == 4097
    assert planned(monkeypatch, little, home="auto") is None
    with pytest.raises(RetrievalConfigError, match=r"There are 15.0 GiB of host memory"):
        planned(monkeypatch, little, home="host")


def test_engines_of_data_parallelism_share_the_host(monkeypatch):
    """Two workers of each of four engines take no more than there is."""
    host = 512 * GIB
    alone = planned(monkeypatch, host, home="host")
    shared = planned(monkeypatch, host, home="host", engines=4)
    assert 8 * shared.home < host / 2 < 8 * alone.home
    options = {"home": "disk"}
    vllm_config = EngineArgs(
        model=checkpoint("SmolLM2-135M-Instruct"),
        attention_backend="freekv",
        additional_config={"kv_retrieval": options},
        data_parallel_size=4,
    ).create_engine_config()
    vllm_config.parallel_config.reconfigure_for_independent_dp_rank()  # as in an engine's process
    assert workers_here(vllm_config) == 4


def test_a_plan_of_an_earlier_start_is_no_wish_of_the_users(monkeypatch):
    """VLLM_ENABLE_STARTUP_PLAN: the second start leaves as much room for indexes as the first."""
    own: Any = object.__new__(RetrievalGPUWorker)
    own.vllm_config = EngineArgs(
        model=checkpoint("SmolLM2-135M-Instruct"), attention_backend="freekv"
    ).create_engine_config()
    own.vllm_config.cache_config.kv_cache_layout = "LBHNC"
    own.cache_config, own.model_config = own.vllm_config.cache_config, own.vllm_config.model_config
    own.scheduler_config = own.vllm_config.scheduler_config
    own.model_runner = SimpleNamespace(
        retrieval_config=config(),
        model_memory_usage=0,
        retrieving=list,
        roles={},
        heads=SimpleNamespace(room=None),
    )
    own.requested_memory = 2 * GIB
    spec = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    own.get_kv_cache_spec = lambda: {f"model.layers.{number}": spec for number in range(30)}

    def first(worker):
        return GIB

    def second(worker):
        worker.cache_config.kv_cache_memory_bytes = GIB
        return GIB

    sizes = []
    for start in (first, second):
        monkeypatch.setattr(Worker, "determine_available_memory", start)
        sizes.append(own.determine_available_memory())
    assert sizes[0] == sizes[1] < GIB
    assert own.determine_available_memory() == GIB, "now it is one"


# ------------------------------------------------------------------------------------ host memory


def test_memory_is_provided_by_several_threads(monkeypatch):
    """Before anybody touches it."""
    monkeypatch.setattr(pages, "PIECE", 1 << 21)
    nbytes = (64 << 20) + mmap.PAGESIZE
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        before = psutil.Process().memory_info().rss
        pages.populate(memory.data_ptr(), nbytes, threads=3)
        assert psutil.Process().memory_info().rss - before >= 64 << 20
        assert not memory.any()
        address = memory.data_ptr()
        del memory
    with pytest.raises(MemoryError, match=r"does not provide 0\.1 GiB of host memory"):
        pages.populate(address, nbytes, threads=3)


def test_memory_comes_from_the_gpus_node(tmp_path):
    for text, node in (("1\n", 1), ("-1\n", None), ("", None)):
        (tmp_path / "numa_node").write_text(text)
        assert pages.node_of_pci(tmp_path) == node
    assert pages.node_of_pci(tmp_path / "none") is None
    with mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        address = memory.data_ptr()
        if not pages.prefer_node(address, 1 << 20, 0):
            pytest.skip("this system does not let processes place memory")
        memory.fill_(1)
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
        (policy,) = (line.split()[1] for line in lines if line.startswith(f"{address:x} "))
        assert policy in ("prefer:0", "prefer=relative:0")
        del memory


def test_memory_is_not_unlocked_when_the_process_ends(monkeypatch):
    """CUDA may be gone by then; when the memory's last tensor goes it is."""
    calls: list[str] = []
    made: list[weakref.finalize[Any, Any]] = []

    def lock(*args):
        calls.append("lock")
        return 0

    class Recorded(weakref.finalize):  # type: ignore[type-arg]
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    cudart = SimpleNamespace(
        cudaHostRegister=lock, cudaHostUnregister=lambda address: calls.append("unlock")
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(mapped, "node_of", lambda device: 0)
    monkeypatch.setattr(mapped, "_device_address", lambda address: address)
    monkeypatch.setattr(weakref, "finalize", Recorded)
    mapping = mapped._Mapping(1 << 21, torch.device("cuda:0"))
    assert calls == ["lock"]
    assert [finalizer.atexit for finalizer in made] == [False]
    del mapping
    assert calls == ["lock", "unlock"]
