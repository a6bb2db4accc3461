"""The prefix cache.

`--prefix-cache-retention-interval` is 0 by default: of layers with windows only the blocks at the
end of a prompt are kept, and those where two requests were seen to part.
"""

import inspect
import json
from typing import Any

import msgspec
import pytest
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.file_mapper import FileMapper

from benchmarks.stepper import Stepper, full_attention
from tests.support.model_configs import GEMMA
from tests.surprises.cache import BLOCK, CHUNK, FULL, WINDOW, Cache, request, tokens
from tests.surprises.rows import LATEST, surprise

DOCUMENT = tokens(128 * BLOCK, 1000)
KEPT = (
    "the plug-in keeps all blocks of windows, so that the second request hits, unless an interval "
    "is given"
)


def questions(cache, count=3):
    """How much of a document each of some requests finds that share it, and nothing else."""
    return [cache.ask(DOCUMENT + tokens(512, 10_000 * (i + 1))) for i in range(count)]


@surprise(
    "config/cache.py v1/core/single_type_kv_cache_manager.py",
    expected="the second request about a document finds it in the cache",
    happens="in a model that mixes full attention with windows the third does",
    remedy=KEPT,
)
def test_a_document_is_found_by_the_third_request():
    whole = len(DOCUMENT)
    assert questions(Cache(FULL, WINDOW)) == [0, 0, whole]
    assert questions(Cache(FULL, WINDOW, interval=None)) == [0, whole, whole]
    assert questions(Cache(FULL)) == [0, whole, whole]


@surprise(
    "v1/core/single_type_kv_cache_manager.py",
    expected="the next turn of a chat finds what was said before",
    happens="in a model with windows up to the first prompt; the answer is read again",
    remedy=KEPT,
)
def test_a_turn_finds_the_first_prompt_only():
    answer = [5] * 100
    turn = DOCUMENT + answer + tokens(500, 50_000)
    for interval, found in ((0, len(DOCUMENT) - BLOCK), (None, len(DOCUMENT) + 96)):
        cache = Cache(FULL, WINDOW, interval=interval)
        cache.ask(DOCUMENT, answer)
        assert cache.ask(turn) == found


@surprise(
    "v1/core/single_type_kv_cache_manager.py",
    expected="a model whose layers all slide shares documents as others do",
    happens="never: only a prompt that goes on where an earlier one ended hits",
    remedy=KEPT,
)
def test_windows_alone_share_nothing():
    assert questions(Cache(WINDOW), 5) == [0] * 5
    cache = Cache(WINDOW)
    cache.ask(DOCUMENT)
    assert cache.ask(DOCUMENT + tokens(100, 1)) == len(DOCUMENT) - BLOCK


@surprise(
    "v1/core/single_type_kv_cache_manager.py",
    expected="to go back in a chat costs no more than to go on",
    happens="in a mixed model the first request from an earlier point finds nothing, the second "
    "all",
    remedy=KEPT,
)
def test_going_back_finds_nothing_the_first_time():
    cache = Cache(FULL, WINDOW)
    cache.ask(DOCUMENT + tokens(600, 50_000))
    assert [cache.ask(DOCUMENT + tokens(100, 60_000 + i)) for i in (0, 200)] == [0, len(DOCUMENT)]


@surprise(
    "v1/core/single_type_kv_cache_manager.py",
    expected="speculative decoding by EAGLE leaves the prefix cache as it is",
    happens="where the draft's layers share the group of the windows, no request hits a shared "
    "document",
    newer={"0.33": "from the third request on they hit, all but a block"},
    remedy="the plug-in refuses EAGLE beside windows; stock vLLM: set the interval to the block "
    "size",
)
def test_eagle_and_windows():
    groups = [KVCacheGroupSpec(["0"], FULL), KVCacheGroupSpec(["1"], WINDOW, is_eagle_group=True)]
    for interval in (0, BLOCK):
        cache = Cache(FULL, WINDOW)
        cache.manager = KVCacheManager(
            KVCacheConfig(2000, [], groups, prefix_cache_retention_interval=interval),
            max_model_len=8192, scheduler_block_size=BLOCK, hash_block_size=BLOCK,
            max_in_flight_tokens=CHUNK, use_eagle=True,
        )  # fmt: skip
        found = len(DOCUMENT) - BLOCK
        second = found if interval else 0
        assert questions(cache, 4) == [0, second, *[found if interval or LATEST else 0] * 2]


@surprise(
    "sampling_params.py v1/core/kv_cache_manager.py",
    expected="`prompt_logprobs: 0` asks for little, and reads the prefix cache",
    happens="it does not, and its tokens are not counted as queries, so rates of hits look better",
    remedy="leave it out where the log-probs of the prompt are not needed",
)
def test_prompt_logprobs_skip_the_cache():
    cache, prompt = Cache(FULL, log_stats=True), tokens(40, 0)
    asked = []
    sampling: dict[str, Any]
    for sampling in ({}, {}, {"prompt_logprobs": 0}):
        found = cache.ask(prompt, (), **sampling)
        asked.append((found, cache.manager.make_prefix_cache_stats().queries))
    assert asked == [(0, 40), (32, 40), (0, 0)]


@surprise(
    "v1/core/kv_cache_utils.py",
    expected="hashes of blocks differ between processes, unless PYTHONHASHSEED is set",
    happens="they agree, on all machines",
    remedy="nothing is needed for replicas to share a store; set PYTHONHASHSEED where tenants "
    "must not be able to guess them",
)
def test_hashes_agree_between_processes():
    """Another process has computed this one."""
    (found,) = request(tokens(BLOCK, 0)).block_hashes
    assert found.hex() == "fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798"


@surprise(
    "v1/core/kv_cache_utils.py v1/core/block_pool.py",
    expected="a LoRA adapter is known to the cache by its name",
    happens="by its path: of one name at two paths the blocks differ. Events of the cache show "
    "the name alone",
    remedy="mount adapters at the same path on all replicas",
)
def test_an_adapter_is_known_by_its_path():
    one, two = (
        request(tokens(BLOCK, 0), lora=LoRARequest("adapter", 1, f"/adapters/{name}"))
        for name in ("one", "two")
    )
    assert one.block_hashes != two.block_hashes
    told = str(events(one)[0].extra_keys)
    assert "adapter" in told
    assert "/adapters" not in told


def events(asked):
    """What the cache reports of a request's blocks."""
    pool = BlockPool(11, True, BLOCK, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(len(asked.block_hashes))
    pool.cache_full_blocks(asked, blocks, 0, len(blocks), BLOCK, 0)
    return pool.take_events()


@surprise(
    "distributed/kv_events.py v1/core/block_pool.py",
    expected="events of the cache have one form, and a CPU's blocks say so",
    happens="a batch is an array, the events in it are maps; `medium` is `GPU` on CPUs, too",
    remedy="read both forms; do not route by `medium`",
)
def test_events_mix_forms():
    batch = KVEventBatch(ts=1.0, events=events(request(tokens(2 * BLOCK, 0))), data_parallel_rank=0)
    _, (event,), _ = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert (event["type"], event["medium"]) == ("BlockStored", "GPU")


@surprise(
    "v1/core/block_pool.py",
    expected="the block that is given out next is the one that was not used for longest",
    happens="a freed block without a hash comes first, such as the last one of a request",
    remedy="nothing; a cached block lives longer than by age alone",
)
def test_unhashed_blocks_come_first():
    pool, asked = BlockPool(11, True, BLOCK), request(tokens(2 * BLOCK + 5, 0))
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(asked, blocks, 0, 2, BLOCK, 0)
    never_used = pool.get_num_free_blocks()
    pool.free_blocks(reversed(blocks))
    assert never_used
    assert pool.get_new_blocks(1)[0] is blocks[2]


@pytest.mark.model
@surprise(
    "v1/core/sched/scheduler.py",
    expected="a prompt that fits a step is read in one",
    happens="not in a hybrid with the prefix cache: a step ends at the last border of a block, "
    "and one "
    "that is no multiple of the block is cut to it",
    remedy="set `--max-num-batched-tokens` to a multiple of the block, which for hybrids the "
    "log names",
)
def test_steps_of_hybrids_end_at_blocks():
    def steps(tokens, budget, *groups):
        stepper = Stepper(
            {}, groups=[full_attention(128), *groups], scheduler=Scheduler,
            max_num_batched_tokens=budget,
        )  # fmt: skip
        counts = []
        stepper.look = lambda step: counts.append(step.total_num_scheduled_tokens)
        stepper.add([1] * tokens, 1)
        stepper.run()
        return [count for count in counts if count]

    state = MambaSpec(
        block_size=128, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    assert steps(300, 512) == [300]
    assert steps(300, 512, state) == [256, 44]
    assert steps(1000, 500, state)[:2] == [384, 384]


@pytest.mark.model
@surprise(
    "v1/core/kv_cache_manager.py",
    expected="`cached_tokens` says what was there before a request came",
    happens="of a request with `n=3` its second sequence finds the blocks of the first: a new "
    "prompt "
    "of 300 tokens is told to have had 256 of them",
    remedy="count by the metrics `vllm:prefix_cache_hits` and `_queries`, or ask with `n=1`",
)
def test_sequences_of_a_request_share():
    stepper = Stepper(
        {}, groups=[full_attention(128)], scheduler=Scheduler, max_num_batched_tokens=2048
    )
    for _ in range(3):
        stepper.add([1] * 300, 1)
    stepper.run()
    assert sorted(stepper.shared.values()) == [[0], [256], [256]]


@surprise(
    "v1/kv_offload/cpu/manager.py",
    expected="the CPU tier of KV offloading keeps the head of a prompt that is longer than the "
    "tier",
    happens="it keeps the tail, which no lookup finds",
    remedy="give the tier room for the longest prompt",
)
def test_the_tier_keeps_the_tail():
    tier, asked = CPUOffloadingManager(num_chunks=8, cache_policy="lru"), ReqContext(req_id="a")
    keys = [make_offload_key(b"%032d" % number, 0) for number in range(12)]
    tier.on_new_request(asked)
    for first in range(0, 12, 3):
        assert tier.prepare_store(keys[first : first + 3], asked)
        tier.complete_store(keys[first : first + 3], asked)
    kept = [number for number in range(12) if tier.lookup(keys[number], asked).name == "HIT"]
    assert kept == [*range(4, 12)]


@surprise(
    "v1/kv_offload/file_mapper.py",
    expected="the file tier of KV offloading knows the weights",
    happens="it knows the name of the model: revisions, and weights that were replaced, share "
    "files",
    remedy="a folder for each revision; our store hashes the weights",
)
def test_files_do_not_know_weights():
    known = set(inspect.signature(FileMapper).parameters)
    assert "model_name" in known
    assert not [name for name in known if "revision" in name or "weight" in name]


@surprise(
    "v1/core/kv_cache_manager.py",
    expected="a prompt that is asked again is in the cache, but for its last token",
    happens="but for its last block, if it ends with one: 128 tokens on CPUs, more in hybrids",
    remedy="nothing; compare hit rates of short prompts with that in mind",
)
def test_the_last_block_is_read_again():
    for size in (len(DOCUMENT), len(DOCUMENT) + 1):
        cache = Cache(FULL)
        cache.ask(tokens(size, 0))
        assert cache.ask(tokens(size, 0)) == (size - 1) // BLOCK * BLOCK


def test_the_plugin_keeps_windows(tmp_path):
    """What the last column says of windows."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    for given, kept in ((0, None), (512, 512)):
        config = EngineArgs(
            model=str(tmp_path), attention_backend="freekv", skip_tokenizer_init=True,
            prefix_cache_retention_interval=given,
        ).create_engine_config()  # fmt: skip
        assert config.cache_config.prefix_cache_retention_interval == kept
